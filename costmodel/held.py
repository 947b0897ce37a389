"""`held`: what a program needs of the memory of its devices and of their hosts."""

from __future__ import annotations

from collections.abc import Sequence

from autoparallel.costmodel.host_memory import fullest_host_bytes, host_bytes_by_rank, host_capacity_bytes
from autoparallel.costmodel.memory import LiveState, memory_by_rank
from autoparallel.costmodel.prediction import Held
from autoparallel.costmodel.program import Program
from autoparallel.profiles.hardware import Cluster


def held(program: Program, states: Sequence[Sequence[LiveState]], cluster: Cluster) -> Held:
    """The memory of a program on a cluster, from the `memory.live_states` of each of its pipeline ranks."""
    stages = program.stages
    return Held(
        memory=memory_by_rank(
            states, stages, reduce_every_micro=program.reduce_every_micro, ranks=program.ranks
        ),
        capacities_bytes=capacities_bytes(program, cluster),
        host_bytes=fullest_host_bytes(program, host_bytes_by_rank(states, stages), cluster),
        host_capacity_bytes=host_capacity_bytes(cluster),
    )


def capacities_bytes(program: Program, cluster: Cluster) -> tuple[float, ...]:
    """What the devices of each pipeline rank can hold: of its device group, else the least of all groups."""
    room = [group.device.memory_bytes - group.device.reserve_bytes for group in cluster.groups]
    return tuple(room[g] for g in program.groups) or (min(room),) * len(program.ranks)
