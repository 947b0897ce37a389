"""What each step of the search costs, in milliseconds as measured once on one core.

Only their sum matters, for a limit that is the same on every machine. Kind: measured.
"""

from __future__ import annotations

PER_SETTING = 0.8  # priced, for each distinct block
PER_VARIANT = 0.001  # bounded as a whole
PER_START = 0.004  # looked at for strategies to start from
PER_RANK = 0.004  # and rank by rank, or chunk by chunk by its schedule's paths
PER_FAMILY_RANK = 0.001  # and a family rank by rank, most of which are ruled out at one look
PER_PASS = 0.7  # over variants, however few
PER_TENSOR_BLOCK = 4.0  # a distinct block priced with a tensor-parallel plan of its own
PER_PLACE = (
    30.0  # a setting priced where blocks do not communicate with neighbours, most of it its tensor plan
)
PER_PLANE = 0.45  # of a schedule's paths weighed, and for each chunk
PER_CHUNK_PLANNED = 0.01
PER_ACTION_PLANNED = 0.00004  # and action of it
PER_RELAXATION = 1.5  # of a stage problem
PER_TERM_RELAXED = 0.005  # and for each term of its rows
PER_TERM_FILLED = 0.001  # likewise, of an easily found partition
PER_STAGE_PROBLEM = 0.6  # and more
PER_CHUNK = 0.2  # for each of its chunks
PER_SIMULATION = 1.0  # and more
PER_BLOCK_SIMULATED = 0.02
PER_STAGE_SIMULATED = 0.2
PER_ACTION_LAID_OUT = 0.018  # a schedule is laid out once,
PER_ACTION_WALKED = 0.0006  # and walked by every simulation
