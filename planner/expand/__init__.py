"""From a strategy to the program of one step.

- `expander.py`: the way from one to the other; all else answers its questions.
- `axes.py`, `chain.py`: the mesh on the topology, and how the chain of blocks is cut into stages.
- `works.py`: what one device does of each block, made once for all strategies that share it: where values lie
  (`layout.py`), local sizes and kernels (`local.py`), the passes with their collectives (`localize.py`), their bytes
  (`local_memory.py`, `backward_memory.py`); with shares of the sequence (`context.py`), activations on the host (`offload.py`), parameters
  fetched one by one (`one_by_one.py`).
- `state.py`: what data parallelism adds: ZeRO, gradient reduction, the optimizer; `gathers.py`: what ZeRO gathers; `hosted.py`: whose state is on the host;
  `under_way.py`: what reductions hold beside gradients; `deferred.py`: those of split backwards, when a step ends.
- `units.py`: what FSDP2 gathers and reduces at once; `glue.py`: of modules outside of the repeated blocks; `places.py`, `beside.py`: where
  a link stands in its stage, and what stands beside it there; `halves.py`: backward passes in two halves.
- `tables.py`, `cold.py`: embedding tables whose rows stand elsewhere, and what that costs.
- `local_updates.py`: what replicas that train by themselves pay for their exchanges.
- `schedules.py`, `schedule_orders.py`: grids of actions, from the order in which each rank computes.
"""
