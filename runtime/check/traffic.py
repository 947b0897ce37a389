"""What a rank sends: the collectives that run while a recorder is active, by mesh axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoparallel.costmodel.program import CollectiveOp
from autoparallel.planner.expand.axes import EXPERT_SHARD, EXPERTS, SECONDARY
from autoparallel.planner.strategy.types import AXES, Shard
from autoparallel.runtime.check.messages import Message
from autoparallel.runtime.ranks.mesh import RankMesh
from autoparallel.runtime.ranks.places import replica_axes, sharding_axes
from autoparallel.runtime.torch_private import group_name_of

# Operators of collectives by name, and which of their arguments is the full tensor (None: the result).
_OPS: Mapping[str, tuple[CollectiveOp, int | None]] = {
    "allreduce_": (CollectiveOp.ALL_REDUCE, 0),
    "_allgather_base_": (CollectiveOp.ALL_GATHER, 0),
    "_reduce_scatter_base_": (CollectiveOp.REDUCE_SCATTER, 1),
    "alltoall_base_": (CollectiveOp.ALL_TO_ALL, 1),
    "send": (CollectiveOp.SEND, 0),
    "broadcast_": (CollectiveOp.BROADCAST, 0),
    "all_reduce": (CollectiveOp.ALL_REDUCE, 0),
    "all_reduce_": (CollectiveOp.ALL_REDUCE, 0),
    "all_gather_into_tensor": (CollectiveOp.ALL_GATHER, None),
    "reduce_scatter_tensor": (CollectiveOp.REDUCE_SCATTER, 0),
    "all_to_all_single": (CollectiveOp.ALL_TO_ALL, 0),
    "shard_dim_alltoall": (CollectiveOp.ALL_TO_ALL, 0),
    "broadcast": (CollectiveOp.BROADCAST, 0),
}
_DISPATCHES = ("alltoall_base_",)  # what brings tokens to experts
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


class TrafficRecorder(TorchDispatchMode):
    """Counts collectives while it is active; `axes` names the mesh axis of each process group, by its name, and `where`
    says in which module the process is; `parts` has the sizes of groups that are a part of their axis, and `dispatch` is the
    name of the group that experts are shared over."""

    def __init__(
        self, axes: Mapping[str, str], where: Callable[[], str] = str, parts: Mapping[str, int] | None = None,
        dispatch: str = "",
    ) -> None:  # fmt: skip
        super().__init__()
        self._axes, self._where, self._parts, self._dispatch = axes, where, parts or {}, dispatch
        self.found: Counter[Message] = Counter()
        self.modules: dict[Message, Counter[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # to see what it does inside
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if func.namespace in _NAMESPACES and name in _OPS:
            op, position = _OPS[name]
            whole = result if position is None else args[position]
            group = _group_of(args)
            size = sum(leaf.nbytes for leaf in tree_leaves(whole) if isinstance(leaf, Tensor))
            to_experts = group == self._dispatch and name in _DISPATCHES
            axis = EXPERTS if to_experts else self._axes.get(group, "other")
            part = 0 if op is CollectiveOp.SEND else self._parts.get(group, 0)
            message = Message(op=op, axis=axis, size_bytes=size, ranks=part)
            self.found[message] += 1
            self.modules.setdefault(message, Counter())[self._where()] += 1
        return result


def _group_of(args: Any) -> str:
    """The name of the group among an operator's arguments: boxed, or the last string of them."""
    boxed = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
    return group_name_of(boxed[0] if boxed else [a for a in args if isinstance(a, str)][-1])


def group_names(mesh: RankMesh, shard: Shard) -> dict[str, str]:
    """The axis, or joined axes, of each process group of this rank, by the group's name. Experts may be shared over the very group of
    another axis (torch makes one of all ranks), whose name it then has (see `dispatch_group`)."""
    zero = shard.zero
    found: dict[str, str] = {
        mesh.group(axis).group_name: axis for axis in AXES if getattr(mesh.sizes, axis) > 1
    }
    for axes in (sharding_axes(mesh.sizes, zero), replica_axes(mesh.sizes, zero)):
        if len(axes) > 1:
            found[mesh.group(*axes).group_name] = " x ".join(axes)
    if shard.secondary:
        found[mesh.secondary(shard.secondary).get_group(SECONDARY).group_name] = SECONDARY
    for axis in (EXPERT_SHARD, EXPERTS) if mesh.expert_mesh is not None else ():
        found.setdefault(mesh.expert_axis(axis).get_group().group_name, axis)
    apart = mesh.expert_mesh is not None and not sharding_axes(mesh.sizes, zero)
    if apart and (alike := mesh.expert_replicas()) is not None:  # ranks that hold the same experts
        sizes = {"dp_replicate": mesh.sizes.dp_replicate, EXPERT_SHARD: mesh.expert_axis(EXPERT_SHARD).size()}
        found[alike.group_name] = " x ".join(axis for axis, size in sizes.items() if size > 1)
    for group in mesh.levels or ():
        found[group.group_name] = " x ".join(replica_axes(mesh.sizes, zero))
    for group in mesh.shard_levels or ():
        found[group.group_name] = " x ".join(sharding_axes(mesh.sizes, zero))
    return found


def dispatch_group(mesh: RankMesh) -> str:
    """The name of the group that experts are shared over; "" without."""
    return "" if mesh.expert_mesh is None else mesh.expert_axis(EXPERTS).get_group().group_name
