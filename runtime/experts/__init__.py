"""Expert parallelism: each rank holds a share of every layer's experts, and tokens travel to them.

- `modules.py`: which modules are layers of experts. Imports no torch.
- `parallel.py`: a layer lowered over ep; `on_shares.py`: a layer on plain tensors where nothing is shared over ep.
- `trial.py`: what a layer's forward does, found out on two experts.
- `token_exchange.py`: the two exchanges; `token_shares.py`: this rank's tokens, on their way in and out.

Open to other rooms: `modules`, `parallel`, `on_shares`.
"""
