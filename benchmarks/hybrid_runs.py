"""Predicted against published throughput of a model of state-space layers, experts and attention, which no constant was fitted to:
`python -m benchmarks.hybrid_runs`.

Nemotron 3 Nano (31.6 billion parameters, 52 layers: 23 of Mamba-2, 23 of experts, 6 of attention) under Megatron-Bridge, as NVIDIA's
performance summary has it (benchmarks/published/hybrid_rows.csv); on H100 its norms are computed again, which is not predicted.
"""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import mean

import torch

from autoparallel.planner.capture import capture
from autoparallel.planner.capture.load import load_model
from autoparallel.planner.plan import plan
from autoparallel.planner.problem import Problem
from autoparallel.planner.strategy.stacks import told
from autoparallel.planner.strategy.types import Execution
from autoparallel.profiles import load_cluster

PUBLISHED = Path(__file__).parent / "published" / "hybrid_rows.csv"
CONFIG = Path(__file__).resolve().parents[1] / "examples" / "configs" / "nemotron-3-nano.json"


def scored() -> list[tuple[dict[str, str], float]]:
    """(row, predicted tokens per second and device) of every row."""
    with PUBLISHED.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    loaded = load_model(f"hf:{CONFIG}", model_args={}, seq_len=int(rows[0]["seq_len"]))
    graph = capture(loaded.module.to(torch.bfloat16), loaded.example_inputs, name=CONFIG.stem)
    found = []
    for row in rows:
        cluster = load_cluster(row["cluster"])
        fixed = {
            "mesh.dp_shard": cluster.devices,
            "mesh.ep": int(row["ep"]),
            "shard.zero": 1,
            "batch.micro": int(row["micro_batch"]),
            "execution.stack": "megatron-bridge",
            "execution.dtype": row["dtype"],
            "recompute.mode": "none",
        }
        batch = int(row["global_batch"])
        problem = Problem(
            graph=graph,
            cluster=cluster,
            global_batch=batch,
            constraints=fixed,
            execution=told(Execution(), fixed),
        )
        step_s = plan(problem, advise=False).prediction.step_time_s
        found.append((row, batch * int(row["seq_len"]) / step_s / cluster.devices))
    return found


def main() -> None:
    errors = []
    print(f"{'cluster':14}{'dtype':8}{'published':>10}{'predicted':>11}   tokens/s per device")
    for row, predicted in scored():
        published = float(row["tokens_per_s_per_device"])
        errors.append(predicted / published - 1)
        print(f"{row['cluster']:14}{row['dtype']:8}{published:10,.0f}{predicted:11,.0f} {errors[-1]:+7.1%}")
    print(f"mean error {mean(map(abs, errors)):.1%}")


if __name__ == "__main__":
    main()
