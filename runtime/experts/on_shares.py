"""Layers of experts without expert parallelism: every rank runs the layer's forward on plain tensors of its own.

Under tensor parallelism these are its shares of each expert: the planner shards experts like an MLP, columns and
then rows, and the layer as a whole leaves a sum over tp. Under context parallelism they are its share of the tokens.
Inside, the forward sorts rows by expert, counts them and calls grouped products, for which DTensor has no rules, or
none for every dtype. A trial with the same shares has shown what the ranks' results are to each other; where it has
shown nothing the layer stays a DTensor computation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from autoparallel.runtime.experts.parallel import Sharing
from autoparallel.runtime.experts.token_exchange import scale_gradient
from autoparallel.runtime.experts.token_shares import token_share
from autoparallel.runtime.experts.trial import Trial, holding
from autoparallel.runtime.ranks.mesh import RankMesh


def run_on_shares(module: nn.Module, sharings: Sequence[Sharing], mesh: RankMesh) -> None:
    """Let layers run on this rank's tokens and on its shares of the parameters (DTensors with tp), in place."""
    known: dict[object, Placement | None] = {}
    for sharing in sharings:
        owner = module.get_submodule(sharing.layer.path)
        held = {name: owner.get_parameter(name) for name in sharing.layer.parameters}
        placements = {
            name: p.placements[0] if isinstance(p, DTensor) else Replicate() for name, p in held.items()
        }
        key = (type(owner), sharing.counts, tuple((n, p.shape, placements[n]) for n, p in held.items()))
        if key not in known:
            known[key] = Trial(owner, sharing.layer, mesh.device).over(
                placements, mesh.sizes.tp, sharing.counts
            )
        result = known[key]
        if result is not None:
            owner.forward = _on_shares(owner, sharing, mesh, result)


def _on_shares(owner: nn.Module, sharing: Sharing, mesh: RankMesh, result: Placement) -> Callable[..., Any]:
    layer, forward = sharing.layer, owner.forward
    signature = inspect.signature(forward)
    tensors = mesh.axis("tp") if mesh.sizes.tp > 1 else None
    # What every rank has whole gets its gradient in parts, unless every rank does all of the work.
    gradient = Replicate() if result.is_replicate() else Partial()

    def own(parameter: DTensor) -> Tensor:
        whole = parameter.placements[0].is_replicate()
        return parameter.to_local(grad_placements=[gradient] if whole else None)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        names = (layer.hidden, layer.index, layer.weights)
        if not any(isinstance(given.arguments[name], DTensor) for name in names):
            return forward(*args, **kwargs)  # plain tensors already, see `islands`
        hidden = given.arguments[layer.hidden]
        share = token_share(hidden, tensors, cut=False, gradient=gradient)
        held = {name: owner.get_parameter(name) for name in layer.parameters}
        values = {name: own(p) if isinstance(p, DTensor) else p for name, p in held.items()}
        # Gradients of parameters are averaged over cp, whose ranks share the tokens: they are to be summed.
        for name in names:
            value = share.take(given.arguments[name])
            differs = value.is_floating_point() and share.parts > 1
            given.arguments[name] = scale_gradient(value, 1.0 / share.parts) if differs else value
        with holding(owner, values, {}):
            made = forward(*given.args, **given.kwargs)
        return share.give(scale_gradient(made, float(share.parts)), hidden, result)

    return run
