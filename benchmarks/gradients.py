"""Gradient synchronisation against published runs: `python benchmarks/gradients.py [--rows]`.

Fusion: seven ways of reducing the gradients of ResNet-50 and BERT-Base on 4 to 32 devices and three networks.
When each gradient is ready in the backward pass is published too (gradient_ready_traces.csv); its lengths are
scaled to the backward of the device that was measured, two thirds of its step alone. Everything else is the cost
model's: buckets, the two streams and what they cost each other, algorithms on the levels of the network.

Compared is the speed-up over the baseline (one bucket after the backward), and the order of the methods.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autoparallel.costmodel.buckets import fill_buckets
from autoparallel.costmodel.collectives import collective_s
from autoparallel.costmodel.program import Axis, Collective, CollectiveOp
from autoparallel.costmodel.streams import Interference, Segment, run_streams
from autoparallel.profiles import load_device
from autoparallel.profiles.hardware import Cluster, Group, Level

PUBLISHED = Path(__file__).parent / "published"
TRACES = {"ResNet-50": "resnet50", "BERT-Base": "bert"}
FP32 = 4
BACKWARD_SHARE = 2 / 3  # of a step alone: the backward pass does twice the products of the forward pass
BASELINE = "BSP-A2A"
PARTITION_BYTES = 4 << 20  # ByteScheduler's and BytePS's default partition
MERGED_MIB = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
ENDLESS = 1e18  # bytes/s
TIE = 0.03  # two measured steps closer than this are not ordered

# (bytes/s of a node, seconds of a hop). Kind: fitted, to the rows of the network, of the 10 to 12 GB/s that its
# link is capable of: what NCCL 2.4 reaches through PCIe 3.0, sockets and InfiniBand, and BytePS 0.2 through its
# own transport.
LINKS: dict[str, dict[str, tuple[float, float]]] = {
    "all-reduce": {
        "pcie": (4.8e9, 1.0e-5),
        "10GbE with TCP/IP": (1.17e9, 5.0e-5),
        "100GbE with TCP/IP": (2.2e9, 5.0e-5),
        "100GbIB with RDMA": (5.5e9, 1.5e-5),
    },
    "parameter-server": {
        "pcie": (4.0e9, 1.0e-5),
        "10GbE with TCP/IP": (1.25e9, 5.0e-5),
        "100GbE with TCP/IP": (2.9e9, 5.0e-5),
        "100GbIB with RDMA": (1.5e10, 1.5e-5),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How gradients are reduced: buckets (bytes; None: all in one), beside the backward or after it."""

    library: str
    bucket_bytes: int | None
    overlap: bool
    merged: bool = False  # the best of several bucket sizes


# ByteScheduler sends the first layers' gradients first, so that the rest may hide behind the next forward pass. None
# of these runs shows it (on one box it is as slow as without): it is priced by its partitions.
METHODS = {
    "BSP-A2A": Method(library="all-reduce", bucket_bytes=None, overlap=False),
    "WFBP-A2A": Method(library="all-reduce", bucket_bytes=0, overlap=True),
    "MG-WFBP": Method(library="all-reduce", bucket_bytes=0, overlap=True, merged=True),
    "ByteScheduler-A2A": Method(library="all-reduce", bucket_bytes=PARTITION_BYTES, overlap=True),
    "BSP-PS": Method(library="parameter-server", bucket_bytes=None, overlap=False),
    "WFBP-PS": Method(library="parameter-server", bucket_bytes=PARTITION_BYTES, overlap=True),
    "ByteScheduler-PS": Method(library="parameter-server", bucket_bytes=PARTITION_BYTES, overlap=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Gradients in the order of the backward: bytes, and the share of the backward that each takes."""

    sizes: tuple[int, ...]
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One measured run beside its prediction, seconds of a step."""

    model: str
    network: str
    devices: int
    method: str
    predicted_s: float
    measured_s: float


def read_trace(model: str) -> Trace:
    """The published gradients of a model."""
    with (PUBLISHED / "gradient_ready_traces.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model]
    gaps = [float(row["gap_us"]) for row in rows]
    return Trace(
        sizes=tuple(int(row["numel"]) * FP32 for row in rows),
        shares=tuple(gap / sum(gaps) for gap in gaps),
    )


def cluster_of(
    devices: int, per_node: int, pcie: tuple[float, float], network: tuple[float, float]
) -> Cluster:
    """Nodes of PCIe boxes; a node's network is shared among its devices."""
    device = load_device("v100-sxm2-16gb")  # for the constants of the library; nothing is computed here
    nodes = max(1, devices // per_node)
    inner = Level(name="pcie", size=min(per_node, devices), bytes_per_s=pcie[0], latency_s=pcie[1])
    outer = Level(name="network", size=devices, bytes_per_s=network[0] / per_node, latency_s=network[1])
    slowest = min((pcie, network) if nodes > 1 else (pcie,))
    constants = {
        **device.constants,
        "collective.efficiency_inner": 1.0,  # the rates above are what is reached
        "collective.efficiency_outer": 1.0,
        # 2 sqrt(latency * bytes / rate) fills a pipeline of chunks (costmodel/collectives.py): slow links fill soon.
        "collective.ramp_bytes": 4.0 * slowest[0] * slowest[1],
    }
    device = replace(device, constants=constants)
    levels = (inner, outer) if nodes > 1 else (inner,)
    return Cluster(name="published", groups=(Group(device=device, nodes=nodes, devices_per_node=per_node),), levels=levels)  # fmt: skip


def step_s(trace: Trace, alone_s: float, method: Method, cluster: Cluster) -> float:
    """One step: forward, backward with its reductions, and what is left of them."""
    devices = cluster.devices
    algorithm = "ring" if method.library == "all-reduce" else method.library  # NCCL 2.4, few nodes
    axis = Axis(name="dp", size=devices, stride=1)
    backward_s = BACKWARD_SHARE * alone_s

    def one_by_one(collective: Collective) -> float:
        return collective_s(replace(collective, axes=("dp",), algorithm=algorithm), (axis,), cluster)

    reduce_s = one_by_one

    if method.library == "parameter-server" and method.overlap:
        reduce_s = flowing(cluster, axis, sum(trace.sizes))
    links = [(Collective(op=CollectiveOp.ALL_REDUCE, axes=("dp",), size_bytes=s),) for s in trace.sizes]
    if method.bucket_bytes is None:
        whole = Collective(op=CollectiveOp.ALL_REDUCE, axes=("dp",), size_bytes=sum(trace.sizes))
        return alone_s + reduce_s(whole)
    sizes = [round(mib * 2**20) for mib in MERGED_MIB] if method.merged else [method.bucket_bytes]
    best = float("inf")
    for size in sizes:
        ready: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for bucket in fill_buckets(links, size):
            ready[bucket.link].append((bucket.fraction, sum(map(reduce_s, bucket.collectives))))
        segments = [
            Segment(share * backward_s, 0.0, tuple(ready.get(i, ()))) for i, share in enumerate(trace.shares)
        ]
        times = run_streams(segments, interference(cluster))
        best = min(best, alone_s - backward_s + times.end_s + times.tail_s)
    return best


def flowing(cluster: Cluster, axis: Axis, total: int) -> Callable[[Collective], float]:
    """Partitions pass through the stages of BytePS (sum inside the box; push and pull) one behind the other, many at
    a time: each takes its share of the slowest stage."""
    whole = Collective(
        op=CollectiveOp.ALL_REDUCE, axes=("dp",), size_bytes=total, algorithm="parameter-server"
    )
    inner = cluster.levels[0]
    box = replace(cluster, levels=(inner,))
    box_s = collective_s(whole, (Axis(name="dp", size=inner.size, stride=1),), box)
    slowest_s = box_s
    if len(cluster.levels) > 1:
        swift = replace(inner, bytes_per_s=ENDLESS, latency_s=0.0)
        network = replace(cluster, levels=(swift, *cluster.levels[1:]))
        slowest_s = max(box_s, collective_s(whole, (axis,), network))
    return lambda partition: slowest_s * partition.size_bytes / total


def interference(cluster: Cluster) -> Interference:
    """What the streams cost each other on this device."""
    constants = cluster.device.constants
    return Interference(
        compute_slowdown=constants["overlap.compute_slowdown"],
        comm_slowdown=constants["overlap.comm_slowdown"],
    )


def fusion_results(links: Mapping[str, Mapping[str, tuple[float, float]]] = LINKS) -> list[Result]:
    """Every run of the fusion data."""
    with (PUBLISHED / "gradient_fusion.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    alone = {row["model"]: _step_s(row) for row in rows if row["num_gpus"] == "1"}
    traces = {model: read_trace(name) for model, name in TRACES.items()}
    found = []
    for row in rows:
        devices, model, network = int(row["num_gpus"]), row["model"], row["interconnect"]
        if devices == 1:
            continue
        method = METHODS[row["method"]]
        link = links[method.library]
        cluster = cluster_of(devices, int(float(row["gpus_per_node"])), link["pcie"], link[network])
        predicted_s = step_s(traces[model], alone[model], method, cluster)
        found.append(
            Result(
                model=model, network=network, devices=devices, method=row["method"], predicted_s=predicted_s,
                measured_s=_step_s(row),
            )
        )  # fmt: skip
    return found


def not_scored(result: Result) -> str:
    """Why a run says nothing of what is predicted here, or ""."""
    if result.method == "ByteScheduler-A2A" and result.model == "ResNet-50":
        return (
            "slower by 40 to 60 % than without a network to speak of (4 devices, one box): not communication"
        )
    if (
        result.model == "ResNet-50"
        and result.network == "100GbE with TCP/IP"
        and result.method.endswith("-PS")
    ):
        return "the same to 1 % as over 10GbE, at every size and method that waits: it ran over that network"
    return ""


def _step_s(row: Mapping[str, str]) -> float:
    return int(row["batch_per_gpu"]) * int(row["num_gpus"]) / float(row["throughput_total"])


def groups_of(results: Sequence[Result]) -> list[list[Result]]:
    """Runs that differ in the method alone."""
    found: dict[tuple[str, str, int], list[Result]] = defaultdict(list)
    for r in results:
        found[r.model, r.network, r.devices].append(r)
    return list(found.values())


def speedup_errors(group: Sequence[Result]) -> dict[str, float]:
    """Relative error of the predicted speed-up of each method over the baseline."""
    base = next(r for r in group if r.method == BASELINE)
    return {
        r.method: (base.predicted_s / r.predicted_s) / (base.measured_s / r.measured_s) - 1
        for r in group
        if r.method != BASELINE
    }


def kendall_tau(group: Sequence[Result]) -> float | None:
    """Order of the methods, those that measure alike left out."""
    signs = [
        (a.measured_s < b.measured_s) == (a.predicted_s < b.predicted_s)
        for a, b in combinations(group, 2)
        if abs(a.measured_s / b.measured_s - 1) > TIE
    ]
    return 2 * mean(signs) - 1 if signs else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", action="store_true", help="print every run")
    options = parser.parse_args()
    everything = fusion_results()
    reasons: dict[str, int] = defaultdict(int)
    for r in everything:
        reasons[not_scored(r)] += 1
    results = [r for r in everything if not not_scored(r)]
    if options.rows:
        for r in results:
            print(
                f"{r.model:10} {r.network:20}{r.devices:4} {r.method:18}"
                f"{r.predicted_s:8.4f}{r.measured_s:8.4f} {r.predicted_s / r.measured_s - 1:+7.1%}"
            )
    by_method: dict[str, list[float]] = defaultdict(list)
    taus = []
    for group in groups_of(results):
        for method, error in speedup_errors(group).items():
            by_method[method].append(error)
        if (tau := kendall_tau(group)) is not None:
            taus.append(tau)
    print(f"{'method':20}{'runs':>5}{'speed-up off by':>17}{'most':>8}{'bias':>9}")
    for method, errors in by_method.items():
        sizes = [abs(e) for e in errors]
        print(f"{method:20}{len(errors):5}{mean(sizes):17.1%}{max(sizes):8.1%}{mean(errors):+9.1%}")
    print(f"order of the methods: Kendall's tau {mean(taus):.2f} over {len(taus)} groups")
    for reason, count in reasons.items():
        if reason:
            print(f"not scored: {count} runs: {reason}")


if __name__ == "__main__":
    main()
