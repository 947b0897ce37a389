"""Draws one further key of the strategy file to fix: with the plan's own value, or another."""

from __future__ import annotations

from random import Random

from autoparallel.planner.problem import Problem
from autoparallel.planner.strategy.legal import head_counts
from autoparallel.planner.strategy.types import AXES, Strategy
from benchmarks.random_problems.choices import divisors, has_experts

SCHEDULES = ("zb1p", "zbv", "dualpipev", "interleaved-1f1b")


def draw_keys(
    problem: Problem, plan: Strategy | None, rng: Random, count: int
) -> list[tuple[str, object, bool]]:
    """Different (key, value, whether it is the plan's own) to fix; a schedule among them where there may be a pipeline."""
    free = [key for key in _KEYS if key not in problem.constraints]
    cuttable = problem.graph.pipeline_cuts and problem.cluster.devices > 1
    found: list[tuple[str, object, bool]] = []
    if cuttable and problem.constraints.get("mesh.pp") != 1 and "pipeline.schedule" in free:
        found += [("pipeline.schedule", name, False) for name in rng.sample(SCHEDULES, 2)]
    for _ in range(40 * count):
        if len(found) >= count:
            break
        key = rng.choice(free)
        own = _own(plan, key)
        mine = plan is not None and rng.random() < 0.35
        value = own if mine else _other(problem, rng, key)
        if (
            value is None
            or any((key, value) == one[:2] for one in found)
            or (value == () and key != "recompute.per_stage")
        ):
            continue
        found.append((key, value, plan is not None and value == own))
    return found[:count]


def _own(plan: Strategy | None, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(plan, section), name) if plan is not None else None


def _other(problem: Problem, rng: Random, key: str) -> object:
    """A value that the key may have; None where it makes no sense."""
    devices, graph = problem.cluster.devices, problem.graph
    section, _, name = key.partition(".")
    if section == "mesh" and name in (*AXES, "ep"):
        sizes = [d for d in divisors(devices) if d <= 64]
        if name == "tp":
            sizes = [d for d in sizes if all(h % d == 0 for h in head_counts(graph))]
        if name == "pp":
            sizes = [
                d
                for d in sizes
                if d <= max(1, len(graph.repeated_positions)) and (graph.pipeline_cuts or d == 1)
            ]
        if (name == "cp" and graph.tokens_per_sample == 1) or (name == "ep" and not has_experts(problem)):
            return None
        return rng.choice(sizes)
    simple: dict[str, tuple[object, ...]] = {
        "mesh.order": (("dp_replicate", "pp", "dp_shard", "cp", "tp"), ("dp_replicate", "dp_shard", "pp", "cp", "tp"), AXES),
        "shard.zero": (0, 1, 2, 3), "shard.sequence_parallel": (True, False), "batch.micro": (1, 2, 4, 8),
        "pipeline.schedule": (*SCHEDULES, "1f1b", "gpipe", "none"), "pipeline.virtual_stages": (1, 2, 4),
        "recompute.mode": ("none", "selective", "operators", "full"), "offload.optimizer": (0.0, 0.5, 1.0),
        "offload.activations": (0.0, 0.5, 1.0), "grad_sync.algorithm": ("auto", "ring", "tree", "hierarchical"),
        "grad_sync.bucket_mib": (5.0, 25.0, 100.0, 400.0), "grad_sync.overlap": (True, False),
    }  # fmt: skip
    if key in simple:
        value = rng.choice(simple[key])
        return value if key != "batch.micro" or problem.global_batch % int(str(value)) == 0 else None
    if key == "grad_sync.compression" and problem.allow_lossy:
        return tuple(rng.choice(("none", "bf16", "int8")) for _ in problem.cluster.levels)
    return None  # recompute.per_stage and stage_blocks: the plan's own alone


_KEYS = (
    *(f"mesh.{axis}" for axis in (*AXES, "ep", "order")), "shard.zero", "shard.sequence_parallel", "batch.micro",
    "pipeline.schedule", "pipeline.virtual_stages", "pipeline.stage_blocks", "recompute.mode", "recompute.per_stage",
    "offload.optimizer", "offload.activations", "grad_sync.algorithm", "grad_sync.bucket_mib", "grad_sync.overlap",
    "grad_sync.compression",
)  # fmt: skip
