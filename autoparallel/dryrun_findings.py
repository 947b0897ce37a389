"""Where a dry run and the price differ: which module, in which action, by how much, and who is to blame."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autoparallel.costmodel.program import CollectiveOp, Program
from autoparallel.planner.strategy.types import Strategy
from autoparallel.report.numbers import percent, significant
from autoparallel.runtime.check.messages import (
    TIED,
    Message,
    Place,
    priced_places,
    program_messages,
    sent_bytes,
)

if TYPE_CHECKING:
    from autoparallel.dryrun import Pair, RankComparison
    from autoparallel.runtime.check.dryrun import LoweredStage

# Share of a rank's predicted memory, and of what it sends over an axis, by which the two may differ. The second is what
# is left of parameters that do not divide evenly.
MEMORY_TOLERANCE = 0.03
TRAFFIC_TOLERANCE = 1e-3
FUSED = (
    'the strategy, priced with execution.kernels = "fused", which auto_parallelize does not have: plan again with --set '
    "execution.kernels=eager"
)

NO_DROPOUT = (
    "the strategy, priced without the model's dropout: plan again with --set execution.dropout={drops:g}"
)
OTHER_ZERO = "the strategy, priced with another ZeRO than the FSDP2 of auto_parallelize (execution.stack): plan again with --runnable"
OTHER_TIES = (
    "the strategy, priced with gradients of tied parameters that other software exchanges in execution.grad_dtype, and "
    "auto_parallelize in execution.param_dtype (execution.stack): plan again with --runnable"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One difference: `what` of these pipeline `ranks` is `lowered` and was `predicted` so, in bytes."""

    ranks: tuple[int, ...]
    what: str
    module: str
    action: str
    lowered: float
    predicted: float
    blame: str

    @property
    def text(self) -> str:
        """A line for a person."""
        where = f"pipeline rank{'s' if len(self.ranks) > 1 else ''} {_ranks(self.ranks)}"
        how = _difference(self.lowered, self.predicted)
        return f"{where}: {self.what}: {how}; {self.action} of {self.module}; to blame: {self.blame}"


def findings(
    strategy: Strategy,
    program: Program,
    lowered: Sequence[LoweredStage],
    ranks: Sequence[RankComparison],
    sizes: Mapping[str, int],
    *,
    drops: float = 0.0,
) -> tuple[Finding, ...]:
    """What differs by more than the tolerances, memory first; the same difference of several ranks is one finding. `drops`: the
    largest share that the model's modules drop."""
    found: dict[Finding, list[int]] = {}
    for rank in ranks:
        for one in (
            *_memory(strategy, rank),
            *_peak(strategy, rank, drops),
            *_traffic(strategy, program, lowered, rank, sizes),
        ):
            found.setdefault(replace(one, ranks=()), []).append(rank.rank)
    return tuple(replace(one, ranks=tuple(where)) for one, where in found.items())


def _memory(strategy: Strategy, rank: RankComparison) -> Iterator[Finding]:
    whole = sum(pair.predicted for pair in rank.held_bytes.values())
    actions = {"parameters": "UNSHARD", "gradients": "REDUCE_GRAD", "optimizer": "STEP"}
    for name, pair in rank.held_bytes.items():
        held = pair.lowered
        if abs(held - pair.predicted) > MEMORY_TOLERANCE * whole:
            yield Finding(
                ranks=(), what=f"memory of {'optimizer state' if name == 'optimizer' else name}",
                module="all its parameters", action=actions[name], lowered=held, predicted=pair.predicted,
                blame=_memory_blame(strategy, name, pair),
            )  # fmt: skip


def _peak(strategy: Strategy, rank: RankComparison, drops: float) -> Iterator[Finding]:
    peak, predicted = rank.peak, rank.predicted_peak_bytes
    if peak is None or abs(peak.bytes - predicted) <= MEMORY_TOLERANCE * predicted:
        return
    place = _without_numbers(Place(action=peak.action, module=peak.module))
    fused = strategy.execution.kernels == "fused" and peak.bytes > predicted
    blame = FUSED if fused else _of_two(peak.bytes, predicted, "holds")
    if drops and not strategy.execution.dropout:
        blame = NO_DROPOUT.format(drops=drops)
    yield Finding(
        ranks=(), what="peak memory", module=place.module, action=place.action, lowered=peak.bytes,
        predicted=predicted, blame=blame,
    )  # fmt: skip


def _memory_blame(strategy: Strategy, name: str, pair: Pair) -> str:
    if name != "optimizer" and strategy.shard.zero in (1, 2) and not strategy.execution.fsdp2:
        return OTHER_ZERO
    return _of_two(pair.lowered, pair.predicted, "holds")


def _traffic(
    strategy: Strategy,
    program: Program,
    lowered: Sequence[LoweredStage],
    rank: RankComparison,
    sizes: Mapping[str, int],
) -> Iterator[Finding]:
    for axis, pair in rank.sent_bytes.items():
        if abs(pair.lowered - pair.predicted) <= TRAFFIC_TOLERANCE * max(pair.lowered, pair.predicted):
            continue
        place = _place_of(axis, program, lowered, rank, sizes)
        yield Finding(
            ranks=(), what=f"bytes sent over {axis}", module=place.module, action=place.action,
            lowered=pair.lowered, predicted=pair.predicted, blame=_traffic_blame(strategy, axis, pair, place),
        )  # fmt: skip


def _traffic_blame(strategy: Strategy, axis: str, pair: Pair, place: Place) -> str:
    inner = axis in ("tp", "cp", "pp") and strategy.mesh.tp * strategy.mesh.cp > 1
    if strategy.execution.kernels == "fused" and inner:
        return FUSED
    if place.module == TIED and not strategy.execution.fsdp2:
        return OTHER_TIES
    return _of_two(pair.lowered, pair.predicted, "sends")


def _of_two(lowered: float, predicted: float, verb: str) -> str:
    """Without a known reason: who has what the other lacks."""
    if lowered > predicted:
        return f"the runtime, which {verb} what the program that was priced has not"
    return "the price, which counts what does not run"


def _place_of(
    axis: str,
    program: Program,
    lowered: Sequence[LoweredStage],
    rank: RankComparison,
    sizes: Mapping[str, int],
) -> Place:
    """Where most of a difference arises: among modules in which the one that has more sends messages."""
    pair, predicted = rank.sent_bytes[axis], program_messages(program)
    more_runs = pair.lowered > pair.predicted
    weights: Counter[Place] = Counter()
    for stage in rank.stages:
        ours, theirs = lowered[stage].traffic, predicted[stage]
        places = lowered[stage].places if more_runs else priced_places(program.stages[stage])
        for message in {*ours, *theirs}:
            excess = (ours[message] - theirs[message]) * (1 if more_runs else -1)
            if message.axis == axis and excess > 0:
                where = places.get(message) or Counter({_unknown(message): 1})
                for place, often in where.items():
                    share = often / where.total()
                    weights[_without_numbers(place)] += round(excess * share * sent_bytes(message, sizes))
    return weights.most_common(1)[0][0] if weights else Place(action="a pass", module="the whole stage")


def _unknown(message: Message) -> Place:
    if message.op is CollectiveOp.SEND:
        return Place(action="SEND", module="the stage's output")
    return Place(action="a pass", module="the whole stage")


def _without_numbers(place: Place) -> Place:
    """The same place in every repeated block: `model.layers.*.mlp`."""
    parts = ("*" if part.isdigit() else part for part in place.module.split("."))
    return replace(place, module=".".join(parts) or "the model itself")


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))


def _difference(lowered: float, predicted: float) -> str:
    def shown(value: float) -> str:
        return f"{significant(value / 1e9)} GB"

    if not predicted:
        return f"{shown(lowered)}, not predicted"
    share = lowered / predicted - 1.0
    return (
        f"{shown(lowered)} instead of {shown(predicted)} ({'+' if share > 0 else '-'}{percent(abs(share))})"
    )
