"""The rows of time of a stage problem: paths that every simulation of a schedule has, and those that it shows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from autoparallel.costmodel.bound import bound_terms
from autoparallel.planner.expand.schedules import rank_of_stage
from autoparallel.planner.search.stages.paths import REDUCE, REDUCE_AFTER_WEIGHT, SEND, TIED, Path
from autoparallel.planner.search.stages.problem import Q, Row, merged
from autoparallel.planner.strategy.types import Strategy

_QUANTITIES = {q.name.lower(): q for q in Q if q < Q.END} | {
    "step": Q.STEP, SEND: Q.SEND, TIED: Q.TIED, REDUCE: Q.REDUCE, REDUCE_AFTER_WEIGHT: Q.REDUCE_AFTER_WEIGHT,
}  # fmt: skip
_ENDS = ((Q.LAST_BACKWARD, Q.REDUCE, Q.END), (Q.LAST_BACKWARD_WEIGHT, Q.REDUCE_AFTER_WEIGHT, Q.END_WEIGHT))


def rank_rows(strategy: Strategy, ends: int) -> tuple[Row, ...]:
    """For each rank two paths that all schedules without split backward have: the pipeline fills, the rank does
    all its work, and then it reduces and steps, or the pipeline drains and the first stage does. Where blocks are unlike,
    one of the first `ends` stages may be the last to end."""
    mesh, pipeline = strategy.mesh, strategy.pipeline
    home = rank_of_stage(pipeline.schedule, mesh.pp, pipeline.virtual_stages)
    rows = []
    for rank in range(mesh.pp):
        chunks = [stage for stage, at in enumerate(home) if at == rank]
        first = chunks[0]
        work = [(int(Q.FORWARD), stage, 1) for stage in range(first)]
        work += [(int(Q.SEND), stage, 1) for stage in range(first)]
        work += [(int(Q.FORWARD), stage, strategy.micro_batches) for stage in chunks]
        work += [(int(Q.BACKWARD), stage, strategy.micro_batches - 1) for stage in chunks]
        work += [(int(Q.LAST_BACKWARD), stage, 1) for stage in chunks[1:]]
        rows.append(Row(terms=merged([*work, *_ending(first)])))
        if pipeline.virtual_stages == 1 and mesh.pp > 1:
            rows.append(Row(terms=merged(_round_trip(strategy, rank))))
        if first:
            drain = [(int(Q.LAST_BACKWARD), stage, 1) for stage in range(1, first + 1)]
            drain += [(int(Q.SEND), stage, 1) for stage in range(first)]
            rows.append(Row(terms=merged([*work, *drain, *_ending(0)])))
    if pipeline.virtual_stages > 1:
        rows += [Row(terms=merged(terms)) for terms in _round_trips(strategy, len(home))]
    if pipeline.schedule == "1f1b" and ends:
        pairs = product(range(mesh.pp), range(ends + 1))
        rows += [
            Row(terms=merged(_there_and_back(strategy, rank, end))) for rank, end in pairs if end <= rank
        ]
    return tuple(rows)


def _ending(stage: int) -> list[tuple[int, int, int]]:
    """A stage's last backward and reductions, those of tied tensors among them, and its step."""
    return [(int(q), stage, 1) for q in (Q.END, Q.TIED, Q.STEP)]


def _there_and_back(strategy: Strategy, rank: int, end: int) -> list[tuple[int, int, int]]:
    """1F1B: the first micro-batch from a rank to the last one and back, the rank's forwards and backwards in turn until it
    has run the last forward, that micro-batch there and back, too, and on to the end of an earlier stage."""
    pp, m = strategy.mesh.pp, strategy.micro_batches
    ahead = pp - rank  # forwards before the first backward
    if m <= ahead:
        return []
    after = range(rank + 1, pp)
    terms = [(int(Q.FORWARD), stage, 1) for stage in range(rank)]
    terms += [(int(Q.FORWARD), stage, 2) for stage in after]
    terms += [(int(Q.BACKWARD), stage, 1) for stage in after]
    terms += [(int(Q.FORWARD), rank, 1 + m - ahead), (int(Q.BACKWARD), rank, m - ahead)]
    terms += [(int(Q.LAST_BACKWARD), stage, 1) for stage in range(end + 1, pp)]
    terms += [(int(Q.SEND), stage, 4) for stage in range(rank, pp - 1)]
    terms += [(int(Q.SEND), stage, 2 if stage >= end else 1) for stage in range(rank)]
    return [*terms, *_ending(end)]


def _round_trips(strategy: Strategy, chunks: int) -> Iterator[list[tuple[int, int, int]]]:
    """Of several chunks per rank: the last micro-batch through all of them and back, after the others have left the first
    one; and the first micro-batch, before the others come back to it."""
    others = strategy.micro_batches - 1
    there = [(int(Q.FORWARD), stage, 1) for stage in range(chunks)]
    there += [(int(Q.SEND), stage, 2) for stage in range(chunks - 1)]
    end = _ending(0)
    last = [(int(Q.LAST_BACKWARD), stage, 1) for stage in range(1, chunks)]
    yield [(int(Q.FORWARD), 0, others), *there, *last, *end]
    if others:
        yield [
            *there,
            *((int(Q.BACKWARD), stage, 1) for stage in range(1, chunks)),
            (int(Q.BACKWARD), 0, others),
            *end,
        ]


def split_rows(strategy: Strategy) -> tuple[Row, ...]:
    """The paths that schedules with a split backward have (`costmodel.bound`), and the steps of the rank at the
    end of each."""
    mesh, pipeline = strategy.mesh, strategy.pipeline
    home = tuple(rank_of_stage(pipeline.schedule, mesh.pp, pipeline.virtual_stages))
    rows = []
    for term in bound_terms(pipeline.schedule, home, strategy.micro_batches):
        counted = (
            (Q.FORWARD, term.forward), (Q.BACKWARD, term.backward), (Q.BACKWARD_INPUT, term.backward_input),
            (Q.BACKWARD_WEIGHT, term.backward_weight), (Q.SEND, term.message),
        )  # fmt: skip
        terms = [(int(kind), stage, n) for kind, counts in counted for stage, n in enumerate(counts)]
        terms += [(int(Q.STEP), stage, 1) for stage, rank in enumerate(home) if rank == term.rank]
        rows.append(Row(terms=merged(terms)))
    return tuple(rows)


def _round_trip(strategy: Strategy, rank: int) -> list[tuple[int, int, int]]:
    """One micro-batch through all stages and back, while the rank's other work waits for it: 1F1B has run
    ranks - rank forwards when its first gradient arrives, GPipe runs all but one before its last input leaves."""
    pp, m = strategy.mesh.pp, strategy.micro_batches
    ahead = 1 if strategy.pipeline.schedule == "gpipe" else min(pp - rank, m)
    last = [(int(Q.LAST_BACKWARD), stage, 1) for stage in range(1, rank + 1)]
    last += _ending(0)
    if m == 1:  # the gradient that comes back is the last
        last = [(int(Q.LAST_BACKWARD), stage, 1) for stage in range(1, pp)] + last[rank:]
    else:
        last += [(int(Q.BACKWARD), stage, 1) for stage in range(rank, pp)]
        last += [(int(Q.BACKWARD), rank, m - 2)]
    hops = [(int(Q.SEND), stage, 2) for stage in range(pp - 1)]
    return [
        *((int(Q.FORWARD), stage, 1) for stage in range(pp)),
        (int(Q.FORWARD), rank, m - ahead),
        *last,
        *hops,
    ]


def path_row(path: Path) -> Row:
    """A critical path as a row; a last backward and its reduction are one quantity where both stand on it."""
    counts = {(_QUANTITIES[part], stage): count for part, stage, count in path.terms}
    for last, reduce, end in _ENDS:
        for stage in [stage for quantity, stage in counts if quantity == last and (reduce, stage) in counts]:
            counts[end, stage] = counts.pop((last, stage))
            del counts[reduce, stage]
    return Row(terms=merged([(int(quantity), stage, count) for (quantity, stage), count in counts.items()]))
