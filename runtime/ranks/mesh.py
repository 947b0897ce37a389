"""The ranks of a run: process group, device, and the mesh whose axes a strategy names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.errors import UserError
from autoparallel.planner.expand.axes import EXPERT_SHARD, SECONDARY
from autoparallel.planner.strategy.types import AXES, Mesh
from autoparallel.runtime.ranks.accelerator import backends, current_device, device_of_group, take_device
from autoparallel.runtime.ranks.leaving import leave_at_exit
from autoparallel.runtime.ranks.places import (
    EXPERT_AXES,
    expert_ranks,
    joined_name,
    mesh_ranks,
    secondary_groups,
)
from autoparallel.runtime.torch_private import joined_mesh, outside_tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMesh:
    """Where this process stands. `device_mesh` has the axes of `AXES` in that order, whatever the strategy's
    `order` (which decides who sits where); it is None alone in one process without a process group."""

    sizes: Mesh
    rank: int
    device: torch.device
    device_mesh: DeviceMesh | None
    level_sizes: tuple[int, ...] = ()  # devices below one port of each network level, where it is known
    # The replicas of this rank's share below its port of a network level, and those that stand where it stands
    # below other ports, where gradients are reduced level by level.
    levels: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    shard_levels: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None  # and of the ranks that shard
    # With ep > 1 the same ranks by the axes that experts are shared over: pp, dp_replicate, expert_shard, ep.
    expert_mesh: DeviceMesh | None = None

    def coordinate(self, axis: str) -> int:
        """This rank's position along `axis`."""
        return 0 if self.device_mesh is None else self.device_mesh.get_local_rank(axis)

    def axis(self, *names: str) -> DeviceMesh:
        """The one-dimensional mesh along `names` through this rank: several axes are joined to one, of the name
        `joined_name(names)`. Collective when they are first joined."""
        assert self.device_mesh is not None, f"axis {names} asked for without a process group"
        return _along(self.device_mesh, names)

    def activation_mesh(self) -> DeviceMesh | None:
        """The mesh that activations are laid out on: of cp and tp, as far as they have several ranks."""
        names = tuple(axis for axis in ("cp", "tp") if getattr(self.sizes, axis) > 1)
        return self.device_mesh[names] if names and self.device_mesh is not None else None

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The process group along `axes` through this rank."""
        return self.axis(*axes).get_group()

    def expert_axis(self, *names: str) -> DeviceMesh:
        """As `axis`, along axes of `EXPERT_AXES`: `ep` (other experts), `expert_shard` (the same ones)."""
        assert self.expert_mesh is not None, f"axis {names} asked for without expert parallelism"
        return _along(self.expert_mesh, names)

    def secondary(self, ranks: int) -> DeviceMesh:
        """The two-dimensional mesh of this rank's shards: copies of the parameters, and the `ranks` that share each. Collective the
        first time."""
        inside, across = secondary_groups(self.sizes, ranks)
        made = subgroup(across, f"{SECONDARY}_copies"), subgroup(inside, SECONDARY)
        groups = [group for group in made if group is not None]  # every rank is in one of each
        with outside_tracing():  # a dry run's tensors have no numbers
            line = self.axis("dp_shard").mesh.view(-1, ranks)
            return DeviceMesh.from_group(groups, self.device.type, line, mesh_dim_names=("copies", SECONDARY))

    def expert_replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same experts as this one; None if it is the only one."""
        shape = dict(zip(EXPERT_AXES, self.expert_mesh.shape if self.expert_mesh else (), strict=True))
        axes = [axis for axis in ("dp_replicate", EXPERT_SHARD) if shape[axis] > 1]
        return self.expert_axis(*axes).get_group() if axes else None

    @property
    def data_parallel_size(self) -> int:
        return self.sizes.data_parallel

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the global batch this rank reads: dp_replicate is the outer axis of the batch."""
        return self.coordinate("dp_replicate") * self.sizes.dp_shard + self.coordinate("dp_shard")


def _along(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else joined_mesh(mesh[names], joined_name(names))


_made: dict[str, dist.ProcessGroup | None] = {}
_made_in: dist.ProcessGroup | None = None  # the run that they belong to


def subgroup(groups: Sequence[Sequence[int]], name: str) -> dist.ProcessGroup | None:
    """This rank's group of `groups` (ranks of the run), made once for a name and ranks; None where it is in none of them.
    Its description is the name. Collective over all ranks of the run the first time."""
    global _made_in
    if _made_in is not dist.group.WORLD:
        _made.clear()
        _made_in = dist.group.WORLD
    key = f"{name} {[list(group) for group in groups]}"
    if key not in _made:
        own, _ = dist.new_subgroups_by_enumeration([list(group) for group in groups], group_desc=name)
        _made[key] = own if isinstance(own, dist.ProcessGroup) else None
    return _made[key]


def world_size() -> int:
    """Processes of this run: of the process group if it is up, else what the launcher announced, else 1."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def start_ranks() -> tuple[int, torch.device]:
    """Start the default process group if a launcher (torchrun) announced one; this rank and its device.

    One accelerator per local rank and its own collectives (NCCL on CUDA) where there are any, else Gloo. A process
    group that is already up is used as it is: on Gloo alone ranks compute on the CPU. Alone in one process no group
    is needed and none is started.
    """
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    ours = not dist.is_initialized() and launched
    if ours:
        # Without `device_id`: a group that is bound to a device runs all messages between ranks one after another.
        dist.init_process_group(backends(take_device()))
    if not dist.is_initialized():
        return 0, current_device()
    leave_at_exit(destroy=ours)
    return dist.get_rank(), device_of_group()


def check_mesh(sizes: Mesh, world: int) -> None:
    """Refuse a mesh that does not use exactly `world` processes, or that the runtime cannot run."""
    if sizes.devices != world:
        shown = " x ".join(f"{axis}={getattr(sizes, axis)}" for axis in AXES)
        raise UserError(
            f"[mesh] {shown} needs {sizes.devices} processes but {world} are running: start "
            f"{sizes.devices} (torchrun --nproc-per-node), or plan for {world} devices"
        )
    if sizes.dp_shard * sizes.cp * sizes.tp % sizes.ep:
        raise UserError(
            f"mesh.ep = {sizes.ep} does not divide dp_shard x cp x tp = {sizes.dp_shard * sizes.cp * sizes.tp}: "
            "change one of them"
        )
    if sorted(sizes.order) != sorted(AXES):
        raise UserError(f"mesh.order = {list(sizes.order)} must name each of {list(AXES)} once")


def build_mesh(sizes: Mesh, level_sizes: tuple[int, ...] = ()) -> RankMesh:
    """Process group and device mesh of a strategy; collective. `sizes` has passed `check_mesh`."""
    rank, device = start_ranks()
    if not dist.is_initialized():
        return RankMesh(sizes=sizes, rank=0, device=device, device_mesh=None)
    device_mesh = DeviceMesh(device.type, torch.from_numpy(mesh_ranks(sizes)), mesh_dim_names=AXES)
    expert_mesh = None
    if sizes.ep > 1:
        expert_mesh = DeviceMesh(
            device.type, torch.from_numpy(expert_ranks(sizes)), mesh_dim_names=EXPERT_AXES
        )
    return RankMesh(
        sizes=sizes, rank=rank, device=device, device_mesh=device_mesh, level_sizes=level_sizes,
        expert_mesh=expert_mesh,
    )  # fmt: skip
