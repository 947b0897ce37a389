"""Does the model flatter what a planner would pick? `python benchmarks/winners.py ROWS.csv … [--cache DIR]`.

A planner takes the strategy with the highest predicted rate, so that errors in its favour are picked more often than others
(the winner's curse). For each device and dtype: the highest model FLOPs utilisation that anybody measured, and the error of
the tenth of the rows with the highest predicted one (at least three), beside that of all rows; positive errors are too slow.

`--plans` sets beside them what a plan of Llama-8B on one box comes out at. Utilisation counts attention as causal here, for what a
kernel leaves out under a causal mask would flatter long sequences: at 8,192 tokens a ninth of such a model's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autoparallel.planner.plan import plan
from autoparallel.planner.problem import Problem
from autoparallel.planner.strategy.stacks import told
from autoparallel.planner.strategy.types import Execution
from autoparallel.profiles import device_names, load_cluster, load_device
from benchmarks.accuracy import DEVICES, Graphs, Scorer, score_rows
from benchmarks.models import Shape
from benchmarks.rows import DTYPES, Row, read_rows, shape_of
from benchmarks.summary import Scored

LEAST, SHARE = 3, 0.1
PLANNING_S = 20.0
LLAMA_8B = Shape(
    family="llama", hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn_hidden=14336, gated=True, vocab=128256,
    tied=False, seq_len=8192, rotary=True, experts=0, experts_per_token=0, dropout=0.0, loss="fp32", fused_norm=False,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Winners:
    """Rows of one device and dtype: how high their MFU was measured, and how far off those are that look best."""

    rows: int
    measured_mfu: float
    predicted_mfu: float
    bias: float
    winners_bias: float


def measured_mfu(row: Scored) -> float:
    """The predicted utilisation at the measured step."""
    assert row.measured_s
    return row.mfu * row.predicted_s / row.measured_s


def winners(rows: Sequence[Scored]) -> Winners:
    """What is said of the rows of one device and dtype."""
    best = sorted(rows, key=lambda row: -row.mfu)[: max(LEAST, round(SHARE * len(rows)))]
    return Winners(
        rows=len(rows),
        measured_mfu=max(map(measured_mfu, rows)),
        predicted_mfu=best[0].mfu,
        bias=mean(row.error or 0.0 for row in rows),
        winners_bias=mean(row.error or 0.0 for row in best),
    )


def executed_share(shape: Shape, layers: int) -> float:
    """Of a dense model's FLOPs, attention counted whole, what a causal kernel executes.

    A token's products take 2 P, its attention 4 s d h a layer (scores and values), of which half is masked; backward is twice that.
    """
    width, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    of_layer = (
        shape.hidden * (2 * width + 2 * kv) + (3 if shape.gated else 2) * shape.hidden * shape.ffn_hidden
    )
    products = 2 * (layers * of_layer + shape.vocab * shape.hidden)
    attention = 4 * layers * shape.seq_len * width
    return (products + attention / 2) / (products + attention)


def by_device(rows: Sequence[Row], scored: Sequence[Scored]) -> dict[tuple[str, str], Winners]:
    """Winners of each device and dtype that has enough rows."""
    place = {row["id"]: (row["device"], DTYPES.get(row["dtype"], row["dtype"])) for row in rows}
    share = {row["id"]: executed_share(shape_of(row), int(row["layers"])) for row in rows if row["layers"]}
    groups: dict[tuple[str, str], list[Scored]] = {}
    for one in scored:
        if one.outcome == "ok" and one.measured_s:
            groups.setdefault(place[one.id], []).append(replace(one, mfu=one.mfu * share[one.id]))
    return {key: winners(group) for key, group in sorted(groups.items()) if len(group) >= LEAST}


def plan_mfu(device: str, dtype: str, graphs: Graphs) -> float:
    """Utilisation of the plan of Llama-8B in 128 sequences of 8,192 tokens on eight devices, attention counted as causal."""
    execution = told(Execution(), {"execution.stack": "nemo", "execution.dtype": dtype})
    per_node = min(8, load_device(device).devices_per_node)
    cluster = load_cluster(f"{device}:{8 // per_node}x{per_node}")
    problem = Problem(graph=graphs.of(LLAMA_8B, 32), cluster=cluster, global_batch=128, execution=execution)
    return plan(problem, time_limit_s=PLANNING_S).prediction.mfu * executed_share(LLAMA_8B, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("--cache", type=Path, help="keep captured graphs in this folder")
    parser.add_argument("--plans", action="store_true", help="plan Llama-8B on a box of each device, too")
    options = parser.parse_args()
    graphs = Graphs(options.cache)
    rows = read_rows(options.rows)
    scored, _ = score_rows(rows, Scorer(graphs), (DEVICES,))
    print(
        "| device | dtype | rows | highest MFU measured | highest predicted | bias | bias of those that look best | plan |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (device, dtype), w in by_device(rows, scored).items():
        planned = (
            f"{plan_mfu(device, dtype, graphs):.0%}" if options.plans and device in device_names() else ""
        )
        print(
            f"| {device} | {dtype} | {w.rows} | {w.measured_mfu:.0%} | {w.predicted_mfu:.0%} | {w.bias:+.1%} | {w.winners_bias:+.1%} | {planned} |"
        )


if __name__ == "__main__":
    main()
