"""A device from what was measured on it: which samples decide which constants.

The families are fitted in this order, each on top of the ones before. Constants that nothing measures keep the
base device's value and provenance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoparallel.costmodel.compression import coding_s, parse_method
from autoparallel.costmodel.fit import Sample, fit_constants, kernel_price, with_constants
from autoparallel.costmodel.kernels import kernel_s, runs_ahead
from autoparallel.profiles.constants import MEMORY_KINDS
from autoparallel.profiles.hardware import Device, Provenance, Residual, ValueKind

MODE = "eager"  # what profiling runs: each operator a kernel of its own
# The dtype whose products decide what both share, first: that of most work on the device.
GEMM_SHARED = ("gemm.exposed", "gemm.fill_k_bytes")
GEMM_EFFICIENCY = {"fp32": "gemm.efficiency.full", "bf16": "gemm.efficiency.half"}
# (name of the residual and family of samples, constants)
FAMILIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("conv", ("gemm.conv_efficiency",)),
    ("attention.forward", ("attention.forward", "attention.head_fill")),
    ("attention.backward", ("attention.backward",)),
    *((f"memory.{kind}", (f"memory.efficiency.{kind}",)) for kind in MEMORY_KINDS if kind != "optimizer"),
    ("optimizer", ("memory.efficiency.optimizer", "optimizer.tensor_s")),
)


def families(first: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What is fitted, in order, where `first` is the dtype of most work."""
    second = next(dtype for dtype in GEMM_EFFICIENCY if dtype != first)
    return (
        (f"gemm.{first}", (GEMM_EFFICIENCY[first], *GEMM_SHARED)),
        (f"gemm.{second}", (GEMM_EFFICIENCY[second],)),
        *FAMILIES,
    )


def fit_device(base: Device, samples: Sequence[Sample], *, source: str, own_peaks: bool) -> Device:
    """`base` with the figures that the samples decide; `own_peaks`: no datasheet states its peaks and bandwidth.

    A peak is then the best rate seen of any product of that dtype, and the bandwidth that of a large copy.
    """
    by_family: dict[str, list[Sample]] = {}
    for sample in samples:
        by_family.setdefault(sample.family, []).append(sample)
    device = _peaks(base, by_family, source) if own_peaks else base
    overhead = f"launch_s.{MODE}" if runs_ahead(base) else "kernel.start_s"
    device = _overhead(device, overhead, by_family.get("dispatch", ()), source)
    residuals: dict[str, Residual] = dict(base.residuals)
    for name, keys in families("fp32" if own_peaks else "bf16"):
        chosen = by_family.get(name, ())
        if not chosen:
            continue
        if name == "optimizer":
            device = _started(device, chosen)
        where = f"{source}; {len(chosen)} {name} measurements"
        price = kernel_price(chosen, MODE)
        device, residuals[name] = fit_constants(
            device, keys, price, [s.seconds for s in chosen], source=where
        )
    device = _overhead(device, overhead, by_family.get("launch", ()), source)
    device = _dtensor(device, by_family.get("dtensor", ()), source)
    device = _coding(device, by_family.get("coding", ()), source)
    return replace(device, residuals=residuals)


def _coding(device: Device, samples: Sequence[Sample], source: str) -> Device:
    """What methods of compression take, relative to their passes over memory; a sample's label is `METHOD of BYTES`."""
    for sample in samples:
        method, _, size = sample.label.partition(" of ")
        key = f"compress.{parse_method(method).name}"
        device = with_constants(device, {key: 1.0}, source=source, kind=ValueKind.MEASURED)
        ratio = sample.seconds / coding_s(method, float(size), 4, device)
        measured = f"{source}; {sample.label}"
        device = with_constants(device, {key: ratio}, source=measured, kind=ValueKind.MEASURED)
    return device


def _overhead(device: Device, key: str, tiny: Sequence[Sample], source: str) -> Device:
    """What a launch takes: the host's time where it runs ahead of the device, else all of it in turn.

    The kernels that are fitted ran bare; in a model each also has its share of modules and autograd.
    """
    for sample in tiny:
        each_s = sample.seconds / sum(kernel.count for kernel in sample.kernels)
        measured = f"{source}; {sample.label}"
        device = with_constants(device, {key: each_s}, source=measured, kind=ValueKind.MEASURED)
    return device


def _dtensor(device: Device, samples: Sequence[Sample], source: str) -> Device:
    """What DTensor's dispatch adds to an operator: what its layers take more than the others, by operator."""
    for sample in samples:
        *launched, added = sample.kernels
        rest_s = sum(kernel_s(kernel, device, MODE) for kernel in launched)
        each_s = max(sample.seconds - rest_s, 0.0) / added.count
        measured = f"{source}; {sample.label}"
        device = with_constants(
            device, {"launch_s.dtensor": each_s}, source=measured, kind=ValueKind.MEASURED
        )
    return device


def _peaks(device: Device, samples: Mapping[str, Sequence[Sample]], source: str) -> Device:
    rates: dict[str, float] = {}
    for sample in (
        s for family, group in samples.items() if family.startswith(("gemm", "conv")) for s in group
    ):
        rate = sum(kernel.flops for kernel in sample.kernels) / sample.seconds
        dtype = sample.kernels[0].dtype
        rates[dtype] = max(rates.get(dtype, 0.0), rate)
    if "fp32" in rates:
        rates["fp64"] = rates["fp32"] / 2
    device = replace(device, peak_flops={**device.peak_flops, **rates})
    device = _measured(
        device, {f"peak_flops.{d}" for d in rates}, f"{source}; the fastest product or convolution"
    )
    for copy in samples.get("bandwidth", ()):
        moved = sum(kernel.bytes_moved for kernel in copy.kernels)
        device = replace(device, hbm_bytes_per_s=moved / copy.seconds)
        device = _measured(device, {"hbm_bytes_per_s"}, f"{source}; {copy.label}")
    return device


def _measured(device: Device, keys: set[str], source: str) -> Device:
    known = Provenance(kind=ValueKind.MEASURED, source=source)
    return replace(device, provenance={**device.provenance, **dict.fromkeys(keys, known)})


def _started(device: Device, steps: Sequence[Sample]) -> Device:
    """A first guess of the time per tensor, where the base has none: half of what the smallest step takes."""
    if device.constants["optimizer.tensor_s"] > 0:
        return device
    guess = min(s.seconds / max(k.count for k in s.kernels) for s in steps) / 2
    return with_constants(device, {"optimizer.tensor_s": guess})
