"""Micro-batches in flight on every pipeline rank, for many variants at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoparallel.planner.search.space.build import SCHEDULES, WHOLE_BACKWARD
from autoparallel.planner.search.space.meshes import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Micro-batches that a rank holds when its warm-up ends: of its fewest-held chunk, of the one that fewer
    rounds have reached, of its most-held ones and how many these are, and the sum over its chunks."""

    least: Ints
    part: Ints
    most: Ints
    whole: Ints
    all: Ints


def in_flight(schedule: Ints, chunks: Ints, micro_batches: Ints, rank: Ints, pp: int) -> InFlight:
    """1F1B and its interleaved form take turns in rounds; GPipe holds all; other schedules hold one at least and
    all at most."""
    m, v = micro_batches, chunks
    word = {name: schedule == SCHEDULES.index(name) for name in WHOLE_BACKWARD}
    plain = np.where(word["gpipe"], m, np.where(word["1f1b"], np.minimum(pp - rank, m), 1))
    round_ = m // np.maximum(1, m // pp)
    held = np.minimum((v - 1) * round_ + 2 * (pp - 1 - rank) + 1, v * m)
    turns, rest = held // (v * round_), held % (v * round_)
    looped = word["interleaved-1f1b"]
    other = np.where(word["gpipe"] | word["1f1b"] | word["none"], plain, m)
    return InFlight(
        least=np.where(looped, turns * round_ + np.maximum(rest - (v - 1) * round_, 0), plain),
        part=np.where(looped, turns * round_ + np.where(rest < round_, 0, rest % round_), other),
        most=np.where(looped, turns * round_ + np.minimum(rest, round_), other),
        whole=np.where(looped, np.maximum(rest // round_, 1), v),
        all=np.where(looped, held, plain * v),
    )
