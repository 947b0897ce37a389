"""The file of the runtime that touches torch's private names, those of FSDP2 (`fsdp_private.py`) and how DTensor finds what to
do (`dtensor_private.py`) aside. Its test says which torch they hold for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.autograd.graph import get_gradient_edge
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, placement_types
from torch.distributed.tensor import _random as random
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

# What the names below were seen to work with; a test compares. Torch 2.11 does not keep the parts of a strided
# shard apart in views: there capture offers no `shard(DIM, strided PARTS)`, and a strategy with one is refused.
TORCH_VERSIONS = ("2.11", "2.12", "2.13")


# Products of rows sorted by group: what `torch.nn.functional` has, and what older code calls.
GROUPED_PRODUCTS = (torch.nn.functional.grouped_mm, torch._grouped_mm)


@contextmanager
def traced_as(*, eager: bool) -> Iterator[None]:
    """How code finds out that it is being traced: flags of `torch.compiler`, and the class of its tensors.

    `eager` hides all of it. Model libraries leave a causal mask to the attention kernel in eager mode and build
    an explicit one under export; the glue of a pipeline stage runs eagerly, so it is traced as it would run.
    """
    flags, tensors = vars(torch.compiler), vars(torch._subclasses)
    before = flags["_is_compiling_flag"], flags["_is_exporting_flag"], tensors["FakeTensor"]
    flags["_is_compiling_flag"] = flags["_is_exporting_flag"] = not eager
    tensors["FakeTensor"] = _NoTensor if eager else FakeTensor
    try:
        yield
    finally:
        flags["_is_compiling_flag"], flags["_is_exporting_flag"], tensors["FakeTensor"] = before


class _NoTensor:
    """The class of no tensor."""


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Operators run on real tensors and leave no trace."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def sizes_of_its_own() -> AbstractContextManager[None]:
    """Inside, code on fake tensors may make sizes that hang on values (which rows are an expert's?) and forget them."""
    mode = torch._guards.detect_fake_mode()
    environment = mode.shape_env if mode is not None else None
    return environment.ignore_fresh_unbacked_symbols() if environment is not None else nullcontext()


def size_hint(size: torch.SymInt) -> int:
    """The value that a symbolic size had in the example inputs, without fixing it."""
    return int(size.node.hint)


def is_open(size: int | torch.SymInt) -> bool:
    """Whether a traced size may have other values than in the example inputs."""
    return isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None


def hangs_on_values(size: int | torch.SymInt) -> bool:
    """Whether a traced size is known only once the values are: how many rows are an expert's?"""
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once when the backward pass that is running ends (only from within one)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_under_modes(outputs: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
    """`torch.autograd.backward`, whose second runs of blocks modes of torch functions see: that function leaves them."""
    given = [torch.ones_like(t) if g is None else g for t, g in zip(outputs, gradients, strict=True)]
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(tuple(outputs), tuple(given), False, False, (), True, True)


def gradients_under_modes(
    outputs: Sequence[Any], inputs: Sequence[Tensor], gradients: Sequence[Tensor | None], *, retain_graph: bool = False
) -> Sequence[Tensor | None]:  # fmt: skip
    """Likewise `torch.autograd.grad` of tensors, or of edges whose gradients are given; None for what the outputs do not come from."""
    given = [torch.ones_like(t) if g is None else g for t, g in zip(outputs, gradients, strict=True)]
    engine = torch.autograd.Variable._execution_engine
    return engine.run_backward(tuple(outputs), tuple(given), retain_graph, False, tuple(inputs), True, False)


def accumulated_under_modes(
    edges: Sequence[Any], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor] | None = None
) -> None:
    """Likewise `torch.autograd.backward` of edges, down to `inputs`."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(tuple(edges), tuple(gradients), False, False, tuple(inputs or ()), True, True)


def knows_parts() -> bool:
    """Whether this torch runs `shard_in_parts`."""
    return tuple(int(number) for number in torch.__version__.split(".")[:2]) >= (2, 12)


def shard_in_parts(dim: int, parts: int) -> Placement:
    """The placement in which `dim` is `parts` equal parts one after another, each of them sharded."""
    return _StridedShard(dim, split_factor=parts)


def distribute_in_parts(tensor: Tensor, mesh: DeviceMesh, dim: int, parts: int) -> DTensor:
    """This rank's piece of each of `parts` parts of `dim`; every rank has the whole `tensor`, or a meta tensor.

    By way of a view: torch marks strided shards that come from views, and only these, as what they are here
    (others stand for an order of mesh axes), and moves data to bring the two kinds together.
    """
    apart = tensor.unflatten(dim, (parts, -1))
    held = distribute_tensor(apart, mesh, [Shard(dim + 1)], src_data_rank=None)
    whole = held.flatten(dim, dim + 1)
    assert isinstance(whole, DTensor)
    return whole


def dtensor_like(part: Tensor, like: DTensor) -> DTensor:
    """The DTensor laid out just like `like` of which this rank holds `part`."""
    return laid_out(part, like._spec)


def layout_of(tensor: Tensor) -> Any:
    """How a DTensor is laid out, without its values; None for a plain tensor."""
    return tensor._spec if isinstance(tensor, DTensor) else None


def laid_out(part: Tensor, layout: Any) -> DTensor:
    """The DTensor of which this rank holds `part`, by what `layout_of` gave."""
    return DTensor(part, layout, requires_grad=False)


def with_placement(layout: Any, placement: Placement) -> Any:
    """What `layout_of` gave on a one-dimensional mesh, in another placement."""
    return DTensorSpec(layout.mesh, (placement,), tensor_meta=layout.tensor_meta)


@contextmanager
def without_function_mode(kind: type[TorchFunctionMode]) -> Iterator[None]:
    """Inside, no mode of this kind is active in this thread; the others are."""
    held = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    for mode in reversed(held):
        if not isinstance(mode, kind):
            _push_mode(mode)
    try:
        yield
    finally:
        while torch._C._len_torch_function_stack():
            _pop_mode()
        for mode in reversed(held):
            _push_mode(mode)


def function_modes() -> list[TorchFunctionMode]:
    """Those that are active in this thread, the outermost first; but for a default device, which checkpoints keep."""
    return [m for m in _get_current_function_mode_stack() if not isinstance(m, DeviceContext)]


def step_without_hooks(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """An optimizer's step without the hooks that torch calls around it: where it is a part of another one's."""
    step: Callable[..., Any] = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def norms_of(tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """The norm of each tensor in `dtype`, in few kernels on accelerators."""
    return torch._foreach_norm(list(tensors), 2.0, dtype)


def scale_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by the number `factor`, in place, in few kernels on accelerators."""
    torch._foreach_mul_(list(tensors), factor)


def storage_key(tensor: Tensor) -> int:
    """A number that tensors share which share memory, for as long as it is theirs; tensors without values have one."""
    return int(tensor.untyped_storage()._cdata)


def dtensor_of(part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The DTensor of which this rank holds `part`, shards being equal: strided ones as `shard_in_parts` means them."""
    plain = [p if (parts := parts_of(p)) is None else Shard(parts[0]) for p in placements]
    made = DTensor.from_local(part, mesh, plain, run_check=False)
    if plain == list(placements):
        return made
    spec = DTensorSpec(
        mesh, tuple(placements), tensor_meta=made._spec.tensor_meta, use_strided_shard_as_shard_order=False
    )
    return DTensor(part.detach(), spec, requires_grad=False)


def change_placement(share: Tensor, before: Placement, after: Placement, mesh: DeviceMesh) -> Tensor:
    """This rank's share of a tensor in one placement on a one-dimensional mesh as its share in another; not differentiable.
    Shards are equal."""
    ranks, operators = mesh.size(), torch.ops._c10d_functional
    if before == after:
        return share.view_as(share)
    if before.is_partial() and after.is_replicate():
        return _sent(operators.all_reduce.default, share, mesh, "sum")
    if before.is_partial() and isinstance(after, Shard):
        parts = share.unflatten(after.dim, (ranks, -1)).movedim(after.dim, 0)
        return _sent(operators.reduce_scatter_tensor.default, parts, mesh, "sum", ranks).squeeze(0)
    if isinstance(before, Shard) and after.is_replicate():
        parts = _sent(operators.all_gather_into_tensor.default, share[None], mesh, ranks)
        return parts.movedim(0, before.dim).flatten(before.dim, before.dim + 1)
    if before.is_replicate() and isinstance(after, Shard):
        return share.chunk(ranks, after.dim)[mesh.get_local_rank()].contiguous()
    whole = DTensor.from_local(share, mesh, [before], run_check=False)
    made = whole.redistribute(placements=[after]).to_local()
    return made.wait() if isinstance(made, funcol.AsyncCollectiveTensor) else made


def _sent(operator: Any, share: Tensor, mesh: DeviceMesh, *how: Any) -> Tensor:
    """The result of a collective, as torch's functional ones give it, in half of their time: below autograd, and without
    the class of tensors that wait when they are used."""
    with torch._C._AutoDispatchBelowAutograd():
        made = operator(share.contiguous(), *how, mesh.get_group().group_name)
        result: Tensor = torch.ops._c10d_functional.wait_tensor.default(made)
    return result


def parts_of(placement: Placement) -> tuple[int, int] | None:
    """(dim, parts) of a placement made by `shard_in_parts`, None for any other."""
    if isinstance(placement, _StridedShard):
        return placement.dim, int(placement.split_factor)
    return None


@contextmanager
def as_one_of(ranks: int) -> Iterator[None]:
    """This process as rank 0 of `ranks` that are not there: collectives return at once and move nothing.

    Tensors that change the dim they are sharded along are exchanged, as on GPUs, and not gathered and cut, as torch
    does on CPUs.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # parts of torch that only tests need

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    names = vars(placement_types)
    before = names["shard_dim_alltoall"]
    names["shard_dim_alltoall"] = _exchange
    try:
        yield
    finally:
        names["shard_dim_alltoall"] = before
        _forget_layouts()
        dist.destroy_process_group()


def _forget_layouts() -> None:
    """DTensor remembers layouts with the meshes that they were on, and takes a mesh of the same ranks for the same one."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # imports torch's compiler: seconds

    _clear_sharding_prop_cache()


def _exchange(part: Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
    name = mesh.get_group(mesh_dim).group_name
    result: Tensor = torch.ops._dtensor.shard_dim_alltoall(part, gather_dim, shard_dim, name)
    return result


def looked_up_alone(again: Any, kept: Callable[[Any], bool]) -> Any:
    """`again`, the mode of a second run where results of operators are kept, as one that sees those operators alone. All others run:
    of them torch keeps an account, too, to which what FSDP2 does for a unit inside a block need not answer."""

    class Again(type(again)):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not kept(func):
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    again.__class__ = Again
    return again


def run_again(kept: Any, which: Callable[[Tensor], bool]) -> bool:
    """Of the results that the first context of selective checkpointing keeps, let those of which `which` is true run
    again after all. False where this torch (before 2.13) has no way to."""
    mark = getattr(torch.utils.checkpoint, "_RECOMPUTE", None)
    if mark is None:
        return False
    for entries in kept.storage.values():
        for number, entry in entries.items():
            values = [getattr(leaf, "val", None) for leaf in tree_leaves(entry)]
            if any(isinstance(value, Tensor) and which(value) for value in values):
                entries[number] = mark
    return True


def draw_without_broadcast(mesh: DeviceMesh, device: torch.device) -> None:
    """Let DTensor draw from the generator of this rank's `device` as it is.

    The first time that it draws on an accelerator it would send rank 0's to all ranks of the run: ranks that draw at
    another time, or never (those of another pipeline stage), would keep it waiting for ever.
    """
    if device.type != "cpu" and random.is_rng_supported_mesh(mesh) and random._rng_tracker is None:
        tracker = random.OffsetBasedRNGTracker(mesh, run_state_sync=False)
        tracker._device = device  # it takes the one whose number is the rank's, counted round each node
        random._rng_tracker = tracker


def joined_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The axes of `mesh` as one, which the mesh it was taken from then knows by `name`; collective the first time."""
    return mesh._flatten(name)


def fake_tensors() -> FakeTensorMode:
    """While active, tensors have shapes and no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


# What code raises that needs values of tensors which have none.
WITHOUT_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no values."""
    return isinstance(tensor, FakeTensor)


def group_name_of(group: Any) -> str:
    """The name of a process group, as operators of collectives get it: by name, or boxed."""
    return group if isinstance(group, str) else dist.ProcessGroup.unbox(group).group_name


def storage_id(storage: torch.UntypedStorage) -> int:
    """What tells a storage from every other that lives, whatever tensors share it."""
    return int(storage._cdata)


def adds_up_gradients(operator: Any) -> bool:
    """Whether it adds two gradients of one tensor, which autograd does by itself between two nodes of a backward pass."""
    in_backward = torch._C._current_autograd_node() is not None and not torch.is_grad_enabled()
    return in_backward and operator is torch.ops.aten.add.Tensor


def when_gradients_came(tensors: Sequence[Tensor], act: Callable[[], None]) -> list[RemovableHandle]:
    """Call `act` when all of these tensors that get a gradient in a backward pass have it: torch's `register_multi_grad_hook`
    without the gradients, which that holds until then."""
    nodes = [get_gradient_edge(tensor).node for tensor in tensors]
    left: dict[int, int] = {}  # by pass

    def came(_: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task not in left:
            left[task] = sum(map(torch._C._will_engine_execute_node, nodes))
        left[task] -= 1
        if not left[task]:
            del left[task]
            act()

    return [tensor.register_hook(came) for tensor in tensors]
