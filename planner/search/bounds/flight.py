"""Micro-batches in flight on every pipeline rank, for many variants at once."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from autoparallel.planner.expand.schedules import V_SHAPED
from autoparallel.planner.search.bounds.tables import PriceTable
from autoparallel.planner.search.space.build import SCHEDULES
from autoparallel.planner.search.space.meshes import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """Micro-batches that a rank holds when its warm-up ends: of its fewest-held chunk, of the one that fewer
    rounds have reached, of its most-held ones and how many these are, and the sum over its chunks."""

    least: Ints | Floats
    part: Ints | Floats
    most: Ints | Floats
    whole: Ints
    all: Ints | Floats

    def with_weights(self, deferred: Ints, share: Floats, chunks: Ints) -> InFlight:
        """And so many whose weight gradients are `deferred`, each of which holds a share of what one in flight does. They are of the
        last chunk, the one that is least in flight."""
        more = deferred * share
        return replace(
            self, least=self.least + more, part=self.part + more, most=self.most + more * (chunks == 1),
            all=self.all + more,
        )  # fmt: skip


def deferred_weights(schedule: Ints, chunks: Ints, micro_batches: Ints, rank: Ints, pp: int) -> Ints:
    """Micro-batches of its last chunk of which a rank keeps what their weight gradients need, while it has as many in flight
    as when its warm-up ends: ZB-1P lets as many wait as there are ranks before, if there are further ones to begin."""
    m, v = micro_batches, chunks
    round_ = m // np.maximum(1, m // pp)
    begun = np.minimum((v - 1) * np.where(v > 1, round_, 0) + pp - rank, v * m)
    return np.where(schedule == SCHEDULES.index("zb1p"), np.minimum(rank, v * m - begun), 0)


def weights_share(table: PriceTable) -> Floats:
    """The least share of what a layer group keeps of a micro-batch that its weight gradients wait with, by variant."""
    shares = [
        table.of_kinds(f"{least}weight_saved") / np.maximum(table.of_kinds(f"{least}saved"), 1.0)
        for least in ("", "least_")
    ]
    return np.asarray(np.minimum(*shares).min(axis=1, initial=1.0))


def in_flight(schedule: Ints, chunks: Ints, micro_batches: Ints, rank: Ints, pp: int) -> InFlight:
    """GPipe holds all; 1F1B, its interleaved and its zero-bubble form take turns in rounds; the V-shaped schedules run
    twice as many forwards of a rank's first chunk as there are ranks behind it before its second one comes back."""
    m, v = micro_batches, chunks
    word = {name: schedule == at for at, name in enumerate(SCHEDULES)}
    single = np.where(word["gpipe"], m, np.where(word["none"], 1, np.minimum(pp - rank, m)))
    round_ = m // np.maximum(1, m // pp)
    hops = np.where(word["zb1p"], 1, 2)  # forwards of the warm-up for each rank behind
    held = np.minimum((v - 1) * round_ + hops * (pp - 1 - rank) + 1, v * m)
    turns, rest = held // (v * round_), held % (v * round_)
    looped = (word["interleaved-1f1b"] | word["zb1p"]) & (v > 1)
    found = InFlight(
        least=np.where(looped, turns * round_ + np.maximum(rest - (v - 1) * round_, 0), single),
        part=np.where(looped, turns * round_ + np.where(rest < round_, 0, rest % round_), single),
        most=np.where(looped, turns * round_ + np.minimum(rest, round_), single),
        whole=np.where(looped, np.maximum(rest // round_, 1), v),
        all=np.where(looped, held, single * v),
    )
    shaped = is_v_shaped(schedule)
    down, up = np.minimum(2 * pp - 1 - rank, m), np.minimum(rank + 1, m)
    v_shaped = InFlight(least=up, part=up, most=down, whole=np.ones_like(down), all=down + up)
    return InFlight(
        **{
            f.name: np.where(shaped, getattr(v_shaped, f.name), getattr(found, f.name))
            for f in fields(InFlight)
        }
    )


def is_v_shaped(schedule: Ints) -> Bools:
    """Schedules whose first rank holds both ends of the model."""
    return np.isin(schedule, [SCHEDULES.index(name) for name in V_SHAPED])


def most_on_their_way(schedule: Ints, chunks: Ints, micro_batches: Ints, pp: Ints) -> Ints:
    """Micro-batches at most that have begun the first stage's forward and not ended its backward."""
    m, round_ = micro_batches, micro_batches // np.maximum(1, micro_batches // pp)
    several = np.where(is_v_shaped(schedule), 2 * pp, 2 * round_)
    found = np.minimum(np.where(chunks > 1, several, pp), m)
    return np.asarray(np.where(schedule == SCHEDULES.index("gpipe"), m, found))
