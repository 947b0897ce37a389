"""What is kept, where, and what is computed again.

- `recompute.py`: blocks, parts of them, or their attention alone, run again in the backward pass.
- `offload.py`: activations on the host; `host_copies.py`: bytes on their way there and back.
- `optimizer.py`: an optimizer whose state lies where the strategy says; `optimizer_state.py`: saved and loaded by name.

Open to other rooms: `recompute`, `offload`, `host_copies`, `optimizer`.
"""
