"""The strategy: its types, its file, and whether it can run at all.

- `types.py`: every decision as frozen data; `complexity.py`: how much there is to one.
- `file.py`, `write.py`: its file read and written; `schema.py` has the keys, `errors.py` what is wrong in words, `runs.py`
  long lists in short; `fixed.py`: the keys that a user fixes, typed; `stacks.py`: what a software stack says of it.
- `phases.py`: which strategy holds at which step, `lengths.py` with sequences of which length.
- `legal.py`: why a strategy cannot run: device groups (`groups.py`), nodes (`machines.py`), embedding tables
  (`embedding.py`, laws of access in `access_laws.py`), recovery (`recovery.py`), replicas that
  train by themselves (`islands.py`), values that nothing would read (`ignored.py`).
"""
