"""Pipelines: this rank's stages, driven by the actions of the program that was priced.

- `module.py`: the module that `auto_parallelize` returns with a pipeline.
- `executor.py`: the actions, one after another.
- `channels.py`: messages between ranks; `groups.py`: their process groups; `ties.py`: parameters tied across stages.

Open to other rooms: `module`, `channels`, `ties`.
"""
