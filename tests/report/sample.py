"""A strategy file as `plan` writes it, from made-up predictions: what the report's tests draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoparallel.answer import TIMELINE_SPANS_PER_RANK, alternative_table, timeline_table
from autoparallel.costmodel.prediction import BREAKDOWN_KEYS, Span
from autoparallel.costmodel.timeline import cut_between
from autoparallel.labels import strategy_label
from autoparallel.planner.outcome import Alternative
from autoparallel.planner.strategy.file import write_strategy
from autoparallel.planner.strategy.types import (
    Batch,
    GradSync,
    Mesh,
    Pipeline,
    Recompute,
    Shard,
    Strategy,
    TensorRule,
)
from autoparallel.profiles import cluster_to_dict, load_cluster

FORWARD_S, BACKWARD_S, STEP_S = 0.031, 0.064, 0.04


def strategy(*, pp: int, micro_batches: int) -> Strategy:
    """Tensor parallelism 2, data parallelism over the rest of 16 devices."""
    shard = 8 // pp
    return Strategy(
        batch=Batch(global_=micro_batches * shard, micro=1),
        mesh=Mesh(pp=pp, dp_shard=shard, tp=2),
        shard=Shard(zero=1, sequence_parallel=True),
        pipeline=Pipeline(schedule="1f1b" if pp > 1 else "none", stage_blocks=(32 // pp,) * pp),
        recompute=Recompute(mode="selective"),
        grad_sync=GradSync(compression=("none", "bf16")),
        tensor=(TensorRule(module="model.layers.*.mlp.down_proj", params=(("weight", "shard(1)"),)),),
    )


def one_f_one_b(pp: int, micro_batches: int) -> tuple[Span, ...]:
    """Spans of 1F1B with equal stages, each action as early as its inputs and its rank allow."""
    done: dict[tuple[str, int, int], float] = {}
    rows = []
    for rank in range(pp):
        warm = min(pp - rank, micro_batches)
        row = [("F", m) for m in range(warm)]
        for m in range(micro_batches):
            row.append(("B", m))
            if m + warm < micro_batches:
                row.append(("F", m + warm))
        rows.append(row)
    spans, at, clock = [], [0] * pp, [0.0] * pp
    while any(at[r] < len(rows[r]) for r in range(pp)):
        for rank in range(pp):
            while at[rank] < len(rows[rank]):
                kind, micro = rows[rank][at[rank]]
                before = ("F", rank - 1, micro) if kind == "F" else ("B", rank + 1, micro)
                if 0 <= before[1] < pp and before not in done:
                    break
                start = max(clock[rank], done.get(before, 0.0))
                clock[rank] = start + (FORWARD_S if kind == "F" else BACKWARD_S)
                done[kind, rank, micro] = clock[rank]
                label = "forward" if kind == "F" else "backward"
                action = f"{rank}{kind}{micro}"
                spans.append(Span(rank=rank, action=action, start_s=start, end_s=clock[rank], label=label))
                at[rank] += 1
    for rank in range(pp):
        spans.append(Span(rank=rank, action=f"{rank}REDUCE_GRAD", start_s=clock[rank] - 0.05,
                          end_s=clock[rank] + 0.02, label="dp_comm"))  # fmt: skip
        spans.append(Span(rank=rank, action=f"{rank}STEP", start_s=clock[rank] + 0.02,
                          end_s=clock[rank] + STEP_S, label="optimizer"))  # fmt: skip
    return tuple(spans)


def shortened(spans: Sequence[Span]) -> dict[str, Any]:
    """The table of a timeline that keeps as much of the spans as a strategy file does."""
    cut = cut_between([s.start_s for s in spans], TIMELINE_SPANS_PER_RANK * (max(s.rank for s in spans) + 1))
    kept = [s for s in spans if cut is None or s.start_s < cut[0] or s.start_s >= cut[1]]
    return timeline_table(kept, max(s.end_s for s in spans), cut)


def predicted(*, pp: int, micro_batches: int) -> dict[str, Any]:
    """`[predicted]` for those spans."""
    spans = one_f_one_b(pp, micro_batches)
    step_s = max(span.end_s for span in spans)
    shares = dict.fromkeys(BREAKDOWN_KEYS, 0.0) | {
        "forward": FORWARD_S * micro_batches,
        "backward": BACKWARD_S * micro_batches * 0.85,
        "tp_comm": BACKWARD_S * micro_batches * 0.15,
        "dp_comm": 0.02,
        "optimizer": 0.02,
    }
    shares["bubble"] = step_s - sum(shares.values())
    stages = [
        {"stage": r, "parameters": 7.5 / pp, "gradients": 15.0 / pp, "optimizer": 11.0,
         "activations": 9.0 * (pp - r), "buffers": 1.0,
         "peak": 22.5 / pp + 12.0 + 9.0 * (pp - r)} for r in range(pp)
    ]  # fmt: skip
    return {
        "model": {"name": "llama-3.1-8b", "parameters": 8030261248, "model_flops_per_step": 10**16},
        "feasible": True,
        "step_time_s": step_s,
        "tokens_per_s_per_device": 5321.0,
        "model_tflops_per_device": 431.0,
        "hardware_tflops_per_device": 450.0,
        "mfu": 0.436,
        "peak_memory_gib": max(s["peak"] for s in stages),
        "capacity_gib": 75.5,
        "devices": 16,
        "tokens_per_step": micro_batches * 8 // pp * 8192,
        "memory_gib_by_stage": stages,
        "breakdown_s": shares,
        "timeline": shortened(spans),
    }


def write_sample(path: Path, *, pp: int = 4, micro_batches: int = 16) -> Path:
    """A whole strategy file at `path`."""
    chosen = strategy(pp=pp, micro_batches=micro_batches)
    told = predicted(pp=pp, micro_batches=micro_batches)
    other = Alternative(
        kind="data parallel only", strategy=Strategy(batch=Batch(global_=64, micro=1), mesh=Mesh(dp_shard=16)),
        step_time_s=told["step_time_s"] * 1.07, peak_memory_gib=71.0, feasible=True,
        reason="its gradients cross infiniband with nothing left to hide them",
    )  # fmt: skip
    explored = [
        [told["step_time_s"] * (1 + 0.07 * i), 75.0 * 1.8 ** (j - i / 12), 75.0 * 1.8 ** (j - i / 12) < 75.5, f"<{i}, {j}>"]
        for i in range(1, 24) for j in (-1, 0, 1)
    ]  # fmt: skip
    search = {
        "status": "optimal", "lower_bound_s": told["step_time_s"], "gap": 0.0, "candidates": 48211, "pruned": 47990,
        "alternatives": [{**alternative_table(other, chosen), "label": strategy_label(other.strategy)}],
        "explored": explored,
    }  # fmt: skip
    problem = {
        "model": "hf:config.json", "graph_hash": "sha256:1234", "seq_len": 8192, "objective": "time",
        "cluster": cluster_to_dict(load_cluster("h100-sxm:2x8")),
    }  # fmt: skip
    write_strategy(path, chosen, problem, told, search)
    return path
