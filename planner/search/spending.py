"""What each step of the search costs, in milliseconds as measured once on one core.

Only their sum matters, for a limit that is the same on every machine. Kind: measured.
"""

from __future__ import annotations

PER_VARIANT = 0.001  # bounded as a whole
PER_RANK = 0.0005  # and rank by rank
PER_TENSOR_PLACEMENT = 40.0  # blocks priced with a tensor-parallel plan of their own
PER_PLANE = 5.0  # of a schedule's paths weighed, and for each chunk and action walked
PER_CHUNK_PLANNED = 0.03
PER_RELAXATION = 1.5  # of a stage problem
PER_STAGE_PROBLEM = 0.6  # and more
PER_CHUNK = 0.2  # for each of its chunks
PER_SIMULATION = 1.0  # and more
PER_BLOCK_SIMULATED = 0.02
PER_STAGE_SIMULATED = 0.3
PER_ACTION_LAID_OUT = 0.018  # a schedule is laid out once,
PER_ACTION_WALKED = 0.0006  # and walked by every simulation
