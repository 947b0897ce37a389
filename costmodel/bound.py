"""How long a step takes at least: closed forms per schedule, linear in the seconds of the stages.

Each term is one path through the schedule's dependencies, so no term exceeds the simulated step for any stage
costs, even or uneven. With F, B (= I + W where the backward is split), c the message after a stage, M micro-batches
and p ranks, rank r's terms are, for stages r that start with F of their first and end with B of the same stage:

    fill and work    sum over s < r of (F_s + c_s)  +  M (F + B) of all chunks on r  +  tail_r
    ... and drain    the same  +  sum over s < r of (c_s + B_s)  +  tail_0 - tail_r
    down and back    one micro-batch down to the last stage and back to r's last chunk, then all B of r and the F
                     that stand after r's first B; with and without the drain

tail_r is what rank r does after its last backward: the rest of the reduction, and the optimizer. For equal stages
without messages the largest of them is (M + p - 1) (F + B), the simulated time of 1F1B and GPipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autoparallel.costmodel.stage_cost import StageCost

_SPLIT = frozenset({"zb1p", "zbv"})
V_SHAPED = frozenset({"zbv", "dualpipev"})  # stages go down the ranks and up again


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTerm:
    """step >= sum over stages of counts * seconds + tail of `rank`; one count per stage and kind of action."""

    rank: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    message: tuple[int, ...]  # after stage s, in either direction


@dataclass(slots=True)
class _Path:
    """Counts of one path while it is built."""

    homes: tuple[int, ...]
    split: bool
    forward: list[int] = field(init=False)
    backward: list[int] = field(init=False)
    inputs: list[int] = field(init=False)
    weights: list[int] = field(init=False)
    message: list[int] = field(init=False)

    def __post_init__(self) -> None:
        stages = len(self.homes)
        self.forward, self.backward, self.message = [0] * stages, [0] * stages, [0] * stages
        self.inputs, self.weights = [0] * stages, [0] * stages

    def go_down(self, first: int, last: int) -> _Path:
        """Forward of stages first … last - 1, each followed by its message."""
        for stage in range(first, last):
            self.forward[stage] += 1
            self.send(stage)
        return self

    def go_up(self, first: int, last: int) -> _Path:
        """From stage `first` back to `last`: each stage's message, then its backward; `first` itself left out."""
        for stage in range(first - 1, last - 1, -1):
            self.send(stage)
            self.add_backward(stage, 1)
        return self

    def add_backward(self, stage: int, count: int) -> None:
        """Backwards that hand on a gradient: I where the backward is split."""
        (self.inputs if self.split else self.backward)[stage] += count

    def add_work(self, stage: int, forwards: int, backwards: int) -> _Path:
        """Whole forwards and backwards."""
        self.forward[stage] += forwards
        self.add_backward(stage, backwards)
        if self.split:
            self.weights[stage] += backwards
        return self

    def send(self, stage: int) -> None:
        """The message between a stage and the next, where they stand on different ranks."""
        if self.homes[stage] != self.homes[stage + 1]:
            self.message[stage] += 1

    def term(self, rank: int) -> BoundTerm:
        """The path, ending with the tail of `rank`."""
        return BoundTerm(
            rank=rank, forward=tuple(self.forward), backward=tuple(self.backward),
            backward_input=tuple(self.inputs), backward_weight=tuple(self.weights), message=tuple(self.message),
        )  # fmt: skip


def bound_terms(name: str, homes: tuple[int, ...], micro_batches: int) -> tuple[BoundTerm, ...]:
    """The terms of a legal schedule; `homes[s]` is the rank of stage s (`planner.schedules.rank_of_stage`)."""
    ranks = max(homes) + 1
    if name in V_SHAPED:
        return (
            _through(homes),
            *(_fill_and_work(name, homes, rank, micro_batches) for rank in range(ranks)),
        )
    terms = []
    for rank in range(ranks):
        terms.append(_fill_and_work(name, homes, rank, micro_batches))
        terms.extend(_looped_terms(name, homes, rank, micro_batches))
    return tuple(dict.fromkeys(terms))


def _through(homes: tuple[int, ...]) -> BoundTerm:
    """One micro-batch down all stages and back: a B takes no less than its I."""
    path = _Path(homes, split=True).go_down(0, len(homes) - 1)
    path.forward[-1] += 1
    path.add_backward(len(homes) - 1, 1)
    return path.go_up(len(homes) - 1, 0).term(0)


def _fill_and_work(name: str, homes: tuple[int, ...], rank: int, micro_batches: int) -> BoundTerm:
    """The wait for the first input, then all computation of a rank."""
    path = _Path(homes, split=name in _SPLIT).go_down(0, rank)
    ranks = max(homes) + 1
    for stage, home in enumerate(homes):
        if home != rank:
            continue
        path.add_work(stage, micro_batches, micro_batches)
        if name == "dualpipev":
            split = _dualpipev_split(rank, ranks, up=stage != rank)
            path.backward[stage] -= split
            path.inputs[stage] += split
            path.weights[stage] += split
    return path.term(rank)


def _dualpipev_split(rank: int, ranks: int, *, up: bool) -> int:
    """How many backwards of a stage DualPipe-V splits: those of its warm-up (up) and of its drain."""
    behind = ranks - 1 - rank
    first = 2 * ((rank + 1) // 2) + (1 - rank % 2)
    drain = [turn for turn in range(first, 2 * (rank + 1)) if (turn % 2 == 0) == up]
    return behind + len(drain)


def _looped_terms(name: str, homes: tuple[int, ...], rank: int, micro_batches: int) -> list[BoundTerm]:
    """Fill, work and drain; down and back; down, back and drain; of stages that go around the ranks."""
    own = range(rank, len(homes), max(homes) + 1)
    work = _Path(homes, name in _SPLIT).go_down(0, rank)
    for stage in own:
        work.forward[stage] += micro_batches
    back, stay = (_down_and_back(name, homes, rank, micro_batches) for _ in range(2))
    for stage in own:
        stay.add_work(stage, 0, micro_batches)
    return [stay.term(rank), *(_drained(path, own, micro_batches) for path in (work, back))]


def _down_and_back(name: str, homes: tuple[int, ...], rank: int, micro_batches: int) -> _Path:
    """The first micro-batch down to the last stage and back to the rank's last chunk; and the F after its first B.

    With GPipe it is the last forward that goes down, as the first backward waits for it.
    """
    ranks, last = max(homes) + 1, len(homes) - 1
    own = range(rank, last + 1, ranks)
    path = _Path(homes, name in _SPLIT).go_down(0, last)
    path.forward[last] += 1
    if own[-1] != last:
        path.add_backward(last, 1)
        path.go_up(last, own[-1] + 1)
        path.send(own[-1])
    if name == "gpipe":
        path.forward[rank] += micro_batches - 1
    else:
        for stage, count in zip(
            own, _forwards_after(name, ranks, len(own), rank, micro_batches), strict=True
        ):
            path.forward[stage] += count
    return path


def _drained(path: _Path, own: range, micro_batches: int) -> BoundTerm:
    """Continue with all backwards of a rank up to its last I or B, and those of the stages before it."""
    rank = own[0]
    for stage in own:
        path.add_backward(stage, micro_batches)
    if path.split and len(own) == 1:
        # Weight gradients before the last I; of several chunks it is not said which ones those are.
        path.weights[rank] += micro_batches - _weights_left(rank, micro_batches)
    path.go_up(rank, 0)
    if path.split:
        path.weights[0] += 1  # after its last I, rank 0 has the weight gradient of that one left
    return path.term(0)


def _weights_left(rank: int, total: int) -> int:
    """W that a zero-bubble rank does after its last I."""
    return min(rank + 1, total)


def _forwards_after(
    name: str, ranks: int, virtual_stages: int, rank: int, micro_batches: int
) -> tuple[int, ...]:
    """Forwards of a rank after its first backward, by chunk."""
    per_round = micro_batches // max(1, micro_batches // ranks) if virtual_stages > 1 else micro_batches
    per_hop = 2 if name == "interleaved-1f1b" else 1
    warmup = (virtual_stages - 1) * per_round + per_hop * (ranks - 1 - rank)
    cycles, rest = divmod(min(warmup + 1, virtual_stages * micro_batches), per_round * virtual_stages)
    return tuple(
        micro_batches - cycles * per_round - min(max(rest - chunk * per_round, 0), per_round)
        for chunk in range(virtual_stages)
    )


def tails_s(costs: Sequence[StageCost], homes: Sequence[int], *, looped: bool = True) -> tuple[float, ...]:
    """Per rank, seconds after its last backward: what is left of that stage's reduction, and the optimizer.

    The last backward of a rank is its first stage's where stages go around the ranks (`looped`).
    """
    tails = []
    for rank in range(max(homes) + 1):
        own = [stage for stage, home in enumerate(homes) if home == rank]
        first = costs[own[0]]
        left_s = min(first.reduce_s, first.reduce_after_weight_s) if looped else 0.0
        tails.append(left_s + sum(costs[stage].step.total_s for stage in own))
    return tuple(tails)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundMatrix:
    """All terms of a schedule as arrays, to bound many candidates at once."""

    counts: NDArray[np.int64]  # [term, kind, stage]; kinds F, B, I, W, message
    ranks: NDArray[np.int64]  # [term]

    @staticmethod
    def of(terms: Sequence[BoundTerm]) -> BoundMatrix:
        """The terms, stacked."""
        counts = [[t.forward, t.backward, t.backward_input, t.backward_weight, t.message] for t in terms]
        return BoundMatrix(counts=np.array(counts), ranks=np.array([t.rank for t in terms]))

    def bound_s(self, seconds: NDArray[np.float64], tails: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bound of every candidate: `seconds` is [..., kind, stage], `tails` [..., rank]."""
        paths = np.einsum("tks,...ks->...t", self.counts, seconds)
        bounds: NDArray[np.float64] = (paths + tails[..., self.ranks]).max(axis=-1)
        return bounds
