"""Do plans win when measured? Strategies of every kind, run on a few processes of this machine.

python -m benchmarks.measured_plans [--processes 2] [--device cpu-gloo] [--only Llama MLP] [--json OUT.json]

For each small model the planner makes the best of each kind of strategy below, and its own plan. All of them train on Gloo
processes of one thread each: one launch per model, every strategy `ROUNDS` times in turns, the least step
counts, so that other work on the machine counts little. Printed are each step, predicted and measured; Kendall's tau
of the two orders; and the regret: how much longer the plan takes than the fastest strategy measured. A file
written by `autoparallel profile` as --device shows what calibration to this machine changes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autoparallel import auto_parallelize
from autoparallel.costmodel.graph import ModelGraph
from autoparallel.errors import UserError
from autoparallel.planner.capture import capture
from autoparallel.planner.outcome import InfeasiblePlan
from autoparallel.planner.plan import plan
from autoparallel.planner.problem import Problem
from autoparallel.planner.strategy.types import Execution, Strategy
from autoparallel.profiles import Cluster, load_cluster
from autoparallel.runtime.capabilities.table import limits
from benchmarks.small_models import MODELS, make
from benchmarks.summary import Scored, kendall_tau, picks_near_best

SHARE = 2  # times the samples of a step of one process: what each process takes of a step
LEARNING_RATE = 1e-4
ROUNDS, WARM_UP, STEPS = 2, 2, 4
EXECUTION = Execution(
    dtype="fp32", param_dtype="fp32", master_weights=False, grad_dtype="fp32", kernels="eager", dtensor=True
)
FREE = "the plan"


def kinds(processes: int) -> dict[str, dict[str, object]]:
    """What is fixed for each kind of strategy; the planner chooses the rest."""
    whole: dict[str, dict[str, object]] = {
        FREE: {},
        "replicas": {"mesh.dp_replicate": processes},
        "tp": {"mesh.tp": processes, "shard.sequence_parallel": False},
        "tp, sequence parallel": {"mesh.tp": processes, "shard.sequence_parallel": True},
        "cp": {"mesh.cp": processes},
    }
    whole |= {f"zero {zero}": {"mesh.dp_shard": processes, "shard.zero": zero} for zero in (1, 2, 3)}
    schedules = ("gpipe", "1f1b", "interleaved-1f1b", "zb1p")
    whole |= {f"pp, {word}": {"mesh.pp": processes, "pipeline.schedule": word} for word in schedules}
    whole["replicas, small micro-batches"] = {**whole["replicas"], "batch.micro": 1}
    whole["replicas, recomputed"] = {**whole["replicas"], "recompute.mode": "full"}
    whole["tp, small micro-batches"] = {**whole["tp"], "batch.micro": 1}
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One strategy to run."""

    kind: str
    strategy: Strategy
    predicted_s: float


def cases(graph: ModelGraph, cluster: Cluster, global_batch: int) -> list[Case]:
    """The best strategy of each kind that the model and the runtime have, without repetition; the plan first."""
    found: list[Case] = []
    for kind, fixed in kinds(cluster.devices).items():
        try:
            problem = Problem(
                graph=graph,
                cluster=cluster,
                global_batch=global_batch,
                constraints={**limits(fixed), **fixed},
                execution=EXECUTION,
                all_devices=True,
            )
            result = plan(problem)
        except (UserError, InfeasiblePlan) as error:
            print(f"  {kind}: {str(error).splitlines()[0][:110]}")
            continue
        if all(result.strategy != case.strategy for case in found):
            found.append(Case(kind=kind, strategy=result.strategy, predicted_s=result.prediction.step_time_s))
    return found


def train(rank: int, processes: int, name: str, strategies: Sequence[Strategy], folder: str) -> None:
    """One process: every strategy `ROUNDS` times in turns. Rank 0 writes the least seconds of each one's steps."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    least = [float("inf")] * len(strategies)
    for _ in range(ROUNDS):
        for number, strategy in enumerate(strategies):
            least[number] = min(least[number], step_s(name, strategy))
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(least))
    dist.destroy_process_group()


def trained(name: str, strategy: Strategy, cluster: Cluster | None = None) -> Callable[[], float]:
    """What trains one step of a model by a strategy, and returns its seconds. Collective, both."""
    module, inputs = make(name, strategy.batch.global_)
    model: Any = auto_parallelize(module, inputs, strategy=strategy, cluster=cluster, cache=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    share = strategy.batch.global_ // model.data_parallel_size
    first = model.data_parallel_rank * share
    mine = {key: value[first : first + share] for key, value in inputs.items()}

    def step() -> float:
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        model.step(mine)
        optimizer.step()
        dist.barrier()
        return time.perf_counter() - begin

    return step


def step_s(name: str, strategy: Strategy) -> float:
    """The least seconds of a few training steps of a model by a strategy. Collective."""
    step = trained(name, strategy)
    return min([step() for _ in range(WARM_UP + STEPS)][WARM_UP:])


def measure(name: str, strategies: Sequence[Strategy], processes: int) -> list[float]:
    """Seconds per step of each strategy, in one launch."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(processes, name, strategies, folder), nprocs=processes)  # type: ignore[no-untyped-call]
        seconds: list[float] = json.loads(Path(folder, "seconds.json").read_text())
    return seconds


def compare(name: str, cluster: Cluster) -> list[Scored]:
    """A model's strategies, predicted and measured; the plan first."""
    samples = MODELS[name][1] * SHARE
    model, inputs = make(name, 2)
    graph = capture(model, inputs, name=name)
    found = cases(graph, cluster, samples * cluster.devices)
    seconds = measure(name, [case.strategy for case in found], cluster.devices)
    return [
        Scored(
            id=case.kind, source=cluster.name, group=name, outcome="ok", predicted_s=case.predicted_s, measured_s=measured_s,
            feasible=True, predicted_gib=0.0, measured_gib=None, memory_kind="",
        )
        for case, measured_s in zip(found, seconds, strict=True)
    ]  # fmt: skip


def regret(rows: Sequence[Scored]) -> float:
    """How much longer the plan, the first row, takes than the fastest measured: 0.1 is 10 %."""
    best = min(row.measured_s or 0.0 for row in rows)
    return (rows[0].measured_s or 0.0) / best - 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", default="cpu-gloo")
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", type=Path, help="write all steps here")
    options = parser.parse_args()
    cluster = load_cluster(f"{options.device}:1x{options.processes}")
    every: list[list[Scored]] = []
    for name in options.only:
        print(f"{name:34}{'predicted':>12}{'measured':>12}{'error':>9}", flush=True)
        rows = compare(name, cluster)
        for row in rows:
            print(
                f"  {row.id:32}{row.predicted_s * 1e3:9.1f} ms{(row.measured_s or 0) * 1e3:9.1f} ms{row.error:+9.1%}"
            )
        tau = kendall_tau(rows)
        print(
            f"  tau {'-' if tau is None else f'{tau:.2f}'}, regret of the plan {regret(rows):.1%}", flush=True
        )
        every.append(rows)
    taus = [tau for rows in every if (tau := kendall_tau(rows)) is not None]
    print(
        f"{len(every)} models: tau {mean(taus):.2f}, regret {mean(map(regret, every)):.1%}, "
        f"fastest found within 3 % in {mean(map(picks_near_best, every)):.0%}"
    )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for rows in every for row in rows], indent=1))


if __name__ == "__main__":
    main()
