"""Capture: a module becomes a `ModelGraph`. The only part of planning that needs torch."""

from __future__ import annotations

from autoparallel.planner.capture.model_graph import capture

__all__ = ["capture"]
