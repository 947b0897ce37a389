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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.functional import pad

from autoparallel.errors import UserError
from autoparallel.planner.expand.axes import EXPERTS
from autoparallel.planner.strategy.types import Mesh
from autoparallel.runtime.expert_modules import ExpertModule
from autoparallel.runtime.mesh import RankMesh
from autoparallel.runtime.token_exchange import find_route, return_rows, scale_gradient, send_rows

Place = tuple[str, str]  # path of a module inside the layer ("" the layer itself), name of an attribute
_TRIAL_TOKENS, _TRIAL_EXPERTS = 3, 2
# Of what a trial returns, how far two ways to compute it may be apart. Kind: formula, float32 products of random
# numbers agree to about 1e-5; results that differ at all differ by about 1.
_TRIAL_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """A layer and the attributes inside it that say how many experts there are."""

    layer: ExpertModule
    counts: tuple[Place, ...]


def can_share(module: nn.Module, layers: Sequence[ExpertModule] | None) -> bool:
    """Whether every layer can be shared over ep, by what its forward does."""
    try:
        _sharings(module, layers or (), "")
    except UserError:
        return False
    return layers is not None


def check_experts(
    module: nn.Module, sizes: Mesh, layers: Sequence[ExpertModule] | None
) -> tuple[Sharing, ...]:
    """How each layer is shared over ep; () with ep = 1. Raises UserError, with the remedy, where one cannot be."""
    if sizes.ep == 1:
        return ()
    where = f"mesh.ep = {sizes.ep}"
    if layers is None:
        raise UserError(
            f"{where}: a layer of experts is not called with activations, the experts chosen and their weights, which "
            "the runtime needs to send tokens to them; set mesh.ep to 1"
        )
    if not layers:
        raise UserError(f"{where}: the model has no layer of experts; set mesh.ep to 1")
    odd = [layer for layer in layers if layer.experts % sizes.ep]
    if odd:
        raise UserError(
            f"{where} does not divide the {odd[0].experts} experts of {odd[0].path}; choose one that does"
        )
    return _sharings(module, layers, where)


def _sharings(module: nn.Module, layers: Sequence[ExpertModule], where: str) -> tuple[Sharing, ...]:
    known: dict[object, tuple[Place, ...]] = {}
    found = []
    for layer in layers:
        owner = module.get_submodule(layer.path)
        shapes = tuple((name, owner.get_parameter(name).shape) for name in layer.parameters)
        key = (type(owner), layer.experts, shapes, _counting(owner, layer.experts))
        if key not in known:
            counts = _tried(owner, layer)
            if counts is None:
                raise UserError(
                    f"{where}: {layer.path} ({type(owner).__name__}) does not run on some of its experts alone, row by "
                    "row and in proportion to the weights; set mesh.ep to 1"
                )
            known[key] = counts
        found.append(Sharing(layer=layer, counts=known[key]))
    return tuple(found)


def _counting(owner: nn.Module, experts: int) -> tuple[Place, ...]:
    """Attributes that have the number of experts as their value."""
    return tuple(
        (path, name)
        for path, inner in owner.named_modules()
        for name, value in vars(inner).items()
        if type(value) is int and value == experts
    )


def _tried(owner: nn.Module, layer: ExpertModule) -> tuple[Place, ...] | None:
    """The attributes that have to follow the number of experts held; None where no choice of them is right."""
    candidates = _counting(owner, layer.experts)
    for size in range(len(candidates), -1, -1):
        for counts in combinations(candidates, size):
            if _runs_in_parts(owner, layer, counts):
                return counts
    return None


@torch.no_grad()
def _runs_in_parts(owner: nn.Module, layer: ExpertModule, counts: tuple[Place, ...]) -> bool:
    """Whether two experts give what each of them gives alone, weighted and summed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    numbers = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers).to(device)

    def of(held: slice, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        own = {name: value[held] for name, value in values.items()}
        with _holding(owner, own, dict.fromkeys(counts, held.stop - held.start)):
            found: Tensor = owner.forward(
                **{layer.hidden: hidden, layer.index: index, layer.weights: weights}
            )
        return found

    values = {
        name: drawn(_TRIAL_EXPERTS, *owner.get_parameter(name).shape[1:]) / owner.get_parameter(name).shape[-1] ** 0.5
        for name in layer.parameters
    }  # fmt: skip
    hidden, weights = drawn(_TRIAL_TOKENS, layer.width), drawn(_TRIAL_TOKENS, _TRIAL_EXPERTS).abs()
    index = torch.arange(_TRIAL_EXPERTS, device=device).repeat(_TRIAL_TOKENS, 1)
    alone, first = weights.new_ones(_TRIAL_TOKENS, 1), index[:, :1] * 0
    with _evaluating(owner):
        try:
            whole = of(slice(0, _TRIAL_EXPERTS), hidden, index, weights)
            parts = [of(slice(e, e + 1), hidden, first, alone) for e in range(_TRIAL_EXPERTS)]
        except Exception:  # whatever a forward of the user's says to being run like this
            return False
    if any(made.shape != hidden.shape or not bool(made.any()) for made in (whole, *parts)):
        return False
    wanted = sum(weights[:, e, None] * part for e, part in enumerate(parts))
    return bool((whole - wanted).norm() <= _TRIAL_TOLERANCE * whole.norm())


@contextmanager
def _evaluating(owner: nn.Module) -> Iterator[None]:
    modes = {inner: inner.training for inner in owner.modules()}
    owner.eval()
    try:
        yield
    finally:
        for inner, training in modes.items():
            inner.training = training


@contextmanager
def _holding(owner: nn.Module, values: Mapping[str, Tensor], counts: Mapping[Place, int]) -> Iterator[None]:
    """Inside, the layer's parameters are these tensors and these attributes have these values."""
    before: list[tuple[dict[str, Any], str, Any]] = []

    def put(held: dict[str, Any], name: str, value: Any) -> None:
        before.append((held, name, held[name]))
        held[name] = value

    try:
        for name, value in values.items():
            path, _, own = name.rpartition(".")
            put(owner.get_submodule(path)._parameters, own, value)
        for (path, name), count in counts.items():
            put(vars(owner.get_submodule(path)), name, count)
        yield
    finally:
        for held, name, value in reversed(before):
            held[name] = value


def experts_within(sharings: Sequence[Sharing], stage: nn.Module) -> list[Sharing]:
    """The layers that `stage`, a part of the model, has."""
    held = {path for path, _ in stage.named_modules()}
    return [sharing for sharing in sharings if sharing.layer.path in held]


def share_experts(
    module: nn.Module, sharings: Sequence[Sharing], mesh: RankMesh, *, dtype: torch.dtype, compiled: bool
) -> list[nn.Module]:
    """Keep only this rank's experts and send tokens to those of others, in place; the layers. Names stay.

    Every rank must hold the same values before, or meta tensors. To be done before tensor parallelism. `dtype` is
    what is computed in; what is exchanged does not go through a compiler (`compiled`).
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
    owner: nn.Module, sharing: Sharing, mesh: RankMesh, dtype: torch.dtype
) -> Callable[..., Any]:
    layer, forward, sizes, axis = sharing.layer, owner.forward, mesh.sizes, mesh.expert_axis(EXPERTS)
    tensors = mesh.axis("tp") if sizes.tp > 1 else None
    signature = inspect.signature(forward)
    own = layer.experts // axis.size()
    # Gradients of experts are summed over the ranks of ep and averaged over those that hold the same experts; they
    # are to be summed over tp and averaged over all other ranks.
    scale = sizes.tp / sizes.ep

    def own_value(name: str) -> Tensor:
        parameter = owner.get_parameter(name)
        value: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return value.to(dtype) if sizes.dp_shard > 1 else value  # elsewhere autocast sees to it

    def run(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        names = (layer.hidden, layer.index, layer.weights)
        hidden, index, weights = (given.arguments[name] for name in names)
        share = _Share.of(hidden, tensors)
        mine, chosen, by = (share.take(tensor) for tensor in (hidden, index, weights))
        route = find_route(chosen, layer.experts, axis.get_group())
        rows = send_rows(scale_gradient(mine, 1.0 / scale), route)
        parameters = {name: own_value(name) for name in layer.parameters}
        if len(rows):
            given.arguments |= dict(
                zip(names, (rows, route.expert[:, None], by.new_ones(len(rows), 1)), strict=True)
            )
            with _holding(owner, parameters, dict.fromkeys(sharing.counts, own)):
                made = forward(*given.args, **given.kwargs)
        else:  # every parameter gets a gradient, on every rank
            made = rows + sum(value.reshape(-1)[:0].sum() for value in parameters.values())
        return share.give(return_rows(made, by, route, gradient_scale=scale), hidden)

    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """This rank's share of tokens that all ranks of tp hold alike: `start` to `stop` of `tokens`."""

    tokens: int
    start: int
    stop: int
    mesh: DeviceMesh | None

    @staticmethod
    def of(hidden: Tensor, mesh: DeviceMesh | None) -> _Share:
        tokens = hidden.shape[:-1].numel()
        rank, ranks = (mesh.get_local_rank(), mesh.size()) if mesh is not None else (0, 1)
        step = -(-tokens // ranks)
        start = min(rank * step, tokens)
        return _Share(tokens=tokens, start=start, stop=min(start + step, tokens), mesh=mesh)

    def take(self, tensor: Tensor) -> Tensor:
        """This rank's tokens of `tensor`, as a matrix; gradients of the whole are sums over tp."""
        if self.mesh is not None:
            spread = _spread(tensor, self.mesh)
            tensor = spread.to_local(grad_placements=[Partial()] if tensor.is_floating_point() else None)
        return tensor.reshape(self.tokens, -1)[self.start : self.stop]

    def give(self, made: Tensor, like: Tensor) -> Tensor:
        """What the tokens get, for the rest of the model: with tp a partial sum, where it computes on DTensors."""
        if self.mesh is None:
            return made if made.shape == like.shape else made.view(like.shape)
        rows = pad(made, (0, 0, self.start, self.tokens - self.stop)).view(like.shape)
        whole = DTensor.from_local(rows, self.mesh, [Partial()], run_check=False)
        if isinstance(like, DTensor):
            return whole
        return whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])


def _spread(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=[Replicate()])
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
