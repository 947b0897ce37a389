"""Gradient compression against published runs: `python benchmarks/compression.py [--rows]`.

ResNet-50 in GRACE (TensorFlow 1.15, Horovod over MPI) on 2 to 8 V100 joined by 10 Gbit/s, sixteen methods. What is
sent, and when, is GRACE's: quantised numbers travel as whole bytes, sparse ones as a value and an index, tensor by
tensor, gathered from every device after the backward pass; only what can be added is all-reduced beside it. Encoding is
a chain of TensorFlow operators per tensor: one constant per method of that framework, fitted on its first setting
(`FITTED`); the further settings of a method (ratios, levels), three quarters of the sparse rows, are predicted.

Our own encoders (costmodel/compression.py) pack bits and run fused: they are not what was measured here.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autoparallel.costmodel.collectives import collective_s
from autoparallel.costmodel.program import Axis, Collective, CollectiveOp
from autoparallel.profiles.hardware import Cluster
from benchmarks.gradients import METHODS, Result, Trace, cluster_of, kendall_tau, read_trace, step_s

PUBLISHED = Path(__file__).parent / "published" / "gradient_compression.csv"
MODEL = "resnet50"
# Samples per device. Not stated; 64 is what makes the exposed all-reduce of 102 MB over 10 Gbit/s what the
# uncompressed runs lose against one device.
BATCH = 64
# (bytes/s, seconds of a hop) of 10 Gbit/s Ethernet under Open MPI. Kind: fitted, to the uncompressed runs alone (least mean error).
NETWORK = (1.08e9, 5.0e-5)
VALUE_AND_INDEX = 8.0
# Bytes on the wire per gradient number, by method as GRACE sends it. Kind: formula, read from the methods' definitions
# (one int8 a number; int16 where more levels than 128 are asked for).
DENSE = {
    "signsgd": 1.0, "signum": 1.0, "efsignsgd": 1.0, "onebit": 1.0, "terngrad": 1.0, "natural": 1.0, "8bit": 1.0,
    "qsgd_q=64": 1.0, "qsgd_q=128": 2.0, "qsgd_q=256": 2.0, "sketch_q=64": 1.0, "sketch_q=128": 1.0,
    "sketch_q=256": 2.0,
}  # fmt: skip
SPARSE = ("topk", "dgc", "adaq")
ADDED = ("randomk", "none")  # all-reduced as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run; `family` is the method without its setting, `setting` with it, memory aside."""

    method: str
    family: str
    setting: str
    ratio: float
    devices: int
    step_s: float


def read_runs() -> list[Run]:
    """The runs of the model over MPI."""
    with PUBLISHED.open(encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if r["model"] == MODEL and r["comm_backend"] == "mpi"]
    runs = []
    for row in rows:
        if not row["throughput_total"]:
            continue
        setting = row["method"].replace("_mem", "")
        found = re.search(r"ratio=([\d.]+)", setting)
        devices = int(row["num_gpus"])
        runs.append(
            Run(
                method=row["method"], family=row["compression"], setting=setting, devices=devices,
                ratio=float(found[1]) if found else 1.0,
                step_s=BATCH * devices / float(row["throughput_total"]),
            )
        )  # fmt: skip
    return runs


def not_scored(run: Run) -> str:
    """Why a run cannot be predicted, or ""."""
    if run.family in ("threshold", "inceptionn"):
        return f"{run.family}: what is sent depends on the values of the gradients"
    if run.family == "powersgd":
        return "powersgd: the rank is not stated"
    return ""


def wire_bytes(run: Run) -> float:
    """Bytes that a device sends per gradient number."""
    if run.family in SPARSE:
        return VALUE_AND_INDEX * run.ratio
    if run.family == "randomk":
        return 4.0 * run.ratio
    return DENSE.get(run.setting, DENSE.get(run.family, 4.0))


def communication_s(run: Run, trace: Trace, alone_s: float, cluster: Cluster) -> float:
    """The step without encoding: all-reduced beside the backward, or gathered tensor by tensor after it."""
    share = wire_bytes(run) / 4.0
    if run.family in ADDED:
        sent = Trace(sizes=tuple(round(s * share) for s in trace.sizes), shares=trace.shares)
        return step_s(sent, alone_s, METHODS["MG-WFBP"], cluster)
    axis = Axis(name="dp", size=run.devices, stride=1)
    whole = round(sum(trace.sizes) * share * run.devices)
    gathered = Collective(op=CollectiveOp.ALL_GATHER, axes=("dp",), size_bytes=whole, algorithm="ring")
    return alone_s + collective_s(gathered, (axis,), cluster)


def first_setting(run: Run) -> bool:
    """Whether the method's encoding is fitted on this run; all others are predicted."""
    return run.ratio in (0.01, 1.0) and not re.search(r"q=(128|256)", run.setting)


def encoding_s(runs: Sequence[Run], without: Mapping[int, float]) -> dict[str, float]:
    """Seconds of encoding and decoding a step, by method: the median of what its first setting leaves."""
    left: dict[str, list[float]] = defaultdict(list)
    for i, run in enumerate(runs):
        if first_setting(run) and run.family != "none":
            left[run.family].append(run.step_s - without[i])
    return {family: max(0.0, median(seconds)) for family, seconds in left.items()}


def results() -> tuple[list[tuple[Run, Result]], dict[str, int]]:
    """Every run beside its prediction, and the reasons for which others are not scored."""
    trace, reasons, runs = read_trace(MODEL), defaultdict(int), []
    every = read_runs()
    alone_s = next(run.step_s for run in every if run.devices == 1)
    for run in every:
        if run.devices > 1 and not not_scored(run):
            runs.append(run)
        elif run.devices > 1:
            reasons[not_scored(run)] += 1
    clusters = {n: cluster_of(n, 1, (1e18, 0.0), NETWORK) for n in {run.devices for run in runs}}
    without = {i: communication_s(run, trace, alone_s, clusters[run.devices]) for i, run in enumerate(runs)}
    encoding = encoding_s(runs, without)
    found = []
    for i, run in enumerate(runs):
        predicted_s = without[i] + encoding.get(run.family, 0.0)
        result = Result(
            model=MODEL, network="10GbE", devices=run.devices, method=run.method, predicted_s=predicted_s,
            measured_s=run.step_s,
        )  # fmt: skip
        found.append((run, result))
    return found, dict(reasons)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", action="store_true", help="print every run")
    options = parser.parse_args()
    scored, reasons = results()
    base = {r.devices: r for run, r in scored if run.family == "none"}
    errors: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for run, r in scored:
        if run.family == "none":
            continue
        measured = base[r.devices].measured_s / r.measured_s
        predicted = base[r.devices].predicted_s / r.predicted_s
        errors[run.family, first_setting(run)].append(predicted / measured - 1)
        if options.rows:
            print(
                f"{r.devices:3} {run.method:28}{predicted:8.3f}{measured:8.3f} {predicted / measured - 1:+7.1%}"
            )
    print(f"{'method':12}{'':12}{'runs':>5}{'speed-up off by':>17}{'most':>8}{'bias':>9}")
    for (family, fitted), found in errors.items():
        sizes = [abs(e) for e in found]
        word = "fitted" if fitted else "predicted"
        print(f"{family:12}{word:12}{len(found):5}{mean(sizes):17.1%}{max(sizes):8.1%}{mean(found):+9.1%}")
    by_devices: dict[int, list[Result]] = defaultdict(list)
    for _, r in scored:
        by_devices[r.devices].append(r)
    taus = [tau for group in by_devices.values() if (tau := kendall_tau(group)) is not None]
    print(f"order of the methods: Kendall's tau {mean(taus):.2f} over {len(taus)} groups")
    for reason, count in reasons.items():
        print(f"not scored: {count} runs: {reason}")


if __name__ == "__main__":
    main()
