"""One module, the whole model or a pipeline stage of it, made parallel in place.

- `lower.py`: everything that a strategy asks of one module, in order.
- `parallel_module.py`: the module that `auto_parallelize` returns without a pipeline.
- `members.py`: the names that it adds.
- `micro_batches.py`: a rank's share of the batch, cut and checked; `compiled.py`: repeated blocks by `torch.compile`.

Open to other rooms: `lower`, `parallel_module`, `members`, `micro_batches`, `compiled`.
"""
