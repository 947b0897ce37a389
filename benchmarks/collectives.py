"""Predicted against published collective times: `python benchmarks/collectives.py [--rows]`.

Reads benchmarks/published/collectives.csv, whose `origin` column says where each row was read. Rows taken
through torch.distributed cannot be shorter than a call takes on the host (`collective.host_s`).
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from autoparallel.costmodel.collectives import alone_collective_s
from autoparallel.costmodel.program import Axis, Collective, CollectiveOp
from autoparallel.profiles import Cluster, load_cluster

PUBLISHED = Path(__file__).parent / "published" / "collectives.csv"
Row = dict[str, str]
OPS = {
    "all_reduce": CollectiveOp.ALL_REDUCE, "all_reduce (rccl)": CollectiveOp.ALL_REDUCE,
    "all_gather": CollectiveOp.ALL_GATHER, "reduce_scatter": CollectiveOp.REDUCE_SCATTER,
    "alltoall": CollectiveOp.ALL_TO_ALL, "all_to_all": CollectiveOp.ALL_TO_ALL,
}  # fmt: skip
THROUGH_TORCH = ("AFDWang/Hetu-Galvatron", "PKU-DAIR/Hetu-Galvatron", "MooreThreads/SimuMax")


def skip_reason(row: Row) -> str:
    """Why a row cannot be scored, or ""."""
    if row["op"] not in OPS:
        return (
            "send and receive whose rate exceeds the link"
            if row["op"] == "sendrecv"
            else "not stated what it is"
        )
    if not float(row["size_bytes"] or 0):
        return "message size not stated"
    if not row["time_us"]:
        return "time not stated"
    if "TCPXO" in row["network"]:
        return "GPUDirect-TCPXO hop latency is published nowhere"
    return ""


def cluster_of(row: Row) -> Cluster:
    """The row's box: the shipped profile of its device at its network's rate."""
    nodes, ranks = int(row["nodes"]), int(row["num_gpus"])
    per_node = ranks // nodes
    gpu = row["gpu"]
    if gpu.startswith("GB200"):
        return load_cluster(f"gb200:{nodes}x{per_node}")
    if "MI300X" in gpu:
        return load_cluster(f"mi300x:{nodes}x{per_node}")
    if "A3 High" in gpu:
        return load_cluster("a3-high")
    if gpu.startswith("H100"):
        return load_cluster(f"h100-sxm:{nodes}x{per_node}")
    return load_cluster(f"a100-sxm-40gb:{nodes}x{per_node}")


def predict_s(row: Row) -> float:
    cluster = cluster_of(row)
    ranks = int(row["num_gpus"])
    collective = Collective(op=OPS[row["op"]], axes=("all",), size_bytes=int(float(row["size_bytes"])))
    seconds = alone_collective_s(collective, (Axis(name="all", size=ranks, stride=1),), cluster)
    if row["origin"].startswith(THROUGH_TORCH):
        constants = cluster.device.constants
        peers = ranks - 1 if collective.op == CollectiveOp.ALL_TO_ALL else 0
        return max(seconds, constants["collective.host_s"] + peers * constants["collective.peer_s"])
    return seconds


def score(rows: Sequence[Row]) -> tuple[list[tuple[Row, float, float]], dict[str, int]]:
    """(row, predicted seconds, measured seconds) of the rows that can be scored; counts of the others."""
    scored, skipped = [], defaultdict(int)
    for row in rows:
        reason = skip_reason(row)
        if reason:
            skipped[reason] += 1
        else:
            scored.append((row, predict_s(row), float(row["time_us"]) * 1e-6))
    return scored, dict(skipped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true", help="print every row")
    arguments = parser.parse_args()
    with PUBLISHED.open(encoding="utf-8") as file:
        scored, skipped = score(list(csv.DictReader(file)))
    groups: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for row, predicted_s, measured_s in scored:
        error = predicted_s / measured_s - 1
        key = (
            row["gpu"][:24],
            row["op"],
            f"{row['nodes']} nodes, {row['num_gpus']} ranks",
            row["origin"][:24],
        )
        groups[key].append(error)
        if arguments.rows:
            size = float(row["size_bytes"])
            print(f"{'  '.join(key):90}{size:14.0f} B{measured_s * 1e6:12.1f} µs {error:+7.1%}")
    print(f"{'device':26}{'collective':20}{'group':22}{'source':26}{'rows':>5}{'mean error':>12}{'bias':>9}")
    for (gpu, op, group, origin), errors in groups.items():
        size = mean(abs(error) for error in errors)
        print(f"{gpu:26}{op:20}{group:22}{origin:26}{len(errors):5}{size:12.1%}{mean(errors):+9.1%}")
    everything = [abs(error) for errors in groups.values() for error in errors]
    print(f"{'all':94}{len(everything):5}{mean(everything):12.1%}, median {median(everything):.1%}")
    for reason, count in skipped.items():
        print(f"not scored: {count} rows: {reason}")


if __name__ == "__main__":
    main()
