"""Predicted against published kernel times: `python benchmarks/kernels.py [--rows]`.

Reads benchmarks/published/kernels.csv, whose `origin` column says where each row was read. Efficiencies are of
the datasheet peak; FLOPs of attention count the whole score matrix though the kernels are causal (a few exceed
the peak otherwise), which is how the rows are read here.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from autoparallel.costmodel.graph import OpKind
from autoparallel.costmodel.kernels import device_s
from autoparallel.costmodel.program import AttentionShape, Kernel
from autoparallel.profiles import load_device

PUBLISHED = Path(__file__).parent / "published" / "kernels.csv"
DEVICES = {"A100-PCIe 80GB": "a100-pcie-80gb", "B200-SXM": "b200"}
Row = dict[str, str]


def gemm_kernel(row: Row) -> Kernel:
    """A dense or grouped product; bytes: operands in bf16, the result in its dtype, twice if accumulated."""
    batch, m, n, k = (int(row[key]) for key in ("batch", "m", "n", "k"))
    out_dtype = row["out_dtype"]
    if row["op"] == "group_matmul":
        stage = _fields(row)["stage"]
        if stage == "bwd_grad_act":
            n, k = k, n
        elif stage == "bwd_grad_w":
            m, n, k = n, k, m
            out_dtype = _fields(row)["main_grad_dtype"]
    result = m * n * (4 if out_dtype == "fp32" else 2) * (2 if row["accumulate"] == "True" else 1)
    return Kernel(
        kind=OpKind.GROUPED_GEMM if row["op"] == "group_matmul" else OpKind.GEMM,
        dtype="bf16",
        flops=2 * batch * m * n * k,
        bytes_moved=batch * (2 * (m * k + k * n) + result),
        product=(batch, m, n, k),
    )


def attention_kernel(row: Row) -> Kernel:
    """A causal flash attention; `flops` counts the whole score matrix, as the published efficiency does."""
    fields = _fields(row)
    batch, length, heads, kv_heads, d, v = (
        int(fields[key])
        for key in ("batch", "seq_len", "head_num", "kv_head_num", "qk_head_dim", "v_head_dim")
    )
    backward = row["op"] == "sdp_bwd"
    pairs = batch * heads * length * length
    tensors = batch * length * (heads * (d + v) + kv_heads * (d + v))
    return Kernel(
        kind=OpKind.ATTENTION,
        dtype="bf16",
        flops=2 * pairs * ((3 * d + 2 * v) if backward else (d + v)),
        bytes_moved=2 * tensors * (2 if backward else 1),
        attention=AttentionShape(
            batch=batch, heads=heads, kv_heads=kv_heads, query_length=length, key_length=length,
            head_size=d, value_size=v, causal=True, flash=True,
        ),
        backward=backward,
    )  # fmt: skip


def score(rows: Sequence[Row]) -> list[tuple[Row, float, float]]:
    """(row, predicted seconds, measured seconds) of every row."""
    devices = {gpu: load_device(name) for gpu, name in DEVICES.items()}
    scored = []
    for row in rows:
        kernel = attention_kernel(row) if row["op"].startswith("sdp") else gemm_kernel(row)
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


def _fields(row: Row) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=([^,]+)", row["shape_key"]))


if __name__ == "__main__":
    main()
