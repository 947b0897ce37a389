"""What operators, collectives and bytes cost, and what a program of them costs.

- `graph.py`, `graph_json.py`, `block_index.py`: what a model computes, its file, and look-ups over one block.
- `program.py`, `program_text.py`, `program_check.py`: what one step does, its text form, and whether it is legal.
- `fusion.py`, `kernels.py`: which operators run as one kernel, and the seconds that a kernel takes.
- `topology.py`, `links.py`, `collectives.py`: where a group sits on the network, what an irregular one leaves it, and
  the seconds that a collective takes; `compression.py` and `access.py` what compressed gradients and rows of tables do.
- `price.py`: the seconds of every action of a stage (`stage_cost.py`), gradients in buckets (`buckets.py`) beside the
  computation (`streams.py`, `contention.py`).
- `step_collectives.py`: the collectives of a step, and what they cost by kind and network level.
- `timetable.py`, `timeline.py`: when each action runs, and the same as a picture.
- `memory.py`, `host_memory.py`, `held.py`: live bytes on devices, on hosts, and both against what there is.
- `simulate.py` makes a `prediction.py` of all this; `confidence.py` says how far to trust it, of which `parts.py`.
- `recovery.py`: what failures cost, by the way that a run recovers.
- `fit.py`, `fit_device.py`, `fit_collectives.py`, `fit_table.py` (of a `kernel_table.py`), `calibrate.py`: constants from measurements.

`collecting.py` keeps Python's cyclic collector out of large builds.
"""
