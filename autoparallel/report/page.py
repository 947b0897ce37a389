"""The report: one HTML page from a strategy file alone, with everything it needs inside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError

from autoparallel.answer import read_timeline
from autoparallel.errors import UserError
from autoparallel.labels import counted, strategy_label
from autoparallel.planner.strategy.file import StrategyFile, missing_keys, strategy_from_constraints
from autoparallel.planner.strategy.machines import idle_words
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles import Cluster
from autoparallel.profiles.record import cluster_hash, recorded_cluster
from autoparallel.report import charts, numbers
from autoparallel.report.figures import cluster_figures, device_figures, kinds
from autoparallel.report.placement import places
from autoparallel.report.recovery import POLICIES, recovery_words
from autoparallel.report.tables import rule_words
from autoparallel.report.words import (
    bound_words,
    choices,
    cluster_words,
    constraint_words,
    short,
    sureness,
    why,
)
from autoparallel.runtime.gradients.groups import process_groups
from autoparallel.stamp import check_stamp

# Above this share of the capacity, a plan is one surprise away from running out of memory.
NEARLY_FULL = 0.95
SHOWN_RANKS = 8  # of a process group

_LOADER = PackageLoader("autoparallel.report", package_path="")

_MEANINGS = {
    "forward": "computing the loss",
    "backward": "computing gradients",
    "recompute": "computing dropped activations a second time",
    "tp_comm": "tensor parallelism: exchanging activations inside blocks",
    "cp_comm": "context parallelism: exchanging keys and values",
    "ep_comm": "expert parallelism: sending tokens to their experts",
    "pp_comm": "pipeline: waiting for activations and gradients on the way between stages",
    "dp_comm": "data parallelism: gradients and sharded parameters, where nothing hides it",
    "host_copies": "offloading: copies to the hosts' memory and back, where nothing hides them",
    "bubble": "pipeline: waiting with nothing to compute",
    "optimizer": "updating the parameters",
    "other": "everything else",
}


def render_report(file: StrategyFile) -> str:
    """The page for a file that `plan` wrote. Raises UserError for one that does not say what it predicts."""
    if not file.predicted or file.problem is None or file.problem.cluster is None:
        raise UserError(
            f"{file.path}: has no [predicted] or no [problem.cluster]; only a file that `autoparallel plan` wrote "
            "can be reported on: run plan with it as --strategy first"
        )
    missing = missing_keys(file.constraints)
    if missing:
        raise UserError(f"{file.path}: {', '.join(missing)} missing; run plan with it as --strategy first")
    strategy = strategy_from_constraints(file.constraints, name=file.path)
    cluster = recorded_cluster(file.problem.cluster, f"{file.path}: [problem] cluster")
    check_stamp(file, strategy, cluster_hash(cluster))
    try:
        context = _context(file, strategy, cluster)
        return environment().get_template("page.html.j2").render(context)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, UndefinedError) as error:
        raise UserError(
            f"{file.path}: [predicted] or [search] is not as plan writes it ({error!r}); plan again"
        ) from None


def environment() -> Environment:
    """Templates with numbers as people read them; everything that comes from a file is escaped."""
    made = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=_LOADER
    )
    made.filters |= {
        "seconds": numbers.seconds,
        "gib": numbers.gib,
        "percent": numbers.percent,
        "count": numbers.count,
        "significant": numbers.significant,
        "px": lambda value: f"{value:.1f}",
    }
    return made


def resource(name: str) -> str:
    """A file that ships beside this module."""
    return (files("autoparallel.report") / name).read_text(encoding="utf-8")


def _context(file: StrategyFile, strategy: Strategy, cluster: Cluster) -> dict[str, Any]:
    predicted = file.predicted
    search = {
        "alternatives": (),
        "tradeoffs": (),
        "candidates": None,
        **file.search,
    }  # what an edited file may lack
    assert file.problem is not None
    cut_us = predicted.get("timeline", {}).get("cut_us")
    cut_s = (cut_us[0] / 1e6, cut_us[1] / 1e6) if cut_us else None
    spans = read_timeline(predicted.get("timeline", {}))
    capacity = predicted.get("capacity_gib")
    seq_len = file.problem.seq_len or 1
    sample = predicted.get("sample", "sequence" if seq_len > 1 else "sample")
    return {
        "sample": sample,
        "counted": counted(sample),
        "style": resource("style.css"),
        "path": file.path,
        "problem": file.problem,
        "predicted": predicted,
        "search": search,
        "strategy": strategy,
        "cluster": cluster,
        "cluster_words": cluster_words(cluster),
        "choices": choices(strategy, cluster, predicted),
        "why": why(search, predicted["step_time_s"]),
        "constraints": [constraint_words(cost) for cost in search.get("constraints", ())],
        "confidence": predicted.get("confidence"),
        "sureness": sureness(predicted["confidence"]) if "confidence" in predicted else "",
        "places": places(strategy, cluster),
        "groups": _groups(strategy, cluster),
        "cost": predicted.get("cost"),
        "breakdown": charts.breakdown_bar(predicted["breakdown_s"]),
        "meanings": _MEANINGS,
        "memory": charts.memory_bars(predicted["memory_gib_by_stage"], capacity),
        "memory_parts": charts.MEMORY_PARTS,
        "timeline": charts.timeline(spans, cut_s) if spans else None,
        "cut_s": cut_s,
        "recovery": recovery_words(predicted["recovery"]) if "recovery" in predicted else "",
        "policies": POLICIES,
        "scatter": _scatter(strategy, predicted, search),
        "figures": _figures(cluster),
        "kinds": kinds(cluster),
        "settings": _settings(strategy),
        "warnings": warnings(strategy, predicted, search, cluster),
    }


def _scatter(
    strategy: Strategy, predicted: Mapping[str, Any], search: Mapping[str, Any]
) -> charts.Chart | None:
    """What the search priced, and the chosen one among it."""
    explored = [
        charts.Candidate(step_time_s=time_s, peak_gib=peak, fits=fits, label=label)
        for time_s, peak, fits, label in search.get("explored", ())
    ]
    explored += [
        charts.Candidate(
            step_time_s=one["step_time_s"], peak_gib=one["peak_memory_gib"], fits=one.get("feasible", True),
            label=one["label"],
        )
        for one in (*search["alternatives"], *search["tradeoffs"])
    ]  # fmt: skip
    chosen = charts.Candidate(
        step_time_s=predicted["step_time_s"],
        peak_gib=predicted["peak_memory_gib"],
        fits=predicted["feasible"],
        label=strategy_label(strategy),
    )
    return charts.scatter(explored, chosen, predicted.get("capacity_gib")) if explored else None


def _groups(strategy: Strategy, cluster: Cluster) -> list[dict[str, Any]]:
    """The process groups, with the first ranks of the first of each kind; none where the runtime would refuse them."""
    try:
        kinds = process_groups(strategy, tuple(level.size for level in cluster.levels))
    except UserError:
        return []
    return [
        {"name": kind.name, "purpose": kind.purpose, "ranks": kind.ranks, "first": first_of(kind.ranks[0])}
        for kind in kinds
    ]


def first_of(ranks: Sequence[int]) -> str:
    """The ranks of a group, the first few of many."""
    shown = ", ".join(map(str, ranks[:SHOWN_RANKS]))
    return shown if len(ranks) <= SHOWN_RANKS else f"{shown}, …, {ranks[-1]}"


def _figures(cluster: Cluster) -> list[tuple[str, list[Any]]]:
    devices = {group.device.name: group.device for group in cluster.groups}
    tables = [(name, list(device_figures(device))) for name, device in devices.items()]
    return [*tables, ("network", list(cluster_figures(cluster)))]


def _settings(strategy: Strategy) -> list[tuple[str, str]]:
    from autoparallel.planner.strategy.file import strategy_to_constraints

    keys = strategy_to_constraints(strategy)
    rules = [(f"embedding {rule.module}", rule_words(rule)) for rule in strategy.embedding]
    told = [(key, short(value)) for key, value in keys.items() if key not in ("tensor", "embedding", "phase")]
    later = [
        (f"from step {phase.from_step}: {key}", short(value))
        for phase in strategy.phases
        for key, value in phase.keys
    ]
    return [*told, *rules, *later]


def warnings(
    strategy: Strategy, predicted: Mapping[str, Any], search: Mapping[str, Any], cluster: Cluster
) -> list[str]:
    """What a person should know before trusting or running the plan."""
    found = list(predicted.get("warnings", ()))
    capacity = predicted.get("capacity_gib")
    if not predicted["feasible"]:
        found.append("This strategy does not fit into the memory of the devices.")
    elif capacity and predicted["peak_memory_gib"] > NEARLY_FULL * capacity:
        share = numbers.percent(predicted["peak_memory_gib"] / capacity)
        found.append(
            f"The fullest device uses {share} of its memory: little room for what no model foresees."
        )
    if any(c not in ("none", "fp16", "bf16") for c in strategy.grad_sync.compression):
        found.append("Gradients are compressed with loss beyond rounding: watch convergence.")
    elif any(c != "none" for c in strategy.grad_sync.compression):
        found.append("Gradients are rounded to 16 bits for synchronisation.")
    if (weights := strategy.grad_sync.weights) != "none" and strategy.shard.zero == 3:
        found.append(f"Parameters are computed with as they were gathered, in {weights}: watch convergence.")
    if search.get("status") == "feasible":
        known = f", but {bound_words(search)}" if search.get("lower_bound_s") else ""
        found.append(f"The search ended before its proof: a better strategy may exist{known}.")
    if idle := idle_words(cluster, strategy):
        found.append(f"Not all of the cluster works: {idle}.")
    elif predicted["devices"] < cluster.devices:
        found.append(f"Only {predicted['devices']} of {cluster.devices} devices are used.")
    counted = kinds(cluster)
    guessed = counted.get("fitted", 0)
    if guessed and not counted.get("measured"):
        found.append(
            "No figure of this cluster was measured on it: predictions rest on data sheets and fits."
        )
    return found
