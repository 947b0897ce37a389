"""Lowers a strategy to torch modules and collectives, and runs it.

One way through the rooms, each of which imports only from those named before it:

- `ranks/`: who takes part: the device of a rank, its process groups, the mesh whose axes a strategy names.
- `capabilities/`: what of a strategy runs, and beside what: one table.
- `tensor/`: tensor and sequence parallelism, and the small questions that DTensors raise.
- `context/`: context parallelism.
- `experts/`: expert parallelism.
- `gradients/`: data parallelism: FSDP2, replicas, buckets, what is reduced how; backward passes in two halves.
- `loading/`: values for parameters: initialised, from safetensors, from and to checkpoints.
- `servers/`: rows of embedding tables on other ranks or with parameter servers.
- `memory/`: recomputation, activations and optimizer state on the host, the optimizer.
- `lowering/`: one module, whole or a stage, with all of the above applied in place.
- `stages/`: a module cut into pipeline stages.
- `pipeline/`: stages driven by the actions of a program.
- `own_checkpoints.py`: checkpoints of the model's own code, which everything that computes meets.
- `limits.py`: the same asked for a graph and a cluster: what a search leaves out.
- `start.py`: from strategy and module to a running module: `parallelize`.
- `check/`: dry runs, and what a rank sends against what was priced.
- `checkpoints/`: what outlives a process: samples consumed, state saved beside training.
- `guards/`: what finds out that a run has gone wrong, and who is to blame.
- `monitor/`: how a run is doing, against its plan and among its ranks.
- `elastic/`: processes that come and go, around torch's agent.
- `profiling/`: measures a machine; needs `ranks/`, `tensor/` and `gradients/` alone.
- `torch_private.py`: the file that touches torch's private names; `fsdp_private.py` has those of FSDP2, `dtensor_private.py`
  those of how DTensor finds what an operator does, `collectives_private.py` those by which torch sends.
"""
