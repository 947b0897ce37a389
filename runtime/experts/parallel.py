"""Expert parallelism: each rank of ep holds a share of every layer's experts, and tokens travel to them.

The layer's own forward runs, as it is written, on the experts that the rank holds and on the rows that chose them:
its parameters are this rank's slices, and attributes that say how many experts there are say how many it holds. So
it has to be a forward that can run on some of the experts, row by row, and whose result is in proportion to the
weights. A trial on two experts and on each of them alone finds that out before anything is changed.

Under tensor parallelism tokens arrive whole, and each rank of tp takes its share of them; what leaves is a partial
sum over tp.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from autoparallel.errors import UserError
from autoparallel.planner.expand.axes import EXPERTS
from autoparallel.planner.strategy.types import Mesh
from autoparallel.runtime.experts.modules import ExpertModule
from autoparallel.runtime.experts.token_exchange import find_route, return_rows, scale_gradient, send_rows
from autoparallel.runtime.experts.token_shares import token_share
from autoparallel.runtime.experts.trial import Place, Trial, counting, holding
from autoparallel.runtime.ranks.mesh import RankMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """A layer and the attributes inside it that say how many experts there are."""

    layer: ExpertModule
    counts: tuple[Place, ...]


def can_share(module: nn.Module, layers: Sequence[ExpertModule] | None, device: torch.device) -> bool:
    """Whether every layer can be shared over ep, by what its forward does on `device`."""
    return layers is not None and len(_sharings(module, layers, "", device)) == len(layers)


def check_experts(
    module: nn.Module, sizes: Mesh, layers: Sequence[ExpertModule] | None, device: torch.device
) -> tuple[Sharing, ...]:
    """How each layer runs on some of its experts. Raises UserError, with the remedy, where with ep > 1 one does not;
    with ep = 1 those are left out. Tried out on `device`."""
    if sizes.ep == 1:
        return _sharings(module, layers or () if sizes.tp * sizes.cp > 1 else (), "", device)
    where = f"mesh.ep = {sizes.ep}"
    assert layers is not None, "runtime.capabilities refuses such strategies"
    if not layers:
        raise UserError(f"{where}: the model has no layer of experts; set mesh.ep to 1")
    odd = [layer for layer in layers if layer.experts % sizes.ep]
    if odd:
        raise UserError(
            f"{where} does not divide the {odd[0].experts} experts of {odd[0].path}; choose one that does"
        )
    return _sharings(module, layers, where, device)


def _sharings(
    module: nn.Module, layers: Sequence[ExpertModule], where: str, device: torch.device
) -> tuple[Sharing, ...]:
    """Those of `layers` that run on some of their experts; with `where`, all of them, or UserError."""
    known: dict[object, tuple[Place, ...] | None] = {}
    found = []
    for layer in layers:
        owner = module.get_submodule(layer.path)
        shapes = tuple((name, owner.get_parameter(name).shape) for name in layer.parameters)
        key = (type(owner), layer.experts, shapes, counting(owner, layer.experts))
        if key not in known:
            counts = Trial(owner, layer, device).counts()
            if counts is None and where:
                raise UserError(
                    f"{where}: {layer.path} ({type(owner).__name__}) does not run on some of its experts alone, row by "
                    "row and in proportion to the weights; set mesh.ep to 1"
                )
            known[key] = counts
        if (own := known[key]) is not None:
            found.append(Sharing(layer=layer, counts=own))
    return tuple(found)


def experts_within(sharings: Sequence[Sharing], stage: nn.Module) -> list[Sharing]:
    """The layers that `stage`, a part of the model, has."""
    held = {path for path, _ in stage.named_modules()}
    return [sharing for sharing in sharings if sharing.layer.path in held]


def share_experts(
    module: nn.Module,
    sharings: Sequence[Sharing],
    mesh: RankMesh,
    *,
    dtype: torch.dtype | None,
    compiled: bool,
) -> list[nn.Module]:
    """Keep only this rank's experts and send tokens to those of others, in place; the layers. Names stay.

    Every rank must hold the same values before, or meta tensors. To be done before tensor parallelism. `dtype` is
    what is computed in, where autocast does not see to it; what is exchanged does not go through a compiler (`compiled`).
    """
    found = []
    for sharing in sharings:
        owner = module.get_submodule(sharing.layer.path)
        axis = mesh.expert_axis(EXPERTS)
        for name in sharing.layer.parameters:
            path, _, own = name.rpartition(".")
            parameter = owner.get_parameter(name)
            share = distribute_tensor(parameter.data, axis, [Shard(0)], src_data_rank=None)
            owner.get_submodule(path)._parameters[own] = nn.Parameter(share, parameter.requires_grad)
        run = _with_exchanges(owner, sharing, mesh, dtype)
        owner.forward = torch.compiler.disable(run) if compiled else run
        found.append(owner)
    return found


def _with_exchanges(
    owner: nn.Module, sharing: Sharing, mesh: RankMesh, dtype: torch.dtype | None
) -> Callable[..., Any]:
    layer, forward, sizes, axis = sharing.layer, owner.forward, mesh.sizes, mesh.expert_axis(EXPERTS)
    tensors = mesh.axis("tp") if sizes.tp > 1 else None
    signature = inspect.signature(forward)
    own = layer.experts // axis.size()

    def own_value(name: str) -> Tensor:
        parameter = owner.get_parameter(name)
        value: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return value if dtype is None else value.to(dtype)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        names = (layer.hidden, layer.index, layer.weights)
        hidden, index, weights = (given.arguments[name] for name in names)
        share = token_share(hidden, tensors, cut=True, gradient=Partial())
        # Gradients of experts are summed over the ranks of ep and averaged over those that hold the same experts;
        # they are to be summed over tp and cp, which share the tokens, and averaged over all other ranks.
        scale = sizes.tp * share.parts / sizes.ep
        mine, chosen, by = (share.take(tensor) for tensor in (hidden, index, weights))
        route = find_route(chosen, layer.experts, axis.get_group())
        rows = send_rows(scale_gradient(mine, 1.0 / scale), route)
        parameters = {name: own_value(name) for name in layer.parameters}
        if len(rows):
            given.arguments |= dict(
                zip(names, (rows, route.expert[:, None], by.new_ones(len(rows), 1)), strict=True)
            )
            with holding(owner, parameters, dict.fromkeys(sharing.counts, own)):
                made = forward(*given.args, **given.kwargs).to(rows.dtype)
        else:  # every parameter gets a gradient, on every rank
            made = rows + sum(value.reshape(-1)[:0].sum() for value in parameters.values())
        return share.give(return_rows(made, by, route, gradient_scale=scale), hidden, Partial())

    return run
