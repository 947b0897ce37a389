"""What is measured is what the cost model prices."""

from __future__ import annotations

import time

import pytest
import torch

from autoparallel.costmodel.fit import Sample, with_constants
from autoparallel.costmodel.fit_device import fit_device
from autoparallel.costmodel.kernels import kernel_s
from autoparallel.profiles import load_device
from autoparallel.profiles.constants import MEMORY_KINDS
from autoparallel.runtime.profiling import launches
from autoparallel.runtime.profiling.collectives import group_places
from autoparallel.runtime.profiling.measure import all_cases
from autoparallel.runtime.profiling.timing import measure_s

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="the sizes below are a CPU's")


def test_every_constant_of_memory_bound_kernels_has_its_measurements() -> None:
    families = {case.family for case in all_cases()}
    assert {f"memory.{kind}" for kind in MEMORY_KINDS if kind != "optimizer"} <= families
    assert {"gemm.fp32", "conv", "attention.forward", "attention.backward", "optimizer", "launch"} <= families


def test_a_case_of_each_family_runs_and_has_a_price() -> None:
    torch.set_num_threads(1)
    device = load_device("cpu-gloo")
    seen: set[str] = set()
    for case in all_cases():
        if case.family in seen:
            continue
        seen.add(case.family)
        case.make()()
        assert sum(kernel_s(kernel, device, "eager") for kernel in case.kernels) > 0, case.label


def test_dtensor_s_dispatch_is_what_its_layers_take_more() -> None:
    torch.set_num_threads(1)
    base = with_constants(load_device("cpu-gloo"), {"launch_s.dtensor": 0.0})
    with launches.mesh_of_one() as mesh:
        cases = [launches.launch_case(), launches.dtensor_case(mesh)]
        samples = [
            Sample(
                family=c.family, label=c.label, kernels=c.kernels, seconds=measure_s(c.calls(), budget_s=0.05)
            )
            for c in cases
        ]
    device = fit_device(base, samples, source="here", own_peaks=False)
    assert device.constants["launch_s.dtensor"] > 0
    predicted_s = [sum(kernel_s(kernel, device, "eager") for kernel in sample.kernels) for sample in samples]
    assert predicted_s == pytest.approx([sample.seconds for sample in samples], rel=1e-3)


def test_a_call_is_timed_by_what_it_takes() -> None:
    torch.set_num_threads(1)

    def busy() -> None:
        end = time.process_time() + 2e-3
        while time.process_time() < end:
            pass

    assert measure_s([busy], budget_s=0.03) == pytest.approx(2e-3, rel=0.1)


def test_groups_are_neighbours_then_everyone_then_one_of_each_node() -> None:
    assert [(p.size, p.stride) for p in group_places(8, 4)] == [(2, 1), (4, 1), (8, 1), (2, 4)]
    assert [(p.size, p.stride) for p in group_places(2, 2)] == [(2, 1)]
