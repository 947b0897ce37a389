"""Linear layers whose weights' gradients are put off: the first half of a split backward pass is then an ordinary one.

`split_backward.py` divides any graph, at the price of all of it: what the first half has done with cannot be freed one by
one, so that every activation of a stage stays until its second half. A linear layer that puts its weight's gradient off
keeps the two factors of that product and no more (Zero Bubble, arXiv:2401.10241), autograd frees the rest as it goes, and
where the forward runs again, it does so once. Other weights (norms, embeddings, biases) get their gradients at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

MOST = 0.9  # of the numbers in matrices of a stage, embeddings aside, must be such layers'. Kind: choice


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """A weight's gradient that is still to be computed, of what arrived at the output and of the input; `turned`: [in, out]."""

    weight: GradientEdge
    gradient: Tensor
    input: Tensor
    turned: bool

    def value(self) -> Tensor:
        gradient, input = self.gradient.flatten(0, -2), self.input.flatten(0, -2)
        return input.t() @ gradient if self.turned else gradient.t() @ input


_waiting: list[_Product] | None = None  # of the half that runs now; autograd may run in a thread of its own


class _Linear(torch.autograd.Function):
    """`F.linear`, [..., in] x [out, in] -> [..., out]; `turned`: of a weight [in, out]."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, turned: bool) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.turned = turned
        return F.linear(input, weight.t() if turned else weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (input, weight) = gradients, ctx.saved_tensors
        wants_input, wants_weight, wants_bias, _ = ctx.needs_input_grad
        of_weight = None
        if wants_weight:
            product = _Product(
                weight=get_gradient_edge(weight),
                gradient=gradient.detach(),
                input=input.detach(),
                turned=ctx.turned,
            )
            if _waiting is None:
                of_weight = product.value()
            else:
                _waiting.append(product)
        return (
            gradient @ (weight.t() if ctx.turned else weight) if wants_input else None,
            of_weight,
            gradient.flatten(0, -2).sum(0) if wants_bias else None,
            None,
        )


def _forward(layer: nn.Module, input: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias
    if isinstance(weight, DTensor) or not torch.is_grad_enabled():
        return type(layer).forward(layer, input)  # type: ignore[no-any-return]
    return _Linear.apply(input, weight, bias, _is_turned(layer))  # type: ignore[no-any-return]


def _is_turned(layer: nn.Module) -> bool:
    """Whether it is transformers' `Conv1D`, a linear layer with its weight turned (GPT-2)."""
    return type(layer).__name__.endswith("Conv1D") and hasattr(layer, "nf")


def can_put_off(stage: nn.Module) -> bool:
    """Whether nearly all products with weights of a stage are plain linear layers."""
    layers = {layer.weight for layer in _layers(stage)}
    tables = {module.weight for module in stage.modules() if isinstance(module, nn.Embedding)}
    matrices = [p for p in stage.parameters() if p.requires_grad and p.dim() > 1 and p not in tables]
    own = sum(p.numel() for p in matrices if p in layers)
    return bool(layers) and own >= MOST * sum(p.numel() for p in matrices)


def put_off(stage: nn.Module) -> None:
    """Make the linear layers of a stage put the gradients of their weights off when they are asked to."""
    for layer in _layers(stage):
        layer.forward = MethodType(_forward, layer)


def _layers(stage: nn.Module) -> list[nn.Module]:
    """Linear layers with the usual forward, whose weights nothing else holds."""
    holders = Counter(p for m in stage.modules() for p in m._parameters.values() if p is not None)
    return [
        module
        for module in stage.modules()
        if (
            _is_turned(module)
            or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward)
        )
        and "forward" not in vars(module)
        and holders[module.weight] == 1
    ]


@dataclass(slots=True, kw_only=True)
class PutOff:
    """What is left of a backward pass whose products were put off: `run` adds to `.grad` of the weights."""

    products: list[_Product] = field(default_factory=list)

    def weights(self) -> set[Tensor]:
        """The weights whose gradients are still to come."""
        return {p.weight.node.variable for p in self.products if hasattr(p.weight.node, "variable")}

    def run(self, complete: Callable[[Tensor], None] | None = None) -> None:
        """Gradients of the weights, one after the other from the outputs back; `complete` is told of each weight that has all of
        its gradient."""
        left = Counter(product.weight for product in self.products)
        sums: dict[GradientEdge, Tensor] = {}
        for product in self.products:
            edge, value = product.weight, product.value()
            sums[edge] = value if edge not in sums else sums[edge] + value
            left[edge] -= 1
            if not left[edge]:
                torch.autograd.backward([edge], [sums.pop(edge)])
                if complete is not None and hasattr(edge.node, "variable"):
                    complete(edge.node.variable)
        self.products = []


@contextmanager
def putting_off(half: PutOff) -> Iterator[None]:
    """The first half: a backward pass in here leaves the gradients of products to `half`."""
    global _waiting
    assert _waiting is None, "one half at a time"
    _waiting = half.products
    try:
        yield
    finally:
        _waiting = None


def backward_putting_off(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor | None],
    received: Sequence[Tensor],
) -> tuple[list[Tensor | None], PutOff]:
    """Gradients of `received` (leaves that want one) from the edges of `outputs` back, and what is left of the pass."""
    half = PutOff()
    if outputs:
        with putting_off(half):
            torch.autograd.backward(list(outputs), list(gradients))
    return [t.grad for t in received], half
