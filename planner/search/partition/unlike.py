"""Pipelines over unlike devices: each rank's stages priced and held by the devices of its own group.

The stage problem of such a pipeline has every quantity once for each distinct device, and its rows take a chunk's
quantity of the device that the chunk stands on:

    sum a[q, c] A[q, device(c), c] + const <= T
    sum a[q, c] A[q, device(c), c] + (largest capacity - capacity of the rank) <= largest capacity
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autoparallel.planner.expand.schedules import rank_of_stage
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.partition.problem import Quantity, Row, StageProblem
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.hardware import Device


def rank_devices(problem: Problem) -> tuple[Device, ...]:
    """The device of each pipeline rank where `mesh.groups` names them; else the one that all are priced by."""
    groups = problem.fixed.groups
    if groups:
        return tuple(problem.cluster.groups[g].device for g in groups)
    return (problem.cluster.device,)


def capacities(problem: Problem) -> tuple[float, ...]:
    """What those devices hold; without named groups, what each device of the cluster can."""
    groups = problem.fixed.groups
    devices = rank_devices(problem) if groups else [g.device for g in problem.cluster.groups]
    found = [device.memory_bytes - device.reserve_bytes for device in devices]
    return tuple(found) if groups else (min(found),)


def lacking_bytes(problem: Problem) -> tuple[float, ...]:
    """By pipeline rank, how much less its devices hold than the largest; empty where all hold the same."""
    room = capacities(problem)
    return tuple(max(room) - one for one in room) if len(set(room)) > 1 else ()


def fastest(devices: Sequence[Device]) -> Device:
    """The one that bounds are priced on: no other computes faster."""
    return max(devices, key=lambda device: max(device.peak_flops.values()))


def over_devices(
    problem: Problem,
    strategy: Strategy,
    stages: StageProblem,
    quantities_on: Callable[[Device], tuple[Quantity, ...]],
) -> StageProblem:
    """The stage problem of one device as that of the devices that the pipeline ranks really have."""
    devices = rank_devices(problem)
    distinct = tuple(dict.fromkeys(device.name for device in devices))
    room = capacities(problem)
    if len(distinct) == 1 and len(set(room)) == 1:
        return stages
    by_name = {device.name: device for device in devices}
    home = rank_of_stage(strategy.pipeline.schedule, strategy.mesh.pp, strategy.pipeline.virtual_stages)
    quantities = tuple(q for name in distinct for q in quantities_on(by_name[name]))
    lacks = lacking_bytes(problem) or (0.0,) * len(room)

    def lacking(row: Row) -> int:
        return int(lacks[home[row.terms[0][1]]]) if row.capacity_bytes is None else 0

    memory = [replace(row, constant=row.constant + lacking(row)) for row in stages.memory]
    placed = replace(
        stages, quantities=quantities,
        device_of=tuple(distinct.index(devices[rank].name) for rank in home),
    )  # fmt: skip
    return replace(placed, memory=on_devices(placed, memory), paths=on_devices(placed, stages.paths))


def on_devices(stages: StageProblem, rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows over the quantities of one device as rows over those of each chunk's own device."""
    if not stages.device_of:
        return tuple(rows)
    each = stages.each_device
    return tuple(
        replace(row, terms=tuple((q + each * stages.device_of[c], c, n) for q, c, n in row.terms))
        for row in rows
    )
