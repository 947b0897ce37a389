"""Collectives to measure, over sizes, group sizes and the levels of the network. Every rank calls the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import product

import torch
import torch.distributed as dist

from autoparallel.costmodel.fit_collectives import CollectiveSample, GroupPlace
from autoparallel.costmodel.program import CollectiveOp
from autoparallel.runtime.profiling.timing import Call, accelerator_s, device_name, on_accelerator

SIZES = {
    False: (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24),
    True: (1 << 10, 1 << 16, 1 << 20, 1 << 23, 1 << 25, 1 << 27, 1 << 29),
}
OPS = (
    CollectiveOp.ALL_REDUCE,
    CollectiveOp.ALL_GATHER,
    CollectiveOp.REDUCE_SCATTER,
    CollectiveOp.ALL_TO_ALL,
    CollectiveOp.BROADCAST,
    CollectiveOp.SEND,
)
FP32 = 4
REPETITIONS = 40
QUICK_REPETITIONS = 8
WARM_UP = 2
IN_A_ROW = 20


def group_places(world: int, per_node: int) -> tuple[GroupPlace, ...]:
    """Groups of 2, 4, … neighbouring ranks, of all ranks, and of one rank of each node."""
    found = [GroupPlace(size=size, stride=1) for size in (2, 4, 8, 16) if size < world and world % size == 0]
    found.append(GroupPlace(size=world, stride=1))
    if 1 < per_node < world:
        found.append(GroupPlace(size=world // per_node, stride=per_node))
    return tuple(dict.fromkeys(found))


def measure_collectives(
    per_node: int,
    *,
    quick: bool = False,
    sizes: Sequence[int] | None = None,
    tell: Callable[[int, int, str], None] = lambda *_: None,
) -> tuple[CollectiveSample, ...]:
    """Times collectives of `sizes` (bytes; the usual ones) while every rank takes part in one like it. Needs an
    initialised process group."""
    world = dist.get_world_size()
    places = group_places(world, per_node)
    cases = list(product(places, OPS, sizes or SIZES[on_accelerator()]))
    samples = []
    groups = {place: _own_group(place, world) for place in places}
    for done, (place, op, size) in enumerate(cases):
        label = f"{op} of {size >> 10} KiB over {place.size} ranks"
        tell(done, len(cases), label)
        call = _call(op, size, place, groups[place])
        seconds = _measure_s(call, QUICK_REPETITIONS if quick else REPETITIONS)
        samples.append(CollectiveSample(op=op, size_bytes=size, place=place, seconds=seconds))
    tell(len(cases), len(cases), "")
    return tuple(samples)


def _own_group(place: GroupPlace, world: int) -> dist.ProcessGroup:
    span = place.size * place.stride
    lists = [
        list(range(first + offset, first + span, place.stride))
        for first in range(0, world, span)
        for offset in range(place.stride)
    ]
    group: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(lists)[0]
    assert group is not None
    return group


def _call(op: CollectiveOp, size: int, place: GroupPlace, group: dist.ProcessGroup) -> Call:
    """One collective; `size` is the full tensor, as the cost model counts it."""
    count = max(size // FP32, place.size)
    whole = torch.ones(count // place.size * place.size, device=device_name())
    part = torch.ones(whole.numel() // place.size, device=device_name())
    members = dist.get_process_group_ranks(group)
    match op:
        case CollectiveOp.ALL_REDUCE:
            return lambda: dist.all_reduce(whole, group=group)
        case CollectiveOp.ALL_GATHER:
            return lambda: dist.all_gather_into_tensor(whole, part, group=group)
        case CollectiveOp.REDUCE_SCATTER:
            return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
        case CollectiveOp.ALL_TO_ALL:
            other = torch.empty_like(whole)
            return lambda: dist.all_to_all_single(other, whole, group=group)
        case CollectiveOp.BROADCAST:
            return lambda: dist.broadcast(whole, members[0], group=group)
        case _:
            return _to_and_fro(whole, members, group)


def _to_and_fro(message: torch.Tensor, members: Sequence[int], group: dist.ProcessGroup) -> Call:
    """Each rank sends to the next of its group and receives from the one before, at once."""
    place = members.index(dist.get_rank())
    following, before = members[(place + 1) % len(members)], members[place - 1]
    arrived = torch.empty_like(message)

    def run() -> None:
        operations = [
            dist.P2POp(dist.isend, message, following, group),
            dist.P2POp(dist.irecv, arrived, before, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return run


def _measure_s(call: Call, repetitions: int) -> float:
    """The quickest of single calls, the slowest rank's of each: calls start together at a barrier.

    Not a quantile as of kernels: a call waits for whichever process the machine makes wait. On accelerators, whose
    calls can be shorter than the time in which ranks leave a barrier, one of `IN_A_ROW`, as nccl-tests takes it.
    """
    times = []
    for number in range(WARM_UP + repetitions):
        dist.barrier()
        if on_accelerator():
            seconds = accelerator_s(call, IN_A_ROW)
        else:
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
        if number >= WARM_UP:
            times.append(seconds)
    slowest = torch.tensor(times, dtype=torch.float64, device=device_name())
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.min())
