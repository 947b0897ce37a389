"""Collectives to measure, over sizes, group sizes and the levels of the network. Every rank calls the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import product

import torch
import torch.distributed as dist

from autoparallel.costmodel.fit_collectives import CollectiveSample, GroupPlace
from autoparallel.costmodel.program import CollectiveOp
from autoparallel.runtime.profiling.bursts import Burst, make_burst, slowest
from autoparallel.runtime.profiling.timing import Call, accelerator_s, device_name, on_accelerator
from autoparallel.runtime.ranks.gathers import all_gather_single, reduce_scatter_single

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
BURST_S = 3e-3  # of computation before each call: what a block of a small model takes
ROUNDS, ACCELERATOR_ROUNDS, QUICK_ROUNDS = 5, 40, 2
WARM_UP = 1
AFTER_BURSTS = 10  # calls that make a round on a CPU, fewer where one takes long
ROUND_S = 1.0  # that a round may take, of one call at least
IN_A_ROW = 20  # and on an accelerator


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
    """Times collectives of `sizes` (bytes; the usual ones), as steps make them, while every rank takes part in one
    like it. Needs an initialised process group."""
    world = dist.get_world_size()
    places = group_places(world, per_node)
    cases = list(product(places, OPS, sizes or SIZES[on_accelerator()]))
    samples = []
    groups = {place: _own_group(place, world) for place in places}
    burst = None if on_accelerator() else make_burst(BURST_S)
    rounds = {False: ROUNDS, True: ACCELERATOR_ROUNDS}[on_accelerator()]
    for done, (place, op, size) in enumerate(cases):
        label = f"{op} of {size >> 10} KiB over {place.size} ranks"
        tell(done, len(cases), label)
        call = _call(op, size, place, groups[place])
        seconds, quickest_s = _in_step(call, burst, QUICK_ROUNDS if quick else rounds)
        samples.append(
            CollectiveSample(op=op, size_bytes=size, place=place, seconds=seconds, quickest_s=quickest_s)
        )
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
            return lambda: all_gather_single(whole, part, group=group)
        case CollectiveOp.REDUCE_SCATTER:
            return lambda: reduce_scatter_single(part, whole, group=group)
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


def _in_step(call: Call, burst: Burst | None, rounds: int) -> tuple[float, float]:
    """Seconds of a call as a step makes it, and of the quickest single one: the slowest rank's of each.

    On a CPU a round is `AFTER_BURSTS` bursts of computation, each followed by a call; the median round less its bursts
    counts. In a step processes are woken up, and arrive, at different moments, which each of its calls pays for.
    Without bursts, on an accelerator that works through its queue meanwhile, a round is `IN_A_ROW` calls, as nccl-tests
    takes it, and the quickest counts.
    """
    rounds_s, singles_s, calls = [], [], 1
    for number in range(WARM_UP + rounds):
        dist.barrier()
        if burst:
            round_s, single_s = _after_bursts(call, burst, calls)
            if number < WARM_UP:  # the slowest rank's, so that all make as many
                longest_s = float(slowest([single_s]).max())
                calls = max(1, min(AFTER_BURSTS, int(ROUND_S / max(longest_s, 1e-9))))
        else:
            round_s = single_s = accelerator_s(call, IN_A_ROW)
        if number >= WARM_UP:
            rounds_s.append(round_s)
            singles_s.append(single_s)
    quickest_s = float(slowest(singles_s).min())
    typical_s = float(slowest(rounds_s).median()) if burst else quickest_s
    return max(typical_s, quickest_s), quickest_s


def _after_bursts(call: Call, burst: Burst, calls: int) -> tuple[float, float]:
    """Seconds of a call in the mean, what the bursts before take longer for it included, and of the quickest."""
    quickest_s = float("inf")
    begin = time.perf_counter()
    for _ in range(calls):
        burst()
        start = time.perf_counter()
        call()
        quickest_s = min(quickest_s, time.perf_counter() - start)
    return (time.perf_counter() - begin) / calls - burst.seconds, quickest_s
