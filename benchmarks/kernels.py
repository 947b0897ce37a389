"""Predicted against published kernel times: `python benchmarks/kernels.py [--rows]`.

Reads benchmarks/published/kernels.csv, whose `origin` column says where each row was read. Efficiencies are of
the datasheet peak; FLOPs of attention count the whole score matrix though the kernels are causal (a few exceed
the peak otherwise), which is how the rows are read here.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from autoparallel.costmodel.kernel_table import parse_kernel_row
from autoparallel.costmodel.kernels import device_s
from autoparallel.costmodel.program import Kernel
from autoparallel.profiles import load_device

PUBLISHED = Path(__file__).parent / "published" / "kernels.csv"
DEVICES = {"A100-PCIe 80GB": "a100-pcie-80gb", "B200-SXM": "b200"}
Row = dict[str, str]


def kernel_of(row: Row) -> Kernel:
    """What the cost model prices a row as."""
    return parse_kernel_row(row).kernel


def score(rows: Sequence[Row]) -> list[tuple[Row, float, float]]:
    """(row, predicted seconds, measured seconds) of every row."""
    devices = {gpu: load_device(name) for gpu, name in DEVICES.items()}
    scored = []
    for row in rows:
        kernel = kernel_of(row)
        measured_s = kernel.flops / (float(row["achieved_tflops"]) * 1e12)
        scored.append((row, device_s(kernel, devices[row["gpu"]], "fused"), measured_s))
    return scored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true", help="print every row")
    arguments = parser.parse_args()
    with PUBLISHED.open(encoding="utf-8") as file:
        scored = score(list(csv.DictReader(file)))
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row, predicted_s, measured_s in scored:
        error = predicted_s / measured_s - 1
        groups[row["gpu"], row["op"]].append(error)
        if arguments.rows:
            print(
                f"{row['gpu']:16}{row['op']:14}{measured_s * 1e6:11.1f} µs {error:+7.1%}  {row['shape_key']}"
            )
    print(f"{'device':16}{'kernel':14}{'rows':>5}{'mean error':>12}{'median':>9}{'bias':>9}")
    for (gpu, op), errors in groups.items():
        sizes = [abs(error) for error in errors]
        print(f"{gpu:16}{op:14}{len(errors):5}{mean(sizes):12.1%}{median(sizes):9.1%}{mean(errors):+9.1%}")
    everything = [abs(error) for errors in groups.values() for error in errors]
    print(f"{'all':30}{len(everything):5}{mean(everything):12.1%}{median(everything):9.1%}")


if __name__ == "__main__":
    main()
