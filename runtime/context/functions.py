"""Context parallelism: the user's code computes on the sequence, of which each rank of cp holds a share.

Activations that hold the sequence are DTensors sharded along it (see `values.py`); operators on them follow
DTensor's rules, so whatever the user's code does with them comes out right: a table of positions, a mask or a
shift of the labels that is made inside the model is whole on every rank and cut where it meets the sequence, at no
cost. What is cut of its own accord: the tokens that an embedding looks up, and what enters a repeated block.
Attention and cross entropy run in shares without DTensor's help; what DTensor has no rule for, or none that holds
for every layout, runs on the gathered sequence, on every rank alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autoparallel.planner.capture.heads import MULTI_HEAD, heads_apart
from autoparallel.planner.capture.library_kernels import (
    Place,
    called_whole,
    lookups,
    sequence_dim,
)
from autoparallel.planner.capture.opened import multi_head
from autoparallel.runtime.context.attention import attention, in_shares
from autoparallel.runtime.context.loss import cross_entropy
from autoparallel.runtime.context.products import product
from autoparallel.runtime.context.random_numbers import drawn_apart
from autoparallel.runtime.context.rows import tokens_of_shares
from autoparallel.runtime.context.values import (
    cut,
    of_parts,
    on_mesh,
    onto,
    own_part,
    placed,
    used_by_shares,
    whole,
    whole_alike,
)
from autoparallel.runtime.dtensor_private import replicate_without_rule
from autoparallel.runtime.tensor.dtensor_rules import allow_plain_tensors, register_missing_rules
from autoparallel.runtime.tensor.questions import is_counted_out, is_in_place, to_plain
from autoparallel.runtime.tensor.vocabulary import rows_of_shares
from autoparallel.runtime.torch_private import GROUPED_PRODUCTS

# Along a dim of space DTensor's rule exchanges edges, and only in some layouts; of grouped products it knows those in
# bfloat16, and their rows are not in the order of the sequence.
_GATHERED = frozenset({
    F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, *GROUPED_PRODUCTS,
})  # fmt: skip
# Their indices are those of the whole sequence, which DTensor does not always see to.
_BY_INDEX = frozenset({"index_add", "index_copy", "index_fill", "scatter", "scatter_add", "scatter_reduce"})
_DROPOUT = frozenset({F.dropout, torch.dropout})


class ContextParallel(TorchFunctionMode):
    """Runs functions of tensors of the sequence on its shares; `mesh` has the axis cp first, then tp if there is one. `given`: the
    first two dims of what the module was given."""

    def __init__(self, mesh: DeviceMesh, given: Collection[tuple[int, ...]] = ()) -> None:
        super().__init__()
        self._mesh, self._given = mesh, given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, mesh = kwargs or {}, self._mesh
        if func is tokens_of_shares:
            return self._with_cut_tokens(*args)[0][0]
        if func is F.embedding:
            args, kwargs = self._with_cut_tokens(*args, **kwargs)
            if (rows := self._looked_up(*args, **kwargs)) is not None:
                return rows
        if not any(on_mesh(t, mesh) for t in _tensors((*args, *kwargs.values()))):
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention and in_shares(_first(args, kwargs, "query"), mesh):
            return attention(mesh, *args, **kwargs)
        if func is F.cross_entropy and (loss := cross_entropy(mesh, *args, **kwargs)) is not None:
            return loss
        if (dim := sequence_dim(func, args)) is not None:
            return self._over_sequence(func, dim, args, kwargs)
        if func in _GATHERED or is_counted_out(func, args) or self._writes_elsewhere(func, args, kwargs):
            return self._gathered(func, args, kwargs)
        if (name := getattr(func, "__name__", "").rstrip("_")) in _BY_INDEX:
            return self._by_index(name, func, args, kwargs)
        if func is MULTI_HEAD:
            attend = heads_apart(func, args, kwargs) or functools.partial(multi_head, *args, **kwargs)
            with self:
                return attend()
        if len(args) != 1 or kwargs:
            if mesh.ndim > 1 and (result := product(mesh, func, args, kwargs)) is not None:
                return result
            args, kwargs = tree_map_only(Tensor, self._meeting, (args, kwargs))
        try:
            apart = func in _DROPOUT and self._drops(*args, **kwargs)
            with drawn_apart(mesh.get_local_rank(0), torch.device(mesh.device_type), needed=apart):
                return func(*args, **kwargs)
        except NotImplementedError:  # DTensor has no rule
            return self._gathered(func, args, kwargs)

    def _with_cut_tokens(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The arguments of an embedding, of whose tokens each rank looks up its share. Positions against positions (relative ones) are
        looked up whole: which of the two dims the sequence is cut along, attention says."""
        dim = 1 if input.dim() > 1 else 0
        shape = tuple(input.shape)
        pairs = len(shape) == 2 and shape[0] == shape[1] > 1 and shape not in self._given
        if (
            not pairs
            and not isinstance(input, DTensor)
            and input.dim()
            and input.shape[dim] % self._mesh.size(0) == 0
        ):
            input = cut(input, dim, self._mesh)
        return (input, weight, *args), kwargs

    def _looked_up(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        """Rows for this rank's tokens of an embedding whose vocabulary tensor parallelism shards; None for others."""
        if not isinstance(input, DTensor) or not on_mesh(input, self._mesh) or on_mesh(weight, self._mesh):
            return None
        held = input.placements[0]
        if self._mesh.ndim == 1 or not held.is_shard() or not isinstance(weight, DTensor):
            return None
        given = (own_part(input, held), used_by_shares(weight, self._mesh), *args)
        rows = rows_of_shares(given, kwargs)
        return None if rows is None else of_parts(rows, held, self._mesh)

    def _meeting(self, tensor: Tensor) -> Tensor:
        """A tensor as it is used together with the sequence; plain constants may stay plain."""
        return onto(tensor, self._mesh) if tensor.requires_grad or isinstance(tensor, DTensor) else tensor

    def _writes_elsewhere(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether something of the sequence is written into a tensor that every rank has whole."""
        if not is_in_place(func, kwargs):
            return False
        target = kwargs.get("out", args[0] if args else None)
        return isinstance(target, Tensor) and not on_mesh(target, self._mesh)

    def _by_index(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """What is written to places of the whole sequence; in place, each rank then takes its share of it."""
        made = self._gathered(getattr(Tensor, name), args, kwargs)
        if not is_in_place(func, kwargs):
            return made
        return args[0].copy_(placed(onto(made, self._mesh), args[0].placements[0]))

    def _gathered(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda t: whole(t, self._mesh), (args, kwargs))
        return func(*args, **kwargs)

    def _over_sequence(self, func: Any, dim: int, args: Any, kwargs: Any) -> Any:
        """What goes over the whole sequence, `dim` of its first result, on every rank alike, cut again."""
        args, kwargs = tree_map_only(Tensor, lambda t: to_plain(whole_alike(t, self._mesh)), (args, kwargs))
        made = func(*args, **kwargs)
        results = made if isinstance(made, tuple) else (made,)
        cuts = results[0].shape[dim] % self._mesh.size(0) == 0
        first = cut(results[0], dim, self._mesh) if cuts else self._shared(results[0])
        return (first, *map(self._shared, results[1:])) if isinstance(made, tuple) else first

    def _shared(self, value: Any) -> Any:
        """A result that stays whole, whose gradient is on every rank what it is in the mean."""
        is_used = isinstance(value, Tensor) and value.requires_grad
        return whole(onto(value, self._mesh), self._mesh) if is_used else value

    def _drops(self, input: Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> bool:
        """Whether a dropout draws numbers for shares, which DTensor draws apart itself on GPUs only."""
        shared = on_mesh(input, self._mesh) and not input.placements[0].is_replicate()  # type: ignore[attr-defined]
        return shared and training and p > 0 and self._mesh.device_type == "cpu"


def _tensors(values: Sequence[Any]) -> Iterator[Any]:
    """The arguments, and what is in lists of them."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _first(args: Sequence[Any], kwargs: Any, name: str) -> Any:
    return args[0] if args else kwargs.get(name)


def run_in_shares(module: nn.Module, blocks: Sequence[str], mesh: DeviceMesh) -> None:
    """Let `module` compute on shares of the sequence, in place: names, hooks and class stay.

    By instance-level `forward`s, of the blocks too, so that a block that is recomputed does the same in its
    backward pass. Sets torch's process-wide permission to mix DTensors with plain (replicated) tensors.
    """
    register_missing_rules()
    replicate_without_rule("tp")
    allow_plain_tensors()
    for path in dict.fromkeys(("", *blocks)):
        part = module.get_submodule(path)
        part.forward = _with_mode(part.forward, mesh, lookups(part))
    for path in blocks:
        module.get_submodule(path).register_forward_pre_hook(
            functools.partial(_cut_first, mesh), with_kwargs=True
        )


def _with_mode(forward: Callable[..., Any], mesh: DeviceMesh, places: Sequence[Place]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = {tuple(t.shape[:2]) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        with ContextParallel(mesh, given), called_whole(places):
            return forward(*args, **kwargs)

    return run


def _cut_first(mesh: DeviceMesh, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cut a block's first argument along the sequence, if it is not: (samples, sequence, ...)."""
    if args:
        return (_in_shares(args[0], mesh), *args[1:]), kwargs
    name = next((name for name, value in kwargs.items() if isinstance(value, Tensor)), None)
    return args, kwargs if name is None else {**kwargs, name: _in_shares(kwargs[name], mesh)}


def _in_shares(value: Any, mesh: DeviceMesh) -> Any:
    is_hidden = isinstance(value, Tensor) and value.dim() > 2 and value.is_floating_point()
    if not is_hidden or value.shape[1] % mesh.size(0):
        return value
    held_whole = not on_mesh(value, mesh) or value.placements[0].is_replicate()
    return cut(value, 1, mesh) if held_whole else value
