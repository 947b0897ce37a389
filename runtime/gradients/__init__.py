"""Data parallelism: who averages which gradients, when, and in what form.

- `fsdp.py`: ZeRO levels as FSDP2.
- `replicated.py`: what FSDP2 does not do: buckets over replicas, sums over tp, norms and clipping.
- `replicas.py`: how replicas reduce, from the strategy; `reductions.py`: the reductions, flat or level by level.
- `compression.py`: which method a group of ranks uses.
- `split_backward.py`: a backward pass in two halves: of what was received, and of the weights.

Open to other rooms: `fsdp`, `replicated`, `replicas`, `reductions`, `compression`, `split_backward`.
"""
