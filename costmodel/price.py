"""From work (kernels and collectives) to seconds: what each action of a stage takes, by breakdown key.

Collectives of tensor, context and expert parallelism stand in line with the computation. Gathers of ZeRO-3
parameters are issued one block ahead and gradient reductions run beside the backward, both on a stream of
their own (costmodel/streams.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from autoparallel.costmodel.buckets import Bucket, fill_buckets
from autoparallel.costmodel.collectives import collective_s
from autoparallel.costmodel.contention import Shares, excess, port_shares
from autoparallel.costmodel.graph import OpKind
from autoparallel.costmodel.kernels import FROM_DISK, HOST_COPY, SERVED, device_s, host_s
from autoparallel.costmodel.prediction import BREAKDOWN_KEYS
from autoparallel.costmodel.program import (
    Action,
    ActionKind,
    Axis,
    BlockWork,
    Collective,
    CollectiveOp,
    Kernel,
    Program,
    StageWork,
    Step,
)
from autoparallel.costmodel.stage_cost import Parts, Phase, StageCost, phase
from autoparallel.costmodel.streams import Interference, Segment, run_streams
from autoparallel.profiles.hardware import Cluster, Device


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """Seconds of one block and micro-batch, by breakdown key."""

    forward: Parts
    recompute: Parts
    backward_input: Parts
    backward_weight: Parts
    weight_again: Parts
    gather_s: float
    regather_s: float
    weight_gather_s: float


@dataclass(frozen=True, slots=True)
class Pass:
    """A link's part of an action: its seconds, the gather that it waits for, and the seconds by which what runs
    beside it and its own collectives would hold each other up all along."""

    parts: Parts
    gather_s: float = 0.0
    contended_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Routing:
    """What a pass does before its host must know how many tokens each expert gets, which the device tells: seconds of
    kernels in line, of launches, and the number of collectives."""

    inline_s: float
    launches_s: float
    collectives: int


@dataclass(frozen=True, slots=True)
class PassKernels:
    """What the kernels of a pass take, those in line and those beside them, by breakdown key ("" is the pass's own);
    and its collectives, whose seconds depend on the mesh. Whoever keeps this keeps the `steps`."""

    steps: Sequence[Step]
    inline: Parts
    beside: Parts
    launches_s: float
    collectives: tuple[Collective, ...]
    routing: Routing | None  # of a forward (or recomputation) with experts


@dataclass(slots=True)
class Pricer:
    """Prices kernels and collectives of one cluster, and remembers those it has priced."""

    cluster: Cluster
    kernels: dict[tuple[Kernel, str, str], tuple[float, float]] = field(default_factory=dict)
    collectives: dict[tuple[Collective, tuple[Axis, ...]], float] = field(default_factory=dict)
    shares: dict[tuple[Collective, tuple[Axis, ...]], Shares] = field(default_factory=dict)
    passes: dict[tuple[int, str, str], PassKernels] = field(default_factory=dict)

    def kernel_s(self, kernel: Kernel, device: Device, mode: str) -> float:
        """As `costmodel.kernels.kernel_s`."""
        return max(self.kernel_times(kernel, device, mode))

    def kernel_times(self, kernel: Kernel, device: Device, mode: str) -> tuple[float, float]:
        """Seconds of the device, and of the host that launches."""
        key = (kernel, device.name, mode)
        if key not in self.kernels:
            self.kernels[key] = (device_s(kernel, device, mode), host_s(kernel, device, mode))
        return self.kernels[key]

    def pass_kernels(self, steps: Sequence[Step], device: Device, mode: str) -> PassKernels:
        """The kernels of a pass (the same object: equal ones are summed again) on a device."""
        key = (id(steps), device.name, mode)
        if key not in self.passes:
            inline: Parts = {}
            beside: Parts = {}
            launches_s, calls = 0.0, 0
            routing: Routing | None = None
            for step in steps:
                if routing is None and _needs_counts(step, mode):
                    routing = Routing(sum(inline.values()), launches_s, calls)
                if isinstance(step, Collective):
                    calls += 1
                else:
                    seconds, launch_s = self.kernel_times(step, device, mode)
                    where, into = _kernel_key(step, ""), beside if step.beside else inline
                    into[where] = into.get(where, 0.0) + seconds
                    launches_s += launch_s
            collectives = tuple(step for step in steps if isinstance(step, Collective))
            self.passes[key] = PassKernels(steps, inline, beside, launches_s, collectives, routing)
        return self.passes[key]

    def collective_s(self, collective: Collective, axes: tuple[Axis, ...]) -> float:
        """As `costmodel.collectives.collective_s`, which looks at the axes of the collective alone."""
        axes = tuple(axis for axis in axes if axis.name in collective.axes and axis.size > 1)
        key = (collective, axes)
        if key not in self.collectives:
            self.collectives[key] = collective_s(collective, axes, self.cluster)
        return self.collectives[key]

    def port_shares(self, collective: Collective, axes: tuple[Axis, ...]) -> Shares:
        """As `costmodel.contention.port_shares`."""
        axes = tuple(axis for axis in axes if axis.name in collective.axes and axis.size > 1)
        key = (collective, axes)
        if key not in self.shares:
            self.shares[key] = port_shares(
                collective, axes, self.cluster, self.collective_s(collective, axes)
            )
        return self.shares[key]


def device_of_rank(program: Program, cluster: Cluster, rank: int) -> Device:
    """The device of a pipeline rank: of its device group where the program names one."""
    return cluster.groups[program.groups[rank]].device if program.groups else cluster.device


def price_program(program: Program, cluster: Cluster, pricer: Pricer | None = None) -> tuple[StageCost, ...]:
    """Seconds of every stage of a program; equal stages (the same object, device) are priced once."""
    pricer = pricer or Pricer(cluster)
    homes = {a.stage: rank for rank, actions in enumerate(program.ranks) for a in _steps(actions)}
    priced: dict[tuple[int, str], StageCost] = {}
    costs = []
    for number, stage in enumerate(program.stages):
        device = device_of_rank(program, cluster, homes[number])
        key = (id(stage), device.name)
        if key not in priced:
            priced[key] = price_stage(stage, program, device, pricer)
        costs.append(priced[key])
    return tuple(costs)


def _steps(actions: Sequence[Action]) -> Iterator[Action]:
    """The STEPs of a rank, of which every stage has one, at its end."""
    return takewhile(lambda action: action.kind is ActionKind.STEP, reversed(actions))


def price_stage(stage: StageWork, program: Program, device: Device, pricer: Pricer) -> StageCost:
    """Seconds of every action of one stage on one device."""
    costs = {id(block): price_block(block, program, device, pricer) for block, _ in stage.blocks}
    interference = Interference(
        compute_slowdown=device.constants.get("overlap.compute_slowdown", 0.0),
        comm_slowdown=device.constants.get("overlap.comm_slowdown", 0.0),
    )
    shared = {id(block): contended_s(block, program, pricer) for block, _ in stage.blocks}
    forward_of: dict[int, Pass] = {}
    input_of: dict[int, Pass] = {}
    weight_of: dict[int, Pass] = {}
    both_of: dict[int, Pass] = {}
    for key, cost in costs.items():  # once for links that are the same block
        (forward_s, backward_s), inputs = shared[key], _sum(cost.recompute, cost.backward_input)
        forward_of[key] = Pass(cost.forward, cost.gather_s, forward_s)
        input_of[key] = Pass(inputs, cost.regather_s, backward_s)
        weight_of[key] = Pass(_sum(cost.weight_again, cost.backward_weight), cost.weight_gather_s)
        both_of[key] = Pass(_sum(inputs, cost.backward_weight), cost.regather_s, backward_s)
    forward = [(forward_of[id(block)], count) for block, count in stage.blocks]
    input_passes, weights, both = (
        [(of[id(block)], count) for block, count in reversed(stage.blocks)]
        for of in (input_of, weight_of, both_of)
    )
    buckets = _priced_buckets(stage, program, pricer)
    reduce_s = sum(seconds for _, seconds in buckets)
    every, beside = program.reduce_every_micro, program.overlap
    last_backward, tail_s = _run(both, buckets if beside else [], interference)
    last_weight, weight_tail_s = _run(weights, buckets if beside else [], interference)
    if not beside:
        tail_s = weight_tail_s = reduce_s
    if every:  # the reduction of each micro-batch is over before the next one starts
        last_backward, last_weight = _longer(last_backward, tail_s), _longer(last_weight, weight_tail_s)
    send_s, joined_s = (
        pricer.collective_s(message, program.axes) if message is not None else 0.0
        for message in (stage.send, stage.received)
    )
    updated_s = sum(pricer.collective_s(collective, program.axes) for collective in stage.after_step)
    late, forward_phase = program.late_gathers, _run(forward, [], interference)[0]
    waited_s = 0.0
    if late and updated_s:
        waited_s = _with_gathers_s(stage, forward, updated_s, interference) - forward_phase.total_s
    return StageCost(
        forward=forward_phase,
        backward=last_backward if every else _run(both, [], interference)[0],
        backward_input=_run(input_passes, [], interference)[0],
        backward_weight=last_weight if every else _run(weights, [], interference)[0],
        last_backward=last_backward,
        last_backward_weight=last_weight,
        step=_step_phase(stage, program, device, pricer, 0.0 if late else updated_s),
        reduce_s=0.0 if every else tail_s,
        reduce_after_weight_s=0.0 if every else weight_tail_s,
        send_s=send_s + joined_s,
        joined_s=joined_s,
        tied_s=sum(pricer.collective_s(collective, program.axes) for collective in stage.tied_reduce),
        updated_s=waited_s,
        updated_rest_s=max(updated_s - waited_s, 0.0) if late else 0.0,
    )


def price_block(block: BlockWork, program: Program, device: Device, pricer: Pricer) -> BlockCost:
    """Seconds of the steps of a block: kernels under the key of their pass, collectives under `LABEL_comm`.

    Where launching a pass takes the host longer than the device takes to run it, the pass takes what the host
    needs; the difference stands under the key of the pass. Under `blocking_launches` the pass takes both. A host that
    waits for the routing of tokens launches the rest after the device has done what is before it.
    """

    call_s = device.constants.get("collective.host_s", 0.0)

    def parts(steps: Sequence[Step], key: str) -> Parts:
        if not steps:
            return {}
        kernels = pricer.pass_kernels(steps, device, program.kernels)
        total = {where or key: seconds for where, seconds in kernels.inline.items()}
        beside = {where or key: seconds for where, seconds in kernels.beside.items()}
        launches_s = kernels.launches_s
        for collective in kernels.collectives:
            seconds, where = pricer.collective_s(collective, program.axes), _comm_key(collective)
            launches_s += call_s if seconds else 0.0
            into = beside if collective.beside else total
            into[where] = into.get(where, 0.0) + seconds
        beside_s = sum(beside.values())
        if (exposed_s := beside_s - total.get(key, 0.0)) > 0.0:
            total = _sum(total, {where: exposed_s * (own_s / beside_s) for where, own_s in beside.items()})
        if kernels.routing is not None and key != "backward":  # which knows the counts
            launches_s += _routing_wait_s(kernels.routing, kernels.collectives, call_s, program, pricer)
        hidden_s = 0.0 if program.blocking_launches else sum(total.values())
        if (waiting_s := launches_s - hidden_s) > 0.0:
            total[key] = total.get(key, 0.0) + waiting_s
        return total

    regather_s = sum(pricer.collective_s(gather, program.axes) for gather in block.regathers)
    return BlockCost(
        forward=parts(block.forward, "forward"),
        recompute=parts(block.recompute, "recompute"),
        backward_input=parts(block.backward_input, "backward"),
        backward_weight=parts(block.backward_weight, "backward"),
        weight_again=parts(block.weight_again, "backward"),
        gather_s=sum(pricer.collective_s(gather, program.axes) for gather in block.gathers),
        regather_s=regather_s,
        weight_gather_s=regather_s if block.weight_gathers else 0.0,
    )


def _needs_counts(step: Step, mode: str) -> bool:
    """Whether the host must know how many tokens go where to launch a step of a forward: the exchange of experts' tokens,
    whose sizes it passes, and the grouped products of `fused` kernels, which it launches expert by expert."""
    if isinstance(step, Collective):
        return step.op is CollectiveOp.ALL_TO_ALL and step.axes == ("ep",)
    return step.kind == OpKind.GROUPED_GEMM and mode == "fused" and not step.backward


def _routing_wait_s(
    routing: Routing, collectives: Sequence[Collective], call_s: float, program: Program, pricer: Pricer
) -> float:
    """Seconds that the host waits for the device to have routed the tokens, all launches up to there done."""
    before = [pricer.collective_s(one, program.axes) for one in collectives[: routing.collectives]]
    launched_s = routing.launches_s + call_s * sum(seconds > 0.0 for seconds in before)
    return max(0.0, routing.inline_s + sum(before) - launched_s)


def contended_s(block: BlockWork, program: Program, pricer: Pricer) -> tuple[float, float]:
    """Seconds of a block's forward and of its backward (recomputation included) that its collectives take longer
    where gathers of ZeRO-3 and reductions of gradients use their links all the time."""
    forward = _excess_s(block.forward, block.gathers, program, pricer)
    beside = [*block.regathers, *(block.reduce if program.overlap else ())]
    return forward, _excess_s((*block.recompute, *block.backward_input), beside, program, pricer)


def _excess_s(steps: Sequence[Step], beside: Sequence[Collective], program: Program, pricer: Pricer) -> float:
    inline = [step for step in steps if isinstance(step, Collective) and not step.beside]
    if not inline or not beside:
        return 0.0
    others = [
        (pricer.collective_s(one, program.axes), pricer.port_shares(one, program.axes)) for one in beside
    ]
    beside_s = sum(seconds for seconds, _ in others)
    found = 0.0
    for step in inline:
        own = pricer.port_shares(step, program.axes)
        both_s = sum(seconds * excess(own, other) for seconds, other in others)
        found += pricer.collective_s(step, program.axes) * both_s / beside_s if both_s else 0.0
    return found


def _kernel_key(kernel: Kernel, key: str) -> str:
    """Copies between devices and hosts, and what parameter servers do, have their own; the rest its pass's `key`."""
    return {HOST_COPY: "host_copies", SERVED: "other", FROM_DISK: "other"}.get(kernel.kind, key)


def _comm_key(collective: Collective) -> str:
    key = f"{collective.label}_comm"
    return key if key in BREAKDOWN_KEYS else "other"


def _sum(*maps: Parts) -> Parts:
    total: Parts = {}
    for parts in maps:
        for key, seconds in parts.items():
            total[key] = total.get(key, 0.0) + seconds
    return total


def _longer(whole: Phase, wait_s: float) -> Phase:
    return phase(_sum(dict(whole.parts), {"dp_comm": wait_s}))


def _priced_buckets(stage: StageWork, program: Program, pricer: Pricer) -> list[tuple[Bucket, float]]:
    """The buckets of gradients in the order of the backward, and the seconds that each takes to reduce."""
    reductions = [work.reduce for work in reversed(stage.links)]
    buckets = fill_buckets(reductions, program.bucket_bytes)
    seconds_of = {
        id(together): sum(pricer.collective_s(collective, program.axes) for collective in together)
        for together in {id(bucket.collectives): bucket.collectives for bucket in buckets}.values()
    }
    return [(bucket, seconds_of[id(bucket.collectives)]) for bucket in buckets]


def _run(
    links: Sequence[tuple[Pass, int]], buckets: Sequence[tuple[Bucket, float]], interference: Interference
) -> tuple[Phase, float]:
    """Run the links of one action, each so many times, with their gathers and buckets; also what is left of the reduction
    after it."""
    total: Parts = {}
    for link, count in links:
        for key, seconds in link.parts.items():
            total[key] = total.get(key, 0.0) + seconds * count
    if not buckets and not any(link.gather_s for link, _ in links):
        return phase(total), 0.0
    ready: dict[int, list[tuple[float, float]]] = {}
    for bucket, seconds in buckets:
        ready.setdefault(bucket.link, []).append((bucket.fraction, seconds))
    segments: list[Segment] = []
    for link, count in links:
        work_s = sum(link.parts.values())
        idle = Segment(work_s, link.gather_s, (), link.contended_s / work_s if work_s else 0.0)
        first = len(segments)
        segments += [idle] * count
        for number in range(first, first + count):
            if number in ready:
                segments[number] = replace(idle, reductions=tuple(ready[number]))
    times = run_streams(segments, interference)
    return phase(_sum(total, {"dp_comm": times.exposed_s})), times.tail_s


def _with_gathers_s(
    stage: StageWork, forward: Sequence[tuple[Pass, int]], gather_s: float, interference: Interference
) -> float:
    """Seconds of a forward that begins with the gather of all its parameters: they come block by block, in the order in which they
    run."""
    numbers = max(sum(block.parameters * count for block, count in stage.blocks), 1)
    beside = [
        (replace(one, gather_s=gather_s * block.parameters / numbers), count)
        for (one, count), (block, _) in zip(forward, stage.blocks, strict=True)
    ]
    return _run(beside, [], interference)[0].total_s


def _step_phase(stage: StageWork, program: Program, device: Device, pricer: Pricer, gather_s: float) -> Phase:
    """The optimizer's kernels, and the gather of updated parameters after them."""
    kernels = (
        {_kernel_key(kernel, "optimizer"): pricer.kernel_s(kernel, device, program.kernels)}
        for kernel in stage.optimizer
    )
    return phase(_sum(*kernels, {"dp_comm": gather_s}))
