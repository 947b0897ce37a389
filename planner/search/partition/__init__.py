"""Blocks to pipeline stages: the stage problem of one candidate, and its solvers.

- `inner.py`: from a candidate to its stage problem (`problem.py`: quantities of a chunk, rows over them, deals), made of
- `forms.py`: what a chunk needs, as integer sums over its blocks; `peaks.py`: likewise its peaks of memory;
- `rows.py`: paths through the schedule, and `paths.py`: the critical one of a simulation; `moments.py`: rows of memory;
- `sizes.py`: how many blocks a chunk may have; `unlike.py`: quantities of each device, where devices are unlike.
- `deals.py`: deals found quickly; `solve.py`: the best one, chunk by chunk (`layers.py`, with `pieces.py`: what a chunk may
  hold, and `dominance.py`: what no other betters) or by CP-SAT in numbers that it can multiply (`small_numbers.py`).
"""
