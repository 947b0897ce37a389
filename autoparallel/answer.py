"""Plain data from predictions and plans: the object that `--json` prints, and the tables of a strategy file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from math import isinf
from typing import TYPE_CHECKING, Any

from autoparallel.confidence_table import confidence_table
from autoparallel.costmodel.graph import ModelGraph
from autoparallel.costmodel.prediction import Prediction, Span, StageMemory
from autoparallel.costmodel.price import price_program
from autoparallel.costmodel.timeline import Cut, timeline
from autoparallel.costmodel.timetable import pipeline_times
from autoparallel.labels import sample_word, strategy_label
from autoparallel.phases_table import phases_table
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.money import cost_of
from autoparallel.planner.outcome import (
    Alternative,
    BreakEven,
    ConstraintCost,
    Explored,
    PlanResult,
    TradeOff,
)
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.score import at_home
from autoparallel.planner.strategy.complexity import complexity
from autoparallel.planner.strategy.stacks import as_stated
from autoparallel.planner.strategy.types import SAYS_NOTHING, Execution, Mesh, Strategy
from autoparallel.planner.strategy.write import UNSAID
from autoparallel.profiles import Cluster
from autoparallel.profiles.record import cluster_record
from autoparallel.recovery_answer import recovery_table
from autoparallel.runtime.limits import refuser
from autoparallel.stamp import KEY, NUMBERS_KEY, numbers_stamp, stamp

if TYPE_CHECKING:
    from autoparallel.planner.default_batch import BetterBatch
    from autoparallel.whatif import Outcome

GIB = 1024**3
DAY_S = 86400.0
# Spans per pipeline rank that a strategy file keeps of a timeline: enough to see fill, steady state and drain,
# few enough to tell them apart in a picture.
TIMELINE_SPANS_PER_RANK = 64
# Likewise of the strategies that the search priced: what the scatter shows.
EXPLORED_POINTS = 300

# What `--json` prints of `[search]`.
PROOF = (
    "status", "lower_bound_s", "lower_bound_gib", "lower_bound_cost", "gap", "optimum_s", "optimum", "instead",
    "candidates", "pruned", "space",
)  # fmt: skip


def prediction_table(graph: ModelGraph, prediction: Prediction) -> dict[str, Any]:
    """What both `--json` and `[predicted]` say of a prediction; keys and units as the contract has them."""
    return {
        "model": model_table(graph, prediction),
        "sample": sample_word(graph),
        "feasible": prediction.feasible,
        "step_time_s": prediction.step_time_s,
        "tokens_per_s_per_device": prediction.tokens_per_s_per_device,
        "model_tflops_per_device": prediction.model_flops_per_s_per_device / 1e12,
        "hardware_tflops_per_device": prediction.hardware_flops
        / prediction.step_time_s
        / prediction.devices
        / 1e12,
        "mfu": prediction.mfu,
        "peak_memory_gib": prediction.peak_bytes / GIB,
        "capacity_gib": prediction.capacity_bytes / GIB,
        "devices": prediction.devices,
        "tokens_per_step": prediction.tokens,
        "memory_gib_by_stage": [
            {**stage_memory_table(stage), "capacity": capacity / GIB}
            for stage, capacity in zip(prediction.memory, prediction.capacities_bytes, strict=True)
        ],
        "breakdown_s": dict(prediction.breakdown_s),
        **_host_table(prediction),
    }


def _host_table(prediction: Prediction) -> dict[str, Any]:
    """What the memory of the fullest host holds, where anything is kept there, and its size, where it is stated."""
    if not prediction.host_bytes:
        return {}
    held = {"host_memory_gib": prediction.host_bytes / GIB}
    if not prediction.host_capacity_bytes:
        return held
    return {**held, "host_capacity_gib": prediction.host_capacity_bytes / GIB}


def cost_table(cluster: Cluster, mesh: Mesh, prediction: Prediction) -> dict[str, Any]:
    """`cost`, where every device group has a price: of an hour, a step and a trillion tokens."""
    cost = cost_of(cluster, mesh, prediction)
    return {"cost": asdict(cost)} if cost is not None else {}


def model_table(graph: ModelGraph, prediction: Prediction) -> dict[str, Any]:
    """Name, number of parameters (tied ones once), FLOPs of one step."""
    return {
        "name": graph.name,
        "parameters": graph.parameter_count,
        "model_flops_per_step": prediction.model_flops,
    }


def stage_memory_table(memory: StageMemory) -> dict[str, Any]:
    """GiB of one pipeline rank by what holds them."""
    parts = ("parameters", "gradients", "optimizer", "activations", "buffers", "peak")
    return {"stage": memory.stage, **{part: getattr(memory, part) / GIB for part in parts}}


def strategy_table(strategy: Strategy) -> dict[str, Any]:
    """A strategy as nested plain data, spelled as in the strategy file."""
    table: dict[str, Any] = {}
    for f in fields(strategy):
        part = getattr(strategy, f.name)
        if f.name == "tensor":
            table["tensor"] = [
                {
                    "module": rule.module,
                    "params": dict(rule.params),
                    "inputs": dict(rule.inputs),
                    "outputs": list(rule.outputs),
                }
                for rule in strategy.tensor
            ]
        elif f.name == "phases":
            phases = [
                {"from_step": p.from_step, **{k: _plain(v) for k, v in p.keys}} for p in strategy.phases
            ]
            table |= {"phase": phases} if phases else {}
        elif f.name == "embedding":
            rules = [{k: v for k, v in asdict(rule).items() if v is not None} for rule in strategy.embedding]
            table |= {"embedding": rules} if rules else {}
        elif part not in SAYS_NOTHING:
            unsaid = as_stated(part) if isinstance(part, Execution) else ()
            table[f.name] = {
                g.name.rstrip("_"): dict(getattr(part, g.name))
                if g.name == "tables"
                else _plain(getattr(part, g.name))
                for g in fields(part)
                if g.name not in unsaid and (g.name not in UNSAID or getattr(part, g.name))
            }
    return table


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def timeline_table(spans: Sequence[Span], total_s: float, cut: Cut | None = None) -> dict[str, Any]:
    """A timeline in text, one line per rank: `ACTION LABEL START LENGTH` with microseconds, comma-separated.

    The step takes `total_s`; `cut_us` says between which microseconds spans were left out.
    """
    if not spans:
        return {}
    table: dict[str, Any] = {"total_us": round(total_s * 1e6)}
    if cut:
        table["cut_us"] = [round(cut[0] * 1e6), round(cut[1] * 1e6)]
    ranks: dict[int, list[str]] = {}
    for span in sorted(spans, key=lambda s: (s.rank, s.start_s, s.end_s)):
        start, end = round(span.start_s * 1e6), round(span.end_s * 1e6)
        ranks.setdefault(span.rank, []).append(f"{span.action} {span.label} {start} {end - start}")
    table["ranks"] = [", ".join(texts) for _, texts in sorted(ranks.items())]
    return table


def read_timeline(table: Mapping[str, Any]) -> tuple[Span, ...]:
    """The spans of a `timeline_table`, to the microsecond."""
    spans = []
    for rank, text in enumerate(table.get("ranks", ())):
        for item in filter(None, text.split(", ")):
            action, label, start, length = item.split(" ")
            begin = int(start) / 1e6
            spans.append(
                Span(rank=rank, action=action, start_s=begin, end_s=begin + int(length) / 1e6, label=label)
            )
    return tuple(spans)


def problem_table(
    problem: Problem, *, model: str, model_args: Mapping[str, str], hash_: str, embed_cluster: bool = False
) -> dict[str, Any]:
    """`[problem]`: what a plan was made for. A cluster that ships is named, unless it is to be embedded."""
    table: dict[str, Any] = {"model": model}
    if model_args:
        table["model_args"] = dict(model_args)
    table |= {
        "graph_hash": hash_,
        "seq_len": problem.graph.tokens_per_sample,
        "objective": str(problem.objective),
    }
    if problem.allow_lossy:
        table["allow_lossy"] = True
    if problem.lossy:
        table["lossy_methods"] = list(problem.lossy)
    return table | {"cluster": cluster_record(problem.cluster, embed=embed_cluster)}


def stamped(
    predicted: Mapping[str, Any], strategy: Strategy, problem: Mapping[str, Any], search: Mapping[str, Any]
) -> dict[str, Any]:
    """`[predicted]` with the stamps of what stands above it in the file, and of its own numbers and those of `[search]`."""
    made = stamp(
        strategy, graph_hash=problem["graph_hash"], seq_len=problem["seq_len"],
        cluster_hash=problem["cluster"]["hash"],
    )  # fmt: skip
    return {KEY: made, NUMBERS_KEY: numbers_stamp(predicted, search), **predicted}


def predicted_table(expander: Expander, strategy: Strategy, prediction: Prediction) -> dict[str, Any]:
    """`[predicted]`: the prediction, its price, what capture warned of, and the timeline. An expander that knows the
    strategy saves laying it out again."""
    graph, cluster = expander.graph, expander.cluster
    table = prediction_table(graph, prediction) | cost_table(cluster, strategy.mesh, prediction)
    recovery, phases = recovery_table(expander, strategy, prediction), phases_table(expander, strategy)
    expander, strategy = at_home(expander, strategy)
    table["confidence"] = confidence_table(expander, strategy, prediction)
    if why := refuser(graph, cluster)(strategy):
        table["not_run"] = why
    if graph.warnings:
        table["warnings"] = list(graph.warnings)
    table["timeline"] = program_timeline(expander, strategy)
    return table | recovery | phases


def program_timeline(expander: Expander, strategy: Strategy) -> dict[str, Any]:
    """The beginning and the end of the simulated step, as `timeline_table`, of a strategy that is at home with the expander."""
    program, order = expander.program(strategy), expander.prepared(strategy).timetable
    costs = price_program(program, expander.cluster, expander.pricer)
    most = TIMELINE_SPANS_PER_RANK * len(program.ranks)
    simulated = pipeline_times(order, costs)
    spans, cut = timeline(order, simulated, costs, most=most)
    return timeline_table(spans, simulated.step_time_s, cut)


def search_table(result: PlanResult, problem: Problem, better: BetterBatch | None = None) -> dict[str, Any]:
    """`[search]`: proof and rejected strategies. No seconds: the same inputs give the same file."""
    return {
        "status": result.status,
        "lower_bound_s": result.lower_bound_s,
        **_bound_table(result, problem),
        "gap": result.gap,
        "optimum_s": result.optimum_s or result.prediction.step_time_s,
        **({"optimum": strategy_label(result.optimum), "instead": result.instead} if result.optimum else {}),
        "candidates": result.candidates,
        "pruned": result.pruned,
        "space": [
            {"key": one.key, "how": one.how, **({"besides": one.besides} if one.besides else {})}
            for one in result.space
        ],
        "alternatives": [
            {**alternative_table(other, result.strategy), "label": strategy_label(other.strategy)}
            for other in result.alternatives
        ],
        **({"tradeoffs": [tradeoff_table(t) for t in result.tradeoffs]} if result.tradeoffs else {}),
        **({"break_even": [break_even_table(b) for b in result.break_evens]} if result.break_evens else {}),
        **({"constraints": [constraint_table(c) for c in result.constraints]} if result.constraints else {}),
        **({"better_batch": asdict(better)} if better else {}),
        "explored": [
            [point.step_time_s, point.peak_memory_gib, point.feasible, point.label]
            for point in thin(result.explored)
        ],
    }


def _bound_table(result: PlanResult, problem: Problem) -> dict[str, float]:
    """The bound on the objective, where that is no time: memory of the fullest device, or the price of a step."""
    under = 1.0 - result.gap
    if problem.objective is Objective.MEMORY:
        return {"lower_bound_gib": result.prediction.peak_bytes / GIB * under}
    cost = cost_of(problem.cluster, result.strategy.mesh, result.prediction)
    if problem.objective is Objective.COST and cost is not None:
        return {"lower_bound_cost": cost.per_step * under}
    return {}


def alternative_table(other: Alternative, chosen: Strategy) -> dict[str, Any]:
    """A rejected strategy, without the strategy; `simpler`: than the chosen one."""
    return {
        "kind": other.kind,
        "step_time_s": other.step_time_s,
        "peak_memory_gib": other.peak_memory_gib,
        "feasible": other.feasible,
        "proved": other.proved,
        "simpler": complexity(other.strategy) < complexity(chosen),
        "reason": other.reason,
    }


def constraint_table(cost: ConstraintCost) -> dict[str, Any]:
    """What a constraint costs, and what the plan without it would have."""
    table = {
        "key": cost.key,
        "value": cost.value,
        "instead": cost.instead,
        "cost": cost.cost,
        "at_most": cost.at_most,
        "proved": cost.proved,
        "step_time_s": cost.step_time_s,
        "label": strategy_label(cost.strategy),
    }
    return {key: value for key, value in table.items() if value is not None}


def break_even_table(one: BreakEven) -> dict[str, Any]:
    """Where a method of compression would pay; no bound where it does at any bandwidth that was looked at."""
    bound = {} if isinf(one.bytes_per_s) else {"below_gbit_per_s": one.bytes_per_s * 8e-9}
    now = one.now_bytes_per_s * 8e-9
    return {"key": one.key, "method": one.method, "level": one.level, "now_gbit_per_s": now, **bound}


def tradeoff_table(one: TradeOff) -> dict[str, Any]:
    """A point of the frontier of time, memory and price."""
    return {
        "step_time_s": one.step_time_s,
        "peak_memory_gib": one.peak_memory_gib,
        "devices": one.devices,
        "device_cost": one.device_cost,
        "label": strategy_label(one.strategy),
    }


def thin(explored: Sequence[Explored]) -> list[Explored]:
    """At most `EXPLORED_POINTS` of them: the frontier and the fastest, then an even spread of the rest."""
    points = sorted(explored, key=lambda p: (p.step_time_s, p.peak_memory_gib, p.label))
    if len(points) <= EXPLORED_POINTS:
        return points
    kept = set(range(EXPLORED_POINTS // 4))
    least = float("inf")
    for i, point in enumerate(points):
        if point.feasible and point.peak_memory_gib < least:
            least = point.peak_memory_gib
            kept.add(i)
    room = EXPLORED_POINTS - len(kept)
    rest = [i for i in range(len(points)) if i not in kept]
    kept.update(rest[i * len(rest) // max(room, 1)] for i in range(max(room, 0)))
    return [points[i] for i in sorted(kept)]


def plan_answer(
    result: PlanResult, predicted: Mapping[str, Any], search: Mapping[str, Any], seconds: Mapping[str, float]
) -> dict[str, Any]:
    """What `plan --json` prints, from the tables of the strategy file."""
    return {
        **score_answer(result.strategy, predicted),
        "search": {
            **{key: search[key] for key in PROOF if key in search},
            "seconds": dict(seconds),
        },
        "alternatives": [
            {**alternative_table(other, result.strategy), "strategy": strategy_table(other.strategy)}
            for other in result.alternatives
        ],
        **{key: search[key] for key in ("constraints", "tradeoffs", "break_even") if key in search},
    }


def score_answer(strategy: Strategy, predicted: Mapping[str, Any]) -> dict[str, Any]:
    """What `score --json` prints, from a `predicted_table`."""
    said = {key: value for key, value in predicted.items() if key not in ("warnings", "timeline")}
    return {**said, "strategy": strategy_table(strategy)}


def outcome_table(outcome: Outcome, tokens: float | None = None) -> dict[str, Any]:
    """One case of a what-if: its settings, and its prediction or the reason why there is none; the days that
    `tokens` take, and their price where the devices have one."""
    table: dict[str, Any] = {
        "settings": dict(outcome.case.settings),
        "cluster": outcome.cluster.name,
        "cluster_devices": outcome.cluster.devices,
    }
    if outcome.result is None:
        return {**table, "feasible": False, "reason": outcome.reason}
    prediction = outcome.result.prediction
    tokens_per_s = prediction.tokens / prediction.step_time_s
    table |= {
        **prediction_table(outcome.graph, prediction),
        **cost_table(outcome.cluster, outcome.result.strategy.mesh, prediction),
        "tokens_per_s": tokens_per_s,
        "label": strategy_label(outcome.result.strategy),
        "strategy": strategy_table(outcome.result.strategy),
        "search": {"status": outcome.result.status, "gap": outcome.result.gap},
    }
    expander = Expander(graph=outcome.graph, cluster=outcome.cluster)
    table |= recovery_table(expander, outcome.result.strategy, prediction)
    if "cost" in table:
        table["price_per_trillion_tokens"] = table["cost"]["per_trillion_tokens"]
    if tokens is not None:
        table["days"] = tokens / tokens_per_s / DAY_S
        if "cost" in table:
            table["price"] = table["cost"]["per_trillion_tokens"] * tokens / 1e12
    return table
