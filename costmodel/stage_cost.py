"""What the actions of a stage take, in seconds by breakdown key: the input of the pipeline simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoparallel.costmodel.prediction import BREAKDOWN_KEYS

Parts = dict[str, float]  # seconds by breakdown key


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Seconds of one action, and where they go (keys of `BREAKDOWN_KEYS`); the parts sum to the whole."""

    parts: tuple[tuple[str, float], ...] = ()
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """What the actions of one stage take.

    `backward` (B) is recomputation, input and weight gradients together; `backward_input` (I) has the
    recomputation. `last_*` are those of the last micro-batch, beside which gradients are reduced; `reduce_s` is
    what is left of that reduction when the backward has ended. `send_s` is the time from the end of a
    computation until its output has arrived at the next stage (gradients come back in the same time), `joined_s`
    what of it is the receiver's alone, who joins shares of a message.
    `reduce_after_weight_s` stands for `reduce_s` where the last backward is a W. Where updated parameters are gathered beside the
    next step's first forwards, the stage's first one waits for `updated_s` of that, so that it stops nowhere afterwards, and
    `updated_rest_s` come beside it; else all of it is part of `step`.
    """

    forward: Phase
    backward: Phase
    backward_input: Phase
    backward_weight: Phase
    last_backward: Phase
    last_backward_weight: Phase
    step: Phase
    reduce_s: float = 0.0
    reduce_after_weight_s: float = 0.0
    send_s: float = 0.0
    joined_s: float = 0.0
    tied_s: float = 0.0
    updated_s: float = 0.0
    updated_rest_s: float = 0.0


def phase(parts: Mapping[str, float]) -> Phase:
    """A phase of these parts, in the order of `BREAKDOWN_KEYS`, zeros left out."""
    kept = tuple((key, parts[key]) for key in BREAKDOWN_KEYS if parts.get(key, 0.0) > 0.0)
    return Phase(parts=kept, total_s=sum(seconds for _, seconds in kept))
