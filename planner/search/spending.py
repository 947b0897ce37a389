"""What each step of the search costs, in milliseconds as measured once on one core.

Only their sum matters, for a limit that is the same on every machine. Kind: measured.
"""

from __future__ import annotations

PER_VARIANT = 0.001  # bounded as a whole
PER_RANK = 0.0005  # and rank by rank
PER_PLACEMENT = 5.0  # blocks priced where a mesh places them
PER_TENSOR_PLACEMENT = 40.0  # likewise where that asks for a tensor-parallel plan of its own
PER_STAGE_PROBLEM = 0.6
PER_SOLVE = 0.7  # of a stage problem with a choice; and more
PER_CHUNK = 0.1  # for each of its chunks where blocks are alike,
PER_UNLIKE_CHUNK = 0.8  # or not
PER_SIMULATION = 1.0
PER_BLOCK_SIMULATED = 0.02
PER_ACTION_LAID_OUT = 0.008  # a schedule is laid out once,
PER_ACTION_WALKED = 0.0004  # and walked by every simulation
