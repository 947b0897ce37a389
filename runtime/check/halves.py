"""Backward passes of a dry run in two halves, as a pipeline runs them where its schedule splits them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from autoparallel.planner.expand.schedules import SOME_WHOLE, SPLIT_BACKWARD
from autoparallel.planner.strategy.types import Strategy
from autoparallel.runtime.gradients.put_off import PutOff, backward_putting_off
from autoparallel.runtime.gradients.split_backward import (
    WeightHalf,
    backward_input,
    backward_input_recomputed,
)
from autoparallel.runtime.torch_private import accumulated_under_modes, gradients_under_modes


def splits(strategy: Strategy) -> bool:
    """Whether the schedule has backward passes in halves."""
    return strategy.pipeline.schedule in SPLIT_BACKWARD


def has_whole_passes(strategy: Strategy) -> bool:
    """Whether a schedule that splits backward passes leaves some of them whole."""
    return strategy.pipeline.schedule in SOME_WHOLE


def first_half(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], received: Sequence[Tensor], weights: Sequence[Tensor],
    *, puts_off: bool, recomputed: bool,
) -> tuple[list[Tensor | None], PutOff | WeightHalf]:  # fmt: skip
    """Gradients of what a stage received, and what is left of the pass (`runtime/pipeline/executor.py`). `recomputed`: its blocks
    run again."""
    if puts_off:
        return backward_putting_off(outputs, gradients, received, weights, gradients_under_modes)
    edges = [get_gradient_edge(t) for t in outputs]
    given = [torch.ones_like(t) if g is None else g for t, g in zip(outputs, gradients, strict=True)]
    if not recomputed:
        return backward_input(edges, given, received)
    found, half = backward_input_recomputed(
        edges, given, received, weights, partial(gradients_under_modes, retain_graph=True)
    )
    half.accumulate = accumulated_under_modes
    return found, half
