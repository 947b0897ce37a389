"""Capture: a module becomes a `ModelGraph`. The only part of planning that needs torch."""

from __future__ import annotations

from autoparallel.costmodel.collecting import without_collection

with without_collection():  # importing torch makes a million objects and hardly a cycle
    from autoparallel.planner.capture.model_graph import capture

__all__ = ["capture"]
