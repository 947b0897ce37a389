"""A device from a table of measured kernels (`kernel_table.py`): what rows decide is fitted, what they do not follows from it.

The families are fitted one after the other, to the device's own time of each kernel (the host far ahead). Products of other dtypes
run on the same units, at the same clocks and power: without rows of their own their efficiencies change as those in 16 bits did.
Kernels of the first generations of flash attention are priced relative to the best (`attention.v1`, `.v2`) and follow by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoparallel.costmodel.fit import Sample, fit_constants, with_constants
from autoparallel.costmodel.kernel_table import KernelRow
from autoparallel.costmodel.kernels import device_s
from autoparallel.profiles.constants import MEMORY_KINDS
from autoparallel.profiles.hardware import Device, Residual, ValueKind

MODE = "fused"  # any: the device's time is the same in all
HALF = "gemm.efficiency.half"
OTHERS = ("gemm.efficiency.full", "gemm.efficiency.fp8", "gemm.efficiency.nvfp4")
# Fewer rows than this for each constant decide how fast a family is, and not how that depends on the shape. Kind: formula.
ROWS_A_CONSTANT = 2
# Families of samples, the constant that one row decides, and those that several rows decide with it.
FAMILIES: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (("gemm.bf16", "gemm.fp16"), HALF, ("gemm.exposed", "gemm.fill_k_bytes", "gemm.boost", "gemm.boost_s")),
    (("gemm.tf32", "gemm.fp32"), "gemm.efficiency.full", ()),
    (("gemm.fp8", "gemm.mxfp8"), "gemm.efficiency.fp8", ()),
    (("gemm.nvfp4",), "gemm.efficiency.nvfp4", ()),
    (("grouped.bf16", "grouped.fp16"), "gemm.grouped_efficiency", ()),
    (("attention.forward",), "attention.forward", ("attention.head_fill", "attention.tail_forward")),
    (("attention.backward",), "attention.backward", ("attention.tail_backward",)),
    *(((f"memory.{kind}",), f"memory.efficiency.{kind}", ()) for kind in MEMORY_KINDS),
)


def fit_table(base: Device, rows: Sequence[KernelRow], *, source: str) -> Device:
    """`base` with the constants that the rows decide, and those that follow; residuals by family."""
    device, residuals = base, dict(base.residuals)
    for names, first, more in FAMILIES:
        chosen = [row.sample for row in rows if row.sample.family in names]
        if chosen:
            enough = len(chosen) >= ROWS_A_CONSTANT * (1 + len(more))
            keys = (first, *(more if enough else ()))
            device, residuals[names[0]] = _fitted(device, keys, chosen, source)
    return replace(_followed(base, device, source), residuals=residuals)


def _fitted(
    device: Device, keys: tuple[str, ...], chosen: Sequence[Sample], source: str
) -> tuple[Device, Residual]:
    def price(of: Device) -> list[float]:
        return [sum(device_s(kernel, of, MODE) for kernel in sample.kernels) for sample in chosen]

    where = f"{source}; {len(chosen)} {chosen[0].family} rows"
    return fit_constants(device, keys, price, [sample.seconds for sample in chosen], source=where)


def _followed(base: Device, device: Device, source: str) -> Device:
    """Products in other dtypes, which no row measures, as those in 16 bits."""
    ratio = device.constants[HALF] / base.constants[HALF]
    if ratio == 1.0:
        return device
    values = {
        key: min(ratio * base.constants[key], 1.0)
        for key in OTHERS
        if device.constants[key] == base.constants[key]
    }
    return with_constants(
        device, values, source=f"{source}; x {ratio:.3f}, as products in 16 bits", kind=ValueKind.FORMULA
    )
