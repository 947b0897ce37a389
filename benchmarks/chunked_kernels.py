"""Predicted against published times of kernels that go over a sequence in chunks: `python -m benchmarks.chunked_kernels [--rows]`.

Reads benchmarks/published/chunked_kernels.csv, whose `origin` column says where each row was read: flash-linear-attention's gated delta
rule in bfloat16, replayed as a graph (the host adds nothing), norms of queries and keys apart.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

from autoparallel.costmodel.graph import ITEM_BYTES
from autoparallel.costmodel.kernels import device_s
from autoparallel.costmodel.program import Kernel
from autoparallel.planner.capture.library_kernels import WORKS
from autoparallel.planner.capture.one_call import Work
from autoparallel.profiles import load_device

PUBLISHED = Path(__file__).parent / "published" / "chunked_kernels.csv"
DTYPE = "bfloat16"
# Fewer pairs of samples and heads than these do not fill a device: the chunks of each follow each other, which is not priced.
FILLS = 32
Row = dict[str, str]


def work_of(row: Row) -> Work:
    """What a row's call does."""
    samples, steps, queries, heads, keys, values = (
        int(row[name])
        for name in ("samples", "steps", "query_heads", "value_heads", "key_size", "value_size")
    )

    def rows(*sizes: int, dtype: str = DTYPE) -> Any:
        return SimpleNamespace(shape=(samples, steps, *sizes), dtype=dtype)

    query, gate = rows(queries, keys), rows(heads, dtype="float32")
    return WORKS[row["kernel"]](query, query, rows(heads, values), gate, rows(heads))


def predicted_s(row: Row) -> float:
    """Seconds of all kernels of one side of a row's call."""
    work, device = work_of(row), load_device(row["device"])
    return sum(
        device_s(
            Kernel(
                kind=step.kind,
                dtype=DTYPE,
                flops=step.flops,
                bytes_moved=round(step.numbers * ITEM_BYTES[DTYPE]),
            ),
            device,
            "eager",
        )
        for step in (work.forward if row["side"] == "forward" else work.backward)
    )


def scored() -> list[tuple[Row, float]]:
    """(row, relative error) of every row whose call fills the device."""
    with PUBLISHED.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    full = [row for row in rows if int(row["samples"]) * int(row["value_heads"]) >= FILLS]
    return [(row, predicted_s(row) / float(row["seconds"]) - 1) for row in full]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true", help="print every row")
    arguments = parser.parse_args()
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row, error in scored():
        groups[row["device"], row["side"]].append(error)
        if arguments.rows:
            sizes = [row[name] for name in ("samples", "steps", "query_heads", "value_heads")]
            print(
                f"{row['device']:8}{row['side']:10}{' '.join(sizes):>16}{float(row['seconds']):11.3g} s {error:+7.1%}"
            )
    print(f"{'device':8}{'side':10}{'rows':>5}{'mean error':>12}{'bias':>9}")
    for (device, side), errors in groups.items():
        print(f"{device:8}{side:10}{len(errors):5}{mean(map(abs, errors)):12.1%}{mean(errors):+9.1%}")


if __name__ == "__main__":
    main()
