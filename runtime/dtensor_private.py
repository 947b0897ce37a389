"""How DTensor finds what an operator does to its shares: the private names of torch that this takes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding
from torch.utils._pytree import tree_leaves

from autoparallel.runtime.torch_private import outside_tracing


def replicate_without_rule(axis: str) -> None:
    """Let operators for which DTensor has no rule run on whole tensors, on every rank alike: on a mesh of the one axis
    called `axis`, and in backward passes, which nobody else sees to. For the process; idempotent."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    known = propagator.propagate_op_sharding_non_cached
    if getattr(known, "axis", None) == axis:
        return

    def propagate(schema: Any) -> Any:
        try:
            return known(schema)
        except NotImplementedError:
            # What is made of other operators is taken apart by DTensor itself.
            composite = torch._C.DispatchKey.CompositeImplicitAutograd
            is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(schema.op.name(), composite)
            in_backward = torch._C._current_autograd_node() is not None
            if is_composite or not (in_backward or schema.get_mesh_from_args().mesh_dim_names == (axis,)):
                raise
            register_sharding(schema.op)(functools.partial(_replicated, len(schema.op._schema.returns)))
            return known(schema)

    propagate.axis = axis  # type: ignore[attr-defined]
    propagator.propagate_op_sharding_non_cached = propagate  # type: ignore[assignment, method-assign]
    propagator.propagate_op_sharding = type(propagator.propagate_op_sharding)(propagate)


def tell_masks_apart(operator: Any) -> None:
    """Make the cache of DTensor's rules know calls of a backward `operator` by the gradients that are asked for.

    Else a call without some gradient, and one with it, get the layouts of whichever came first (torch 2.13, efficient
    attention with a bias). Idempotent.
    """
    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    kinds = [str(argument.type) for argument in operator._schema.arguments]
    info = known.get(operator, RuntimeSchemaInfo())
    first = min(info.static_argnum, kinds.index("List[bool]"))
    known[operator] = dataclasses.replace(info, static_argnum=first)


def let_views_copy() -> None:
    """Let a view of a DTensor copy this rank's share where that is laid out otherwise than DTensor takes it to be.

    Elementwise operators lay out their result by what they are given: of a share that was cut from a whole tensor on the
    way not always as of the whole. A view that the whole allows then fails on the share (torch 2.13; gradients of gates
    whose heads come before the sequence). For the process; idempotent.
    """
    kind: Any = type(DTensor._op_dispatcher)
    known = getattr(kind, "_dispatch_get_local_results_slow_path", None)
    if known is None or known.__name__ == "with_copies":  # torch before 2.13: as it is
        return

    def with_copies(dispatcher: Any, operator: Any, args: Any, info: Any) -> Any:
        try:
            return known(dispatcher, operator, args, info)
        except RuntimeError:
            if operator not in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
                raise
            info.local_args = tuple(a.contiguous() if isinstance(a, Tensor) else a for a in info.local_args)
            return known(dispatcher, operator, args, info)

    kind._dispatch_get_local_results_slow_path = with_copies


def _replicated(results: int, *args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
    """The one row of a rule by which all tensors are whole."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensorSpec)]
    return [([Replicate()] * results, [Replicate()] * len(given))]


@contextmanager
def unseen_propagation() -> Iterator[None]:
    """While inside, what DTensor runs on whole shapes, to learn what comes of an operator, is seen by no mode: it is no part
    of what a rank computes."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    known = propagator._propagate_tensor_meta_non_cached

    def unseen(schema: Any) -> Any:
        with outside_tracing():
            return known(schema)

    propagator._propagate_tensor_meta_non_cached = unseen
    try:
        yield
    finally:
        propagator._propagate_tensor_meta_non_cached = known
