"""What outlives a process: which samples were trained on, and the state after them.

- `ledger.py`: the order of samples and how far it is consumed, whatever the strategy and the number of ranks.
- `identity.py`: hashes of a model and of a dataset, by which a folder is told from another run's.
- `folder.py`: the folder of a run: its lock, its checkpoints by name, retention.
- `manifest.py`: what a checkpoint holds, as JSON: no pickle.
- `nests.py`: nested state as leaves by name.
- `shares.py`: a rank's tensors written to and read from one file, for `torch.distributed.checkpoint`.
- `results.py`: what saving and loading hand back.
- `neighbours.py`: copies in the memory of neighbouring nodes.
- `keeper.py`: `Checkpoints`: saves beside training, commits once all ranks have written, loads the last good one.
- `in_memory.py`: state under one strategy given to the model under another, without files.
- `signals.py`: SIGTERM and its like, acted on by all ranks at the end of the same step.

Open to other rooms: `ledger`, `identity`, `folder`, `manifest`, `keeper`, `signals`, `in_memory`.
"""
