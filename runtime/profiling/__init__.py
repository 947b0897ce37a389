"""Measures this machine: kernels, the optimizer and, with several processes, collectives.

- `measure.py`: everything that one machine tells; `case.py`: one kernel at one size.
- `products.py`, `memory_bound.py`, `launches.py`: matrix products, kernels that memory bounds, what starting one costs.
- `codings.py`: gradients encoded and decoded.
- `start.py`: the processes; `collectives.py`: what they exchange; `overlap.py`: computing meanwhile.
- `timing.py`: how anything is timed; `bursts.py`: computation of a known length, for what goes on beside it.

Open to other rooms: none.
"""

from __future__ import annotations

from autoparallel.runtime.profiling.measure import Measurements, measure_machine

__all__ = ["Measurements", "measure_machine"]
