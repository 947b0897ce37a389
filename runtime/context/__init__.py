"""Context parallelism: the user's code computes on a share of the sequence.

- `functions.py`: the mode under which it does, function by function.
- `attention.py`, `loss.py`, `products.py`, `random_numbers.py`: what runs on shares without DTensor's help.
- `rows.py`: layers whose own functions compute row by row.
- `values.py`: how tensors enter and leave shares, and whose gradients are sums.

Open to other rooms: `functions`, `rows`, `values`.
"""
