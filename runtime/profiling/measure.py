"""Runs the cases, one after the other, and says how far it is."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.costmodel.fit import Sample
from autoparallel.runtime.profiling import codings, launches, memory_bound, products
from autoparallel.runtime.profiling.case import Case
from autoparallel.runtime.profiling.timing import measure_s, on_accelerator
from autoparallel.runtime.ranks.accelerator import current_device, device_module, device_name

# Seconds of repetitions per case.
BUDGET_S = 0.25
QUICK_BUDGET_S = 0.04

Tell = Callable[[int, int, str], None]  # done, of, what is next


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What was measured, and on what."""

    samples: tuple[Sample, ...]
    hardware: str  # "AMD EPYC", "NVIDIA H100 80GB HBM3"
    software: str
    threads: int  # 0 on an accelerator
    memory_bytes: float
    load: float  # processes that wanted a core before anything was measured, in the mean of a minute; 0 where unknown


def measure_machine(*, quick: bool = False, tell: Tell = lambda *_: None) -> Measurements:
    """Times every case on the CPU (with the threads that torch has) or on the current accelerator."""
    budget_s = QUICK_BUDGET_S if quick else BUDGET_S
    samples, load = [], other_load()
    with launches.mesh_of_one() as mesh:
        cases = all_cases(mesh)
        for done, case in enumerate(cases):
            tell(done, len(cases), case.label)
            seconds = measure_s(case.calls(), budget_s=budget_s)
            samples.append(
                Sample(family=case.family, label=case.label, kernels=case.kernels, seconds=seconds)
            )
        tell(len(cases), len(cases), "")
    return Measurements(
        samples=tuple(samples),
        hardware=hardware_name(),
        software=f"torch {torch.__version__}",
        threads=0 if on_accelerator() else torch.get_num_threads(),
        memory_bytes=memory_bytes(),
        load=load,
    )


def other_load() -> float:
    """How many processes want a core now, in the mean of the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def all_cases(mesh: DeviceMesh | None = None) -> list[Case]:
    """Everything that one process measures; DTensor needs a mesh."""
    dtypes = (torch.bfloat16, torch.float32) if on_accelerator() else (torch.float32, torch.bfloat16)
    attention = torch.bfloat16 if on_accelerator() else torch.float32
    cases = [memory_bound.copy_case(), launches.launch_case(), launches.dispatch_case()]
    cases += [launches.dtensor_case(mesh)] if mesh else []
    for dtype in dtypes:
        cases += products.product_cases(dtype)
    cases += [*products.convolution_cases(torch.float32), *products.attention_cases(attention)]
    cases += [*memory_bound.row_cases(), *memory_bound.vocabulary_cases(), *memory_bound.image_cases()]
    return [*cases, *memory_bound.optimizer_cases(), *codings.coding_cases()]


def hardware_name() -> str:
    """The device's name for people."""
    if on_accelerator():
        return device_name(current_device())
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> float:
    """Memory of the device; of the machine, 0 where that is not known, on a CPU."""
    if on_accelerator():
        return float(device_module(current_device()).get_device_properties().total_memory)
    info = Path("/proc/meminfo")
    if not info.exists():
        return 0.0
    return float(info.read_text(encoding="utf-8").split("MemTotal:")[1].split()[0]) * 1024
