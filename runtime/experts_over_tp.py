"""Layers of experts under tensor parallelism alone: every rank runs the layer's forward on its share of each expert.

The planner shards the experts like an MLP, columns and then rows, and the layer as a whole leaves a sum over tp.
Inside, the forward sorts rows by expert, counts them and calls grouped products, for which DTensor has no rules, or
none for every dtype; so it runs on this rank's tensors, where a trial with the same shares has shown what the ranks'
results are to each other. Where it has shown nothing the layer stays a DTensor computation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_map_only

from autoparallel.runtime.expert_trial import Trial, holding
from autoparallel.runtime.experts import Sharing, spread


def run_on_shares(module: nn.Module, sharings: Sequence[Sharing], mesh: DeviceMesh) -> None:
    """Let layers whose parameters are DTensors on `mesh` run on this rank's shares of them, in place."""
    known: dict[object, Placement | None] = {}
    for sharing in sharings:
        owner = module.get_submodule(sharing.layer.path)
        held = {name: owner.get_parameter(name) for name in sharing.layer.parameters}
        placements = {name: p.placements[0] for name, p in held.items() if isinstance(p, DTensor)}
        if len(placements) < len(held):
            continue
        key = (type(owner), sharing.counts, tuple((n, p.shape, placements[n]) for n, p in held.items()))
        if key not in known:
            known[key] = Trial(owner, sharing.layer).over(placements, mesh.size(), sharing.counts)
        result = known[key]
        if result is not None:
            owner.forward = _on_shares(owner, sharing, mesh, result)


def _on_shares(owner: nn.Module, sharing: Sharing, mesh: DeviceMesh, result: Placement) -> Callable[..., Any]:
    forward = owner.forward
    # What every rank has whole gets its gradient in parts, unless every rank does all of the work.
    gradient = Replicate() if result.is_replicate() else Partial()

    def mine(tensor: Tensor) -> Tensor:
        part = spread(tensor, mesh)
        return part.to_local(grad_placements=[gradient] if part.is_floating_point() else None)

    def own(parameter: DTensor) -> Tensor:
        whole = parameter.placements[0].is_replicate()
        return parameter.to_local(grad_placements=[gradient] if whole else None)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        held = {name: owner.get_parameter(name) for name in sharing.layer.parameters}
        shares = {name: own(parameter) for name, parameter in held.items() if isinstance(parameter, DTensor)}
        if not shares:  # the layer runs on plain tensors already, see `islands`
            return forward(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, mine, (args, kwargs))
        with holding(owner, shares, {}):
            made = forward(*args, **kwargs)
        return DTensor.from_local(made, mesh, [result], run_check=False)

    return run
