"""Layers whose weights' gradients are put off: the first half of a split backward pass is then an ordinary one.

`split_backward.py` divides any graph, at the price of all of it: what the first half has done with cannot be freed one by
one, so that every activation of a stage stays until its second half. A linear layer that puts its weight's gradient off
keeps the two factors of that product and no more (Zero Bubble, arXiv:2401.10241), an embedding what arrived and the
indices; autograd frees the rest as it goes, and where the forward runs again, it does so once. The gradients of other
weights (norms, biases), which are small, are made at once, and wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from autoparallel.planner.expand.local_memory import MOST_PUT_OFF
from autoparallel.runtime.context.rows import row_by_row, tokens_of_shares
from autoparallel.runtime.gradients.split_backward import made_for


@dataclass(frozen=True, slots=True, kw_only=True)
class _PutOff:
    """A weight's gradient that is still to be computed, and where it goes."""

    weight: GradientEdge
    compute: Callable[[], Tensor]


_waiting: list[_PutOff] | None = None  # of the half that runs now; autograd may run in a thread of its own


def _now_or_later(weight: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
    if _waiting is None:
        return compute()
    _waiting.append(_PutOff(weight=get_gradient_edge(weight), compute=compute))
    return None


def _for_itself(result: Tensor) -> Tensor:
    """A result that autograd does not take for a view of what nobody else sees: the model's code may write into it."""
    return torch.ops.aten._unsafe_view.default(result, result.shape)  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    """`F.linear`, [..., in] x [out, in] -> [..., out]; `turned`: of a weight [in, out]. `ranks`: what the gradients of weight and bias
    are multiplied by (`runtime/context/rows.py`)."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, turned: bool, ranks: int
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.turned, ctx.ranks = turned, ranks
        return _for_itself(F.linear(input, weight.t() if turned else weight, bias))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (input, weight), turned, ranks = gradients, ctx.saved_tensors, ctx.turned, ctx.ranks
        wants_input, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        rows, columns = gradient.detach(), input.detach()

        def of_weight() -> Tensor:
            left, right = (columns, rows) if turned else (rows, columns)
            return _product(left.flatten(0, -2).t(), right.flatten(0, -2), ranks)

        return (
            gradient @ (weight.t() if turned else weight) if wants_input else None,
            _now_or_later(weight, of_weight) if wants_weight else None,
            gradient.flatten(0, -2).sum(0) * ranks if wants_bias else None,
            None,
            None,
        )


def _product(left: Tensor, right: Tensor, times: int) -> Tensor:
    """`times` the product of two matrices, in the kernel that makes it."""
    if times == 1:
        return left @ right
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=times)


class _Embedding(torch.autograd.Function):
    """`F.embedding` of a dense table [rows, width]; `padding`: the row that gets no gradient, -1 for none; `ranks`: as of `_Linear`."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, padding: int, ranks: int) -> Tensor:
        ctx.save_for_backward(indices, weight)
        ctx.padding, ctx.ranks = padding, ranks
        return _for_itself(torch.ops.aten.embedding.default(weight, indices, padding))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (indices, weight), padding, ranks = gradients, ctx.saved_tensors, ctx.padding, ctx.ranks
        arrived, rows = gradient.detach(), weight.shape[0]

        def of_weight() -> Tensor:
            made = torch.ops.aten.embedding_dense_backward(arrived, indices, rows, padding, False)
            return made if ranks == 1 else made.mul_(ranks)  # type: ignore[no-any-return]

        return None, _now_or_later(weight, of_weight) if ctx.needs_input_grad[1] else None, None, None


def _forward(layer: nn.Module, input: Tensor) -> Tensor:
    result = _putting_off(layer, input)
    return type(layer).forward(layer, input) if result is None else result


def _putting_off(layer: nn.Module, input: Tensor) -> Tensor | None:
    """What the layer returns, with a backward that can put its weight's gradient off; None where it cannot."""
    weight, bias = cast("Tensor", layer.weight), getattr(layer, "bias", None)
    if isinstance(weight, DTensor) or not torch.is_grad_enabled():
        return None
    if isinstance(layer, nn.Embedding):
        padding = -1 if layer.padding_idx is None else layer.padding_idx
        return row_by_row(
            tokens_of_shares(input, weight),
            lambda indices, ranks: _Embedding.apply(indices, weight, padding, ranks),
            columns=0,
        )
    if input.dim() == 1 or torch.is_autocast_enabled(input.device.type):  # whose casts are autograd's
        return None
    turned = _is_turned(layer)
    return row_by_row(
        input,
        lambda rows, ranks: _Linear.apply(rows, weight, bias, turned, ranks),
        columns=1,
    )


def _is_turned(layer: nn.Module) -> bool:
    """Whether it is transformers' `Conv1D`, a linear layer with its weight turned (GPT-2)."""
    return type(layer).__name__.endswith("Conv1D") and hasattr(layer, "nf")


def _is_linear(layer: nn.Module) -> bool:
    return _is_turned(layer) or (isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward)


def _is_table(layer: nn.Module) -> bool:
    return (
        isinstance(layer, nn.Embedding)
        and type(layer).forward is nn.Embedding.forward
        and not (layer.sparse or layer.scale_grad_by_freq or layer.max_norm is not None)
    )


def can_put_off(stage: nn.Module, blocks: Sequence[str] = ()) -> bool:
    """Whether nearly all weights that are matrices are those of plain linear layers and embeddings, some of the former: in each of
    the blocks at these paths, and beside them (as `planner/expand/local_memory.py` asks of their graphs)."""
    layers = _layers(stage)
    own = {layer.weight for layer in layers}
    parts = [set(stage.get_submodule(path).parameters()) for path in blocks]
    parts.append(set(stage.parameters()).difference(*parts))
    return any(map(_is_linear, layers)) and all(_are_mostly(part, own) for part in parts)


def _are_mostly(parameters: Collection[Tensor], own: Collection[Any]) -> bool:
    """Whether nearly all numbers in the matrices among them are in those that are `own`."""
    matrices = [p for p in parameters if p.requires_grad and p.dim() > 1]
    return sum(p.numel() for p in matrices if p in own) >= MOST_PUT_OFF * sum(p.numel() for p in matrices)


def put_off(stage: nn.Module) -> None:
    """Make the layers of a stage put the gradients of their weights off when they are asked to."""
    for layer in _layers(stage):
        layer.forward = MethodType(_forward, layer)


def _layers(stage: nn.Module) -> list[nn.Module]:
    """Linear layers and embeddings with the usual forward, whose weights nothing else holds."""
    holders: Counter[nn.Parameter | None] = Counter(
        p for m in stage.modules() for p in m._parameters.values() if p is not None
    )
    return [
        module
        for module in stage.modules()
        if (_is_linear(module) or _is_table(module))
        and "forward" not in vars(module)
        # Not `module.weight`: to read what a parametrization makes may change its buffers (spectral norm).
        and holders[module._parameters.get("weight")] == 1
    ]


@dataclass(slots=True, kw_only=True)
class PutOff:
    """What is left of a backward pass whose weights' gradients were put off: `run` adds to `.grad` of the weights."""

    waiting: list[_PutOff] = field(default_factory=list)

    def run(self, complete: Callable[[Tensor], None] | None = None) -> None:
        """Gradients of the weights: those that are made already, then one after the other from the outputs back. `complete` is told
        of each weight that has all of its gradient."""
        places = Counter(one.weight for one in self.waiting)
        parts: dict[GradientEdge, list[Callable[[], Tensor]]] = {}
        waiting, self.waiting = self.waiting[::-1], []
        while waiting:
            one = waiting.pop()
            own = parts.setdefault(one.weight, [])
            own.append(one.compute if places[one.weight] == 1 else partial(_given, one.compute()))
            if len(own) == places[one.weight]:
                edge, make = one.weight, partial(_sum_of, parts.pop(one.weight))
                del one, own
                made_for(edge, make)
                if complete is not None and hasattr(edge.node, "variable"):
                    complete(edge.node.variable)


def _sum_of(parts: list[Callable[[], Tensor]]) -> Tensor:
    """Of all parts, which are gone then."""
    found = parts.pop()()
    while parts:
        found = found + parts.pop()()
    return found


def _differentiate(
    outputs: Sequence[Any], inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    return torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)


def backward_putting_off(
    outputs: Sequence[Any],
    gradients: Sequence[Tensor | None],
    received: Sequence[Tensor],
    weights: Sequence[Tensor],
    differentiate: Callable[..., Sequence[Tensor | None]] = _differentiate,
) -> tuple[list[Tensor | None], PutOff]:
    """Gradients of `received` (leaves that want one) from `outputs` (tensors or edges) back, and what is left of the pass: those
    of `weights`. `differentiate(outputs, inputs, gradients)`: torch's own, or a stand-in."""
    global _waiting
    half = PutOff()
    if not outputs:
        return [None] * len(received), half
    assert _waiting is None, "one half at a time"
    _waiting = half.waiting
    try:
        found = differentiate(outputs, [*received, *weights], gradients)
    finally:
        _waiting = None
    made = zip(weights, found[len(received) :], strict=True)
    # These come first: after all products they would keep every unit of FSDP2 with a norm, and its gradients, waiting to the end.
    half.waiting[:0] = [
        _PutOff(weight=get_gradient_edge(w), compute=partial(_given, g)) for w, g in made if g is not None
    ]
    return list(found[: len(received)]), half


def _given(gradient: Tensor) -> Tensor:
    return gradient
