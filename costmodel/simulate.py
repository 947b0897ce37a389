"""`simulate`: from a program and a cluster to seconds, bytes and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoparallel.costmodel.collecting import without_collection
from autoparallel.costmodel.held import held
from autoparallel.costmodel.memory import LiveState, live_states
from autoparallel.costmodel.prediction import BREAKDOWN_KEYS, Prediction
from autoparallel.costmodel.price import Pricer, price_program
from autoparallel.costmodel.program import Action, ActionKind, Kernel, Program
from autoparallel.costmodel.stage_cost import Parts, Phase, StageCost, phase
from autoparallel.costmodel.timetable import (
    PipelineTimes,
    Timetable,
    phase_of,
    pipeline_times,
    prepare,
)
from autoparallel.profiles.hardware import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What of a simulation depends on the actions alone: reuse it for every program with the same `ranks`."""

    timetable: Timetable
    states: tuple[tuple[LiveState, ...], ...]  # by rank


@without_collection()
def prepare_simulation(
    ranks: Sequence[Sequence[Action]],
    *,
    overlap: bool = True,
    blocking_sends: bool = False,
    late_gathers: bool = False,
) -> Prepared:
    """The order in which all actions of a legal program (`program_check.check`) are simulated."""
    timetable = prepare(ranks, overlap=overlap, blocking_sends=blocking_sends, late_gathers=late_gathers)
    return Prepared(timetable=timetable, states=tuple(map(live_states, ranks)))


def simulate(
    program: Program,
    cluster: Cluster,
    *,
    pricer: Pricer | None = None,
    prepared: Prepared | None = None,
) -> Prediction:
    """Step time, breakdown of the busiest rank, memory of every rank. (`timeline.timeline` draws the step.)

    A caller with many programs passes one `pricer` for all, and `prepared` for those with equal `ranks`,
    `overlap`, `blocking_sends` and `late_gathers`.
    """
    prepared = prepared or prepare_simulation(
        program.ranks,
        overlap=program.overlap,
        blocking_sends=program.blocking_sends,
        late_gathers=program.late_gathers,
    )
    costs = price_program(program, cluster, pricer)
    times = pipeline_times(prepared.timetable, costs)
    memory = held(program, prepared.states, cluster)
    return Prediction(
        step_time_s=times.step_time_s,
        breakdown_s=breakdown(prepared.timetable, times, costs),
        memory=memory.memory,
        capacities_bytes=memory.capacities_bytes,
        host_bytes=memory.host_bytes,
        host_capacity_bytes=memory.host_capacity_bytes,
        model_flops=program.model_flops,
        hardware_flops=program.model_flops + recomputed_flops(program),
        tokens=program.tokens,
        devices=devices_of(program),
        peak_flops_per_s=mean_peak_flops_per_s(program, cluster),
    )


def mean_peak_flops_per_s(program: Program, cluster: Cluster) -> float:
    """Dense peak of the compute dtype of the devices in use, on average: every pipeline rank has as many."""
    peaks = [group.device.peak_flops.get(program.dtype, 0.0) for group in cluster.groups]
    if program.groups:
        return sum(peaks[g] for g in program.groups) / len(program.groups)
    return sum(p * g.devices for p, g in zip(peaks, cluster.groups, strict=True)) / cluster.devices


def devices_of(program: Program) -> int:
    """Devices that a program runs on: the product of its mesh axes."""
    count = 1
    for axis in program.axes:
        count *= 1 if axis.derived else axis.size
    return count


def recomputed_flops(program: Program) -> int:
    """FLOPs of recomputation per step, on all devices."""
    one_device_each = sum(
        step.flops * step.count * count
        for stage in program.stages
        for block, count in stage.blocks
        for step in block.recompute
        if isinstance(step, Kernel)
    )
    return one_device_each * program.micro_batches * devices_of(program) // len(program.ranks)


def breakdown(
    timetable: Timetable, times: PipelineTimes, costs: Sequence[StageCost]
) -> tuple[tuple[str, float], ...]:
    """Where the step of the critical rank goes, in the order of `BREAKDOWN_KEYS`; sums to the step time.

    The critical rank is the one that is busy longest (the first of equals). Waiting for a message counts as
    `pp_comm` as far as the message was on its way, and as `bubble` beyond; so does the wait for other ranks to
    end.
    """
    busy: list[Parts] = []
    for rank, counted in enumerate(timetable.phases):
        parts = dict.fromkeys(BREAKDOWN_KEYS, 0.0)
        for place, count in counted:
            stage, column = phase_of(place)
            _add(parts, _phase(costs[stage], column), count)
        for stage in timetable.steps[rank]:
            _add(parts, costs[stage].step, 1)
        busy.append(parts)
    critical = max(range(len(busy)), key=lambda rank: sum(busy[rank].values()))
    parts = busy[critical]
    _add_waits(parts, critical, timetable, times)
    parts["bubble"] = max(0.0, times.step_time_s - sum(s for key, s in parts.items() if key != "bubble"))
    return tuple(parts.items())


def _phase(cost: StageCost, column: str) -> Phase:
    value = getattr(cost, column)
    return value if isinstance(value, Phase) else phase({"dp_comm": value})


def _add(parts: Parts, phase: Phase, count: int) -> None:
    for key, seconds in phase.parts:
        parts[key] += seconds * count


def _add_waits(parts: Parts, rank: int, timetable: Timetable, times: PipelineTimes) -> None:
    """Waits of one rank that are not bubble: for messages on their way, and for reductions."""
    now_s = 0.0
    for row in (row for row, home in enumerate(timetable.rank) if home == rank and timetable.link[row] < 0):
        wait = timetable.wait[row]
        if wait >= 0 and times.arrival_s[wait] > now_s:
            key = "dp_comm" if timetable.actions[wait].kind is ActionKind.STEP else "pp_comm"
            parts[key] += min(times.arrival_s[wait] - now_s, times.arrival_s[wait] - times.end_s[wait])
        now_s = times.end_s[row]
    for _, start_s, end_s in times.steps[rank]:
        parts["dp_comm"] += start_s - now_s
        now_s = end_s
