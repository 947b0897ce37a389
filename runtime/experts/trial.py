"""Trials of layers of experts: what their forward does, found out on two experts with numbers of our own.

A layer may run on some of its experts, and on a share of each, if the parts give what the whole gives. That is
nothing that code can be asked; but it can be tried, and the values of its parameters do not matter: they may be on
the meta device.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autoparallel.runtime.experts.modules import ExpertModule
from autoparallel.runtime.torch_private import parts_of

Place = tuple[str, str]  # path of a module inside the layer ("" the layer itself), name of an attribute
_TOKENS, _EXPERTS = 3, 2
# Of what a trial returns, how far two ways to compute it may be apart. Kind: formula, products of random numbers agree
# to about 1e-5 in float32, to 1e-3 where a GPU multiplies them in TF32 and to 5e-3 where it does in bfloat16; results
# that differ at all differ by about 1.
_TOLERANCE = 2e-2


def counting(owner: nn.Module, experts: int) -> tuple[Place, ...]:
    """Attributes that have the number of experts as their value."""
    return tuple(
        (path, name)
        for path, inner in owner.named_modules()
        for name, value in vars(inner).items()
        if type(value) is int and value == experts
    )


class Trial:
    """Runs the forward of the layer `owner` on two experts on `device`, without hooks."""

    def __init__(self, owner: nn.Module, layer: ExpertModule, device: torch.device) -> None:
        self._owner, self._layer = owner, layer
        numbers = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=numbers).to(device)

        shapes = {name: owner.get_parameter(name).shape for name in layer.parameters}
        self._values = {n: drawn(_EXPERTS, *shape[1:]) / shape[-1] ** 0.5 for n, shape in shapes.items()}
        self._hidden, self._weights = drawn(_TOKENS, layer.width), drawn(_TOKENS, _EXPERTS).abs()
        self._index = torch.arange(_EXPERTS, device=device).repeat(_TOKENS, 1)
        buffers = dict(owner.named_buffers())
        self._buffers = {
            name: b.to(device) for name, b in buffers.items() if not b.is_meta and b.device != device
        }

    def counts(self) -> tuple[Place, ...] | None:
        """The attributes that have to follow the number of experts held; None where no choice of them is right."""
        candidates = counting(self._owner, self._layer.experts)
        for size in range(len(candidates), -1, -1):
            for counts in combinations(candidates, size):
                if self._runs_by_expert(counts):
                    return counts
        return None

    def _runs_by_expert(self, counts: tuple[Place, ...]) -> bool:
        """Whether two experts give what each of them gives alone, weighted and summed."""
        whole = self._run(self._values, counts, self._index, self._weights)
        alone, first = self._weights.new_ones(_TOKENS, 1), self._index[:, :1] * 0
        wanted = torch.zeros_like(self._hidden)
        for expert in range(_EXPERTS):
            own = {name: value[expert : expert + 1] for name, value in self._values.items()}
            part = self._run(own, counts, first, alone)
            if part is None or part.shape != wanted.shape or not bool(part.any()):
                return False
            wanted += self._weights[:, expert, None] * part
        return whole is not None and _same(whole, wanted)

    def over(
        self, placements: Mapping[str, Placement], ranks: int, counts: tuple[Place, ...]
    ) -> Placement | None:
        """How the result is laid out over `ranks` of which each runs on its shares of the parameters; None if not at
        all."""
        whole = self._run(self._values, counts, self._index, self._weights)
        shares = [
            {name: _share(value, placements[name], ranks, rank) for name, value in self._values.items()}
            for rank in range(ranks)
        ]
        parts = [self._run(share, counts, self._index, self._weights) for share in shares]
        if whole is None or any(part is None for part in parts):
            return None
        made = [part for part in parts if part is not None]
        if all(_same(part, whole) for part in made):
            return Replicate()
        if all(part.shape == whole.shape for part in made) and _same(torch.stack(made).sum(dim=0), whole):
            return Partial()
        return None

    @torch.no_grad()
    def _run(
        self, values: Mapping[str, Tensor], counts: tuple[Place, ...], index: Tensor, weights: Tensor
    ) -> Tensor | None:
        """What the forward returns on these values of the parameters; None if it does not run on them."""
        layer, held = self._layer, len(next(iter(values.values())))
        arguments = {layer.hidden: self._hidden, layer.index: index, layer.weights: weights}
        there = {**values, **self._buffers}
        with _evaluating(self._owner), holding(self._owner, there, dict.fromkeys(counts, held)):
            try:  # by place: a decorator may say other names than what it decorates takes
                given = inspect.signature(self._owner.forward).bind(**arguments)
                found: object = self._owner.forward(*given.args, **given.kwargs)
            except Exception:  # whatever a forward of the user's says to being run like this
                return None
        return found if isinstance(found, Tensor) else None


def _same(made: Tensor, wanted: Tensor) -> bool:
    if made.shape != wanted.shape:
        return False
    return bool((made - wanted).norm() <= _TOLERANCE * wanted.norm())


def _share(value: Tensor, placement: Placement, ranks: int, rank: int) -> Tensor:
    share = value
    if (parts := parts_of(placement)) is not None:
        dim, count = parts
        share = value.unflatten(dim, (count, -1)).chunk(ranks, dim + 1)[rank].flatten(dim, dim + 1)
    elif isinstance(placement, Shard):
        share = value.chunk(ranks, placement.dim)[rank]
    return share.contiguous()


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
def holding(owner: nn.Module, values: Mapping[str, Tensor], counts: Mapping[Place, int]) -> Iterator[None]:
    """Inside, the layer's parameters and buffers are these tensors and these attributes have these values."""
    before: list[tuple[dict[str, Any], str, Any]] = []

    def put(held: dict[str, Any], name: str, value: Any) -> None:
        before.append((held, name, held[name]))
        held[name] = value

    try:
        for name, value in values.items():
            path, _, own = name.rpartition(".")
            part = owner.get_submodule(path)
            put(part._parameters if own in part._parameters else part._buffers, own, value)
        for (path, name), count in counts.items():
            put(vars(owner.get_submodule(path)), name, count)
        yield
    finally:
        for held, name, value in reversed(before):
            held[name] = value
