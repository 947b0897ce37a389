"""What is kept, where, and what is computed again.

- `recompute.py`: blocks, parts of them, or their attention alone, run again in the backward pass; `written_buffers.py`: from
  the buffers that they had.
- `offload.py`: activations on the host; `host_copies.py`: bytes on their way there and back.
- `optimizer.py`: an optimizer whose state lies where the strategy says; `optimizer_state.py`: saved and loaded by name.

Open to other rooms: `recompute`, `offload`, `host_copies`, `optimizer`.
"""
