"""A strategy file lowered without memory and processes, beside what was predicted of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoparallel.costmodel.graph_json import graph_hash
from autoparallel.costmodel.program import Program
from autoparallel.dryrun_findings import Finding, findings
from autoparallel.dryrun_peak import Peak, peak_of
from autoparallel.errors import UserError
from autoparallel.model_errors import in_the_models_words, on_tensors_without_values
from autoparallel.planner.expand.axes import EXPERT_SHARD, EXPERTS, SECONDARY
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.expand.local import TENSOR_DTYPE
from autoparallel.planner.expand.schedules import rank_of_stage
from autoparallel.planner.expand.state import zero_level
from autoparallel.planner.expand.units import own_units
from autoparallel.planner.score import completed, program_of, score
from autoparallel.planner.strategy.file import ProblemRecord, read_strategy_file, strategy_from_constraints
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.phases import strategy_at
from autoparallel.planner.strategy.types import AXES, Strategy
from autoparallel.profiles.record import recorded_cluster
from autoparallel.runtime.check.messages import Message, program_messages, sent_bytes
from autoparallel.runtime.experts.modules import expert_modules

if TYPE_CHECKING:
    from autoparallel.costmodel.graph import ModelGraph
    from autoparallel.profiles.hardware import Cluster
    from autoparallel.runtime.check.dryrun import LoweredStage

MEMORY = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One figure of a rank: of the lowered model, and predicted."""

    lowered: float
    predicted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankComparison:
    """One pipeline rank: bytes that it holds, bytes that it sends in a step by mesh axis, and in which messages.

    No part of the prediction's `parameters` are `gathered_bytes`, of ZeRO-3 parameters that stand gathered at the end
    of a forward pass.
    """

    rank: int
    stages: tuple[int, ...]
    held_bytes: Mapping[str, Pair]
    sent_bytes: Mapping[str, Pair]
    gathered_bytes: int
    messages: Mapping[Message, Pair]
    peak: Peak | None = None  # of the lowered rank; None where it was not looked at
    predicted_peak_bytes: float = 0.0  # as it is lowered: with eager kernels where the strategy compiles
    compiled_peak_bytes: float | None = (
        None  # what is priced of compiled kernels, which nothing here is held against
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What came of a dry run: one comparison for each distinct rank."""

    model: str
    strategy: Strategy
    ranks: tuple[RankComparison, ...]
    findings: tuple[Finding, ...] = ()  # where the two differ by more than they may


def dry_run_file(path: Path, model: str | None = None, step: int = 1) -> DryRun:
    """Capture the model that `path` was planned for (or `model`), lower it by the strategy of a step's phase, compare."""
    file = read_strategy_file(path)
    record = file.problem or ProblemRecord()
    strategy = strategy_at(strategy_from_constraints(file.constraints, name=file.path), step)
    spec = _model(file.path, record, model)
    if record.cluster is None:
        raise UserError(
            f"{path}: [problem] has no cluster, so nothing was predicted; give a file that plan wrote"
        )
    cluster = recorded_cluster(record.cluster, f"{path}: [problem] cluster")

    from autoparallel.planner.capture import capture
    from autoparallel.planner.capture.load import load_model

    planned = record.seq_len if record.seq_len != 1 else None  # 1: its samples are no sequences
    seq_len = strategy.batch.seq_len or planned
    with in_the_models_words(spec):
        loaded = load_model(spec, model_args=record.model_args, seq_len=seq_len)
        dtype = TENSOR_DTYPE[strategy.execution.dtype]
        graph = capture(loaded.module, loaded.example_inputs, name=loaded.name, dtype=dtype)
    if seq_len == planned and record.graph_hash not in (None, graph_hash(graph)):
        raise UserError(
            f"{path}: [problem] graph_hash does not match {spec}: the file was planned for another model, sequence "
            "length or version of it; plan again"
        )
    if problems := strategy_problems(graph, cluster, strategy):
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    if any(rule.tier not in ("device", None) for rule in strategy.embedding):
        raise UserError(
            f"{path}: [[embedding]] with tiers: which rows are asked for is in the data, which a dry run has none of; run it, "
            'or set tier = "device"'
        )
    return dry_run_of(loaded.module, loaded.example_inputs, graph, cluster, strategy)


def dry_run_of(
    module: Any, example_inputs: Any, graph: ModelGraph, cluster: Cluster, strategy: Strategy
) -> DryRun:
    """Lower `module`, of which `graph` was captured with these inputs, by a legal strategy, and compare."""
    from autoparallel.runtime.capabilities.models import check_model
    from autoparallel.runtime.check.dryrun import dry_run
    from autoparallel.runtime.limits import backend_of, entered_blocks

    check_model(graph, strategy)
    expander = Expander(graph, cluster)
    strategy = completed(expander, strategy)
    program = program_of(expander, strategy)
    blocks = [link.path for link in graph.chain if link.repeated]
    levels = tuple(level.size for level in cluster.levels)
    with on_tensors_without_values(graph.name):
        lowered = dry_run(
            module, example_inputs, strategy, blocks=blocks, level_sizes=levels,
            experts=expert_modules(graph), entered=entered_blocks(graph), alone=own_units(graph),
            kinds={link.path: link.block for link in graph.chain if link.repeated}, backend=backend_of(cluster),
        )  # fmt: skip
    compiled = strategy.execution.kernels == "compiled"  # which nothing is here
    as_lowered = (
        replace(strategy, execution=replace(strategy.execution, kernels="eager")) if compiled else strategy
    )
    priced = score(graph, cluster, strategy, expander).memory
    eager = score(graph, cluster, as_lowered, expander).memory if compiled else priced
    ranks = tuple(
        replace(
            rank,
            peak=peak_of(strategy, program, lowered, rank.rank, rank.stages),
            predicted_peak_bytes=eager[rank.rank].peak,
            compiled_peak_bytes=priced[rank.rank].peak if compiled else None,
        )
        for rank in compare(strategy, program, lowered)
    )
    different = findings(strategy, program, lowered, ranks, _sizes(strategy), drops=graph.dropout)
    return DryRun(model=graph.name, strategy=strategy, ranks=ranks, findings=different)


def _model(path: str, record: ProblemRecord, given: str | None) -> str:
    spec = given or record.model
    if spec is None:
        raise UserError(f"{path}: [problem] does not say which model; give it with --model")
    if spec.endswith(".json") and not spec.startswith("hf:"):
        raise UserError(
            f"{path}: planned from the saved graph {spec}, which has no modules to lower; give the model that it was "
            "captured from with --model hf:PATH or --model FILE.py:NAME"
        )
    return spec


def compare(
    strategy: Strategy, program: Program, lowered: Sequence[LoweredStage]
) -> tuple[RankComparison, ...]:
    """Each pipeline rank's stages added up, lowered and predicted."""
    pipeline, mesh, sizes = strategy.pipeline, strategy.mesh, _sizes(strategy)
    homes = rank_of_stage(pipeline.schedule, mesh.pp, pipeline.virtual_stages)
    predicted = program_messages(program)
    keeps_gathered = zero_level(strategy) in (1, 2) or strategy.shard.secondary > 0
    found = []
    for rank in range(mesh.pp):
        mine = [stage for stage, home in enumerate(homes) if home == rank]
        made, works = [lowered[s] for s in mine], [program.stages[s] for s in mine]
        gathered = sum(m.gathered_bytes for m in made)
        owned = sum(m.parameter_bytes for m in made)
        sums = {
            "parameters": Pair(
                lowered=owned + (gathered if keeps_gathered else 0),
                predicted=sum(w.parameter_bytes for w in works),
            ),
            "gradients": Pair(
                lowered=sum(m.gradient_bytes for m in made), predicted=sum(w.gradient_bytes for w in works)
            ),
            "optimizer": Pair(
                lowered=sum(m.optimizer_bytes for m in made), predicted=sum(w.optimizer_bytes for w in works)
            ),
        }
        ours, theirs = _added(m.traffic for m in made), _added(predicted[s] for s in mine)
        found.append(
            RankComparison(
                rank=rank,
                stages=tuple(mine),
                held_bytes=sums,
                sent_bytes=_by_axis(ours, theirs, sizes),
                gathered_bytes=0 if keeps_gathered else gathered,
                messages={m: Pair(lowered=ours[m], predicted=theirs[m]) for m in _ordered({*ours, *theirs})},
            )
        )
    return tuple(found)


def _sizes(strategy: Strategy) -> dict[str, int]:
    """Ranks along each mesh axis, those of experts among them."""
    mesh = strategy.mesh
    sizes = {axis: getattr(mesh, axis) for axis in (*AXES, EXPERTS)}
    shared = mesh.dp_shard * mesh.cp * mesh.tp // mesh.ep
    return {**sizes, EXPERT_SHARD: shared, SECONDARY: strategy.shard.secondary}


def _added(counters: Iterable[Counter[Message]]) -> Counter[Message]:
    total: Counter[Message] = Counter()
    for counter in counters:
        total += counter
    return total


def _by_axis(
    lowered: Counter[Message], predicted: Counter[Message], sizes: Mapping[str, int]
) -> dict[str, Pair]:
    def total(messages: Counter[Message], axis: str) -> float:
        return sum(sent_bytes(m, sizes) * count for m, count in messages.items() if m.axis == axis)

    axes = sorted({m.axis for m in (*lowered, *predicted)})
    return {axis: Pair(lowered=total(lowered, axis), predicted=total(predicted, axis)) for axis in axes}


def _ordered(messages: Iterable[Message]) -> list[Message]:
    return sorted(messages, key=lambda m: (m.axis, m.op, -m.size_bytes))


def dry_run_answer(found: DryRun) -> dict[str, Any]:
    """What `--json` prints."""

    def pair(value: Pair) -> dict[str, float]:
        return {"lowered": value.lowered, "predicted": value.predicted}

    ranks = [
        {
            "rank": rank.rank,
            "stages": list(rank.stages),
            "held_bytes": {name: pair(value) for name, value in rank.held_bytes.items()},
            "peak_bytes": {
                "lowered": rank.peak.bytes if rank.peak else None,
                "predicted": rank.predicted_peak_bytes,
                "compiled": rank.compiled_peak_bytes,
            },
            "gathered_bytes": rank.gathered_bytes,
            "sent_bytes": {axis: pair(value) for axis, value in rank.sent_bytes.items()},
            "messages": [
                {"axis": m.axis, "op": str(m.op), "size_bytes": m.size_bytes, **pair(count)}
                for m, count in rank.messages.items()
            ],
        }
        for rank in found.ranks
    ]
    different = [{**asdict(one), "ranks": list(one.ranks)} for one in found.findings]
    return {
        "model": found.model, "devices": found.strategy.mesh.devices, "ranks": ranks, "differences": different,
    }  # fmt: skip
