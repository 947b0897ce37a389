"""Measures this machine: kernels, the optimizer and, with several processes, collectives."""

from __future__ import annotations

from autoparallel.runtime.profiling.measure import Measurements, measure_machine

__all__ = ["Measurements", "measure_machine"]
