"""Backward passes of a dry run in two halves, as a pipeline runs them where its schedule splits them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autoparallel.costmodel.program import ActionKind
from autoparallel.planner.expand.schedules import SOME_WHOLE, SPLIT_BACKWARD, compute_order
from autoparallel.planner.strategy.types import Strategy
from autoparallel.runtime.check.messages import Message
from autoparallel.runtime.gradients.put_off import PutOff, backward_putting_off
from autoparallel.runtime.gradients.split_backward import (
    WeightHalf,
    backward_input,
    backward_input_recomputed,
)
from autoparallel.runtime.torch_private import accumulated_under_modes, gradients_under_modes

SEEN_WHOLE = (
    2  # backward passes, of a schedule that splits others: one that makes gradients, one that finds them
)


def splits(strategy: Strategy) -> bool:
    """Whether the schedule has backward passes in halves."""
    return strategy.pipeline.schedule in SPLIT_BACKWARD


def has_whole_passes(strategy: Strategy) -> bool:
    """Whether a schedule that splits backward passes leaves some of them whole."""
    return strategy.pipeline.schedule in SOME_WHOLE


def whole_passes(strategy: Strategy) -> Counter[int]:
    """How many backward passes of each stage are whole."""
    pipeline = strategy.pipeline
    rows = compute_order(pipeline.schedule, strategy.mesh.pp, pipeline.virtual_stages, strategy.micro_batches)
    return Counter(a.stage for row in rows for a in row if a.kind is ActionKind.BACKWARD)


def as_scheduled(
    traffic: Counter[Message], seen: Mapping[str, Counter[Message]], whole: int
) -> Counter[Message]:
    """What a stage sends with so many backward passes whole, of whose `traffic` the first two were: `seen` is what one sends, and each half
    of another."""
    found = Counter(traffic)
    for name, often in (
        (("B", whole - SEEN_WHOLE), ("I", SEEN_WHOLE - whole), ("W", SEEN_WHOLE - whole))
        if "W" in seen
        else ()
    ):
        for message, count in seen.get(name, Counter[Message]()).items():
            found[message] += often * count
    return found


def first_half(
    outputs: Sequence[Any], gradients: Sequence[Tensor | None], received: Sequence[Tensor], weights: Sequence[Tensor],
    *, puts_off: bool, recomputed: bool,
) -> tuple[list[Tensor | None], PutOff | WeightHalf]:  # fmt: skip
    """Gradients of what a stage received, and what is left of the pass (`runtime/pipeline/executor.py`). `recomputed`: its blocks
    run again."""
    if puts_off:
        return backward_putting_off(outputs, gradients, received, weights, gradients_under_modes)
    edges = [t if isinstance(t, GradientEdge) else get_gradient_edge(t) for t in outputs]
    given = [torch.ones_like(t) if g is None else g for t, g in zip(outputs, gradients, strict=True)]
    differentiate = partial(gradients_under_modes, retain_graph=True)
    if recomputed:
        found, half = backward_input_recomputed(edges, given, received, weights, differentiate)
    else:  # but perhaps attention, whose second run is to see the same kernels
        found, half = backward_input(edges, given, received, differentiate)
    half.accumulate = accumulated_under_modes
    return found, half
