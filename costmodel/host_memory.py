"""Bytes in the memory of each node's host: what its devices keep there, and what parameter servers hold.

A device keeps on its host the share of the optimizer state that is offloaded, all through the step, and of every
micro-batch on its way the share of the activations, from its forward to its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import lcm, prod

import numpy as np

from autoparallel.costmodel.memory import LiveState
from autoparallel.costmodel.program import ActionKind, Axis, Program, StageWork
from autoparallel.profiles.hardware import Cluster


def host_bytes_by_rank(states: Sequence[Sequence[LiveState]], stages: Sequence[StageWork]) -> tuple[int, ...]:
    """What one device of each pipeline rank has on its host at most, from `memory.live_states` of each rank."""
    moved = [sum(block.host_bytes * count for block, count in stage.blocks) for stage in stages]
    return tuple(_rank_bytes(own, stages, moved) for own in states)


def _rank_bytes(states: Sequence[LiveState], stages: Sequence[StageWork], moved: Sequence[int]) -> int:
    held = sum(
        stages[stage].host_bytes for stage in {stage for state in states for stage, _, _ in state.held}
    )
    if not any(moved):
        return held
    # A micro-batch leaves its own activations while it runs forward, and takes them back while it runs backward.
    return held + max(
        sum(full * moved[stage] for stage, full, _ in state.held)
        + (moved[state.stage] if state.kind is not ActionKind.BACKWARD_WEIGHT else 0)
        for state in states
    )


def fullest_host_bytes(program: Program, by_rank: Sequence[int], cluster: Cluster) -> int:
    """The most that the devices of one node have on its host, parameter servers' rows included."""
    if not any(by_rank):
        return program.host_bytes
    shares = ranks_on_hosts(program.axes, cluster)
    return program.host_bytes + max(sum(n * by_rank[rank] for rank, n in share) for share in shares)


def ranks_on_hosts(axes: Sequence[Axis], cluster: Cluster) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The distinct sets of devices that share a host: (pipeline rank, how many of its devices)."""
    devices = prod(axis.size for axis in axes if not axis.derived)
    each = min(max(group.devices_per_node for group in cluster.groups), devices)
    pp = next((axis for axis in axes if axis.name == "pp"), Axis(name="pp", size=1, stride=devices))
    if pp.stride % each == 0:
        return tuple(((rank, each),) for rank in range(pp.size))
    alike = lcm(pp.size * pp.stride, each)  # devices from there on are placed as these
    homes = np.arange(min(alike, devices)) // pp.stride % pp.size
    hosts = [homes[start : start + each] for start in range(0, len(homes), each)]
    return tuple({tuple(Counter(host.tolist()).items()): None for host in hosts})


def host_capacity_bytes(cluster: Cluster) -> float:
    """What training can have of the memory of each node's host, the least of all device groups; 0 where a profile does
    not say."""
    constants = [group.device.constants for group in cluster.groups]
    return min(one["host.memory_bytes"] * one["host.usable"] for one in constants)
