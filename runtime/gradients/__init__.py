"""Data parallelism: who averages which gradients, when, and in what form.

- `synchronisation.py`: all of it for one module, made from a strategy, and made anew when that changes.
- `fsdp.py`: ZeRO levels as FSDP2; `copies.py`: parameters that it leaves alone, in the dtype that is computed in.
  `own_outputs.py`: what its units return, that it may be changed in place.
- `replicated.py`: what FSDP2 does not do: buckets (`buckets.py`) over replicas, sums over tp, norms and clipping.
- `replicas.py`: what reduces over which ranks, from the strategy. `reductions.py`: all-reduces of buffers, at once or level
  by level; `sharded.py`: what FSDP2's units do instead of the backend's reduce-scatter, `gathered.py`: of its all-gather;
  `exchanges.py`: what both are made of; `point_to_point.py`: rings and trees.
- `groups.py`: the process groups of a strategy. `codecs.py`: what methods make of numbers; `feedback.py`: what is
  left out, and sent later; `owed.py`: that, for checkpoints; `agreement.py`: copies over tp, kept equal.
- `outer.py`: replicas that train by themselves, and exchange what they have become.
- `dense.py`: embeddings with sparse gradients get dense ones.
- `put_off.py`: a backward pass in two halves by linear layers that put the gradients of their weights off; `split_backward.py`: of any
  graph, which keeps all of it until the second half.

Open to other rooms: `codecs`, `dense`, `feedback`, `fsdp`, `replicated`, `replicas`, `reductions`, `groups`, `owed`, `agreement`, `outer`, `put_off`, `split_backward`,
`synchronisation`.
"""
