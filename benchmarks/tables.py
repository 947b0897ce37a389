"""What a table of kernels makes of a device that nobody tuned: `python -m benchmarks.tables`.

A card's own datasheet with the constants of another generation, before and after `fit_table` on every second row of its table; errors
are of the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from autoparallel.costmodel.fit_table import fit_table
from autoparallel.costmodel.kernel_table import KernelRow, read_kernel_table
from autoparallel.costmodel.kernels import device_s
from autoparallel.profiles import load_device
from autoparallel.profiles.hardware import Device
from benchmarks.kernels import DEVICES, PUBLISHED

FROM = {"a100-pcie-80gb": "h100-pcie", "b200": "h200"}
KINDS = {"products": ("matmul",), "grouped": ("group_matmul",), "attention": ("sdp_fwd", "sdp_bwd")}


def stranger(own: str) -> Device:
    """A card's datasheet with the constants of another generation but for the number of its units."""
    card, other = load_device(own), load_device(FROM[own])
    constants = {**other.constants, "gemm.units": card.constants["gemm.units"]}
    return replace(card, constants=constants)


def errors(device: Device, rows: Sequence[KernelRow]) -> dict[str, float]:
    """Mean absolute errors by kind of kernel."""
    found: dict[str, float] = {}
    for kind, ops in KINDS.items():
        off = [abs(device_s(row.kernel, device, "fused") / row.seconds - 1) for row in rows if row.op in ops]
        found[kind] = mean(off)
    return found


def judged(gpu: str) -> tuple[dict[str, float], dict[str, float]]:
    """Errors on the half of a card's table that is not fitted, before and after fitting the other half."""
    rows = [row for row in read_kernel_table(PUBLISHED) if row.gpu == gpu]
    base = stranger(DEVICES[gpu])
    fitted = fit_table(base, rows[::2], source=f"every second row of {PUBLISHED.name}")
    return errors(base, rows[1::2]), errors(fitted, rows[1::2])


def main() -> None:
    for gpu, own in DEVICES.items():
        before, after = judged(gpu)
        cells = " | ".join(f"{error:.1%}" for error in (*before.values(), *after.values()))
        print(f"| {own} | {FROM[own]} | {cells} |")


if __name__ == "__main__":
    main()
