"""Layers to pipeline stages: the stage problem of one candidate, its relaxation and its solver.

- `inner.py`: from a candidate to its stage problem (`problem.py`: quantities of a chunk, rows over them, partitions), made of
- `forms.py`: what a chunk needs, as integer sums over its blocks, where `ties.py` says which of them count a tensor that several hold;
  `messages.py`: what stages send each other; `once.py`: and besides, however many they are; `peaks.py`: likewise its peaks of memory;
- `paths.py`: paths through the timetable of a schedule; `moments.py`: rows of memory;
- `sizes.py`: how many blocks a chunk may have; `unlike.py`: quantities of each device, where devices are unlike.
- `quick.py`: partitions found quickly, `smallest.py`: likewise where memory is short; `relaxation.py`: what none goes below, as a
  linear program; `solve.py`: the best one, by looking at all that may be (`enumeration.py`), or by CP-SAT in numbers that it can
  multiply (`small_numbers.py`).
"""
