"""Draws a case: a model, a cluster that may train it, a batch, what the user fixes and runs with."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.planner.problem import Problem
from autoparallel.planner.strategy.stacks import stack_values
from autoparallel.planner.strategy.types import Execution
from autoparallel.profiles.stacks import stack_names
from benchmarks.random_problems.clusters import DrawnCluster, draw_cluster, pick
from benchmarks.random_problems.families import Model, draw_model
from benchmarks.random_problems.sizes import log_uniform, rounded

MOST_SEQUENCES = 2**17
# How many keys a user fixes, and how often.
FIXED = ((0, 68), (1, 22), (2, 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem, and the numbers by which it is drawn again."""

    seed: int
    number: int
    model: Model
    cluster: DrawnCluster
    global_batch: int
    constraints: dict[str, object] = field(default_factory=dict)
    execution: dict[str, Any] = field(default_factory=dict)
    allow_lossy: bool = False

    @property
    def told(self) -> str:
        """In words."""
        fixed = [f"{key}={value}" for key, value in {**self.constraints, **self.execution}.items()]
        lossy = ["lossy"] if self.allow_lossy else []
        return f"{self.model.told} on {self.cluster.told}, batch {self.global_batch}{''.join(f' {w}' for w in fixed + lossy)}"

    def problem(self, graph: ModelGraph) -> Problem:
        execution = Execution(**self.execution)
        return Problem(
            graph=graph, cluster=self.cluster.load(), global_batch=self.global_batch, constraints=self.constraints,
            execution=execution, allow_lossy=self.allow_lossy,
        )  # fmt: skip


def draw_case(seed: int, number: int) -> Case:
    """The case of these two numbers, always the same."""
    rng = Random(f"{seed}/{number}")
    drawn = draw_cluster(rng)
    cluster = drawn.load()
    memory = sum(
        group.devices * (group.device.memory_bytes - group.device.reserve_bytes) for group in cluster.groups
    )
    model = draw_model(rng, cluster.devices, memory)
    common = frozenset.intersection(*(frozenset(group.device.peak_flops) for group in cluster.groups))
    batch, constraints = _batch(rng, model, cluster.devices), _constraints(rng, model, cluster.devices)
    execution = _execution(rng, common)
    software = _software(Random(f"{seed}/{number}/software"), str(execution.get("dtype", Execution().dtype)))
    return Case(
        seed=seed, number=number, model=model, cluster=drawn, global_batch=batch, constraints=constraints,
        execution={**software, **execution}, allow_lossy=rng.random() < 0.15,
    )  # fmt: skip


def _batch(rng: Random, model: Model, devices: int) -> int:
    """A power of two, a multiple of the devices, or three or five times a power of two."""
    least, most = model.samples
    if model.seq_len and model.seq_len >= 8192:
        most = min(most, 8.0)
    wanted = max(1.0, min(devices * log_uniform(rng, least, most), MOST_SEQUENCES))
    kind = rng.random()
    if kind < 0.55:
        return int(1 << max(0, round(wanted).bit_length() - 1))
    if kind < 0.85 and wanted >= devices:
        return rounded(wanted, devices)
    odd = rng.choice((3, 5, 3, 15))
    return int(odd * (1 << max(0, round(wanted / odd).bit_length() - 1)))


def _execution(rng: Random, peaks: frozenset[str]) -> dict[str, Any]:
    """Mostly the defaults."""
    found: dict[str, Any] = {}
    if "bf16" not in peaks and "fp16" in peaks:
        found["dtype"] = "fp16"
    elif "fp8" in peaks and rng.random() < 0.08:
        found["dtype"] = "fp8"
    if rng.random() < 0.1:
        found["optimizer"] = rng.choice(("sgd-momentum", "adafactor", "adam"))
    if rng.random() < 0.1:
        found["kernels"] = rng.choice(("eager", "compiled"))
    if rng.random() < 0.05:
        found["attention"] = "unfused"
    if rng.random() < 0.08:
        found["param_dtype"] = "fp32"
    if rng.random() < 0.06:
        found["async_tp"] = True
    return found


def _software(rng: Random, dtype: str) -> dict[str, Any]:
    """What a stack that people train with does of its own accord; mostly none."""
    if rng.random() >= 0.3:
        return {}
    return dict(stack_values(rng.choice(stack_names()), dtype))


def _constraints(rng: Random, model: Model, devices: int) -> dict[str, object]:
    """What a user fixes: mostly nothing."""
    found: dict[str, object] = {}
    for _ in range(pick(rng, FIXED)):
        key, value = rng.choice(_fixable(model, devices))
        found[key] = value
    if found.get("pipeline.schedule", "none") != "none" and found.get("mesh.pp") == 1:
        del found["pipeline.schedule"]
    return found


def _fixable(model: Model, devices: int) -> list[tuple[str, object]]:
    tensor = [n for n in (2, 4, 8) if model.heads and model.heads % n == 0 and n <= devices]
    return [
        ("shard.zero", 1), ("shard.zero", 3), ("shard.zero", 2), ("mesh.cp", 1), ("mesh.pp", 1), ("mesh.tp", 1),
        ("mesh.dp_replicate", 1), ("recompute.mode", "none"), ("recompute.mode", "full"), ("offload.optimizer", 0.0),
        ("offload.activations", 0.0), ("batch.micro", 1), ("grad_sync.overlap", False), ("grad_sync.bucket_mib", 25.0),
        *(("mesh.tp", n) for n in tensor),
        *((("shard.sequence_parallel", True),) if tensor else ()),
        *((("mesh.pp", 2), ("pipeline.schedule", "1f1b")) if devices % 2 == 0 and devices > 2 else ()),
        *((("mesh.pp", 4), ("pipeline.schedule", "zb1p")) if devices % 4 == 0 and devices > 8 else ()),
    ]  # fmt: skip
