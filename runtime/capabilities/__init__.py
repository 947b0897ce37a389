"""What of a strategy the runtime runs. Imports no torch.

- `table.py`: the table, and what it is asked.
- `rows.py`: what a row is; `grad_sync.py`: rows about `[grad_sync]` and `[outer]`.

- `models.py`: what the code of a model itself leaves open.

Open to other rooms: `table`, `rows`, `models`.
"""
