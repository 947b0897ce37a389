"""Pipelines over unlike devices: each rank is priced and filled by its own device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.costmodel.prediction import Prediction
from autoparallel.costmodel.program import Program
from autoparallel.costmodel.simulate import simulate
from autoparallel.planner.expand.schedules import build_schedule
from autoparallel.profiles.load import load_cluster
from tests.toy_programs import toy_block, toy_program, toy_stage

MIXED = load_cluster("a100-v100")  # 40 GB and 32 GB devices


def pipeline(blocks: tuple[int, int], groups: tuple[int, ...], saved_bytes: int = 2**20) -> Prediction:
    block = toy_block(saved_bytes=saved_bytes)
    block = replace(block, **{n: tuple(replace(k, dtype="fp16") for k in getattr(block, n) if hasattr(k, "dtype"))
                              for n in ("forward", "backward_input", "backward_weight")})  # fmt: skip
    stages = tuple(toy_stage(((block, n),), last=i == 1) for i, n in enumerate(blocks))
    program: Program = toy_program(build_schedule("1f1b", 2, 1, 4), stages, 4, groups=groups, dtype="fp16")
    return simulate(program, MIXED)


def test_fewer_blocks_on_the_slower_device_are_faster_than_even_ones() -> None:
    assert pipeline((5, 3), (0, 1)).step_time_s < pipeline((4, 4), (0, 1)).step_time_s
    assert pipeline((3, 5), (1, 0)).step_time_s < pipeline((4, 4), (1, 0)).step_time_s


def test_unnamed_groups_run_at_the_slowest_devices_pace() -> None:
    assert pipeline((4, 4), ()).step_time_s > pipeline((4, 4), (0, 0)).step_time_s


def test_each_rank_is_held_to_its_own_devices_memory() -> None:
    between = (
        7 * 10**9
    )  # of 4 micro-batches in flight on the first rank: 5 of 40 GB are left, 3 too few of 32
    large_first = pipeline((1, 1), (0, 1), between)
    small_first = pipeline((1, 1), (1, 0), between)
    assert large_first.capacities_bytes == small_first.capacities_bytes[::-1]
    assert [m.peak for m in large_first.memory] == [m.peak for m in small_first.memory]
    assert large_first.feasible == all(
        m.peak <= c for m, c in zip(large_first.memory, large_first.capacities_bytes, strict=True)
    )
    assert small_first.excess_bytes > large_first.excess_bytes


def test_utilisation_is_against_the_mean_peak_of_the_devices_in_use() -> None:
    peaks = [group.device.peak_flops["fp16"] for group in MIXED.groups]
    assert pipeline((4, 4), (0, 1)).peak_flops_per_s == pytest.approx(sum(peaks) / 2)
    assert pipeline((4, 4), (1, 1)).peak_flops_per_s == pytest.approx(peaks[1])
