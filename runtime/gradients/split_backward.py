"""A backward pass in two halves: gradients of what a stage received first, those of its weights later.

Method: the graph's nodes are divided into those that lead to what was received and those that do not. The first
half runs the former and notes the gradients that arrive where an edge leaves them towards weights (a product's
node computes either gradient alone). The second half runs only these nodes once more, each for its edges to
weights, and from there down to the weights. No kernel runs twice, and nothing is communicated twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.tensor import DTensor

_Edge = tuple[Node, int]


class _Made(torch.autograd.Function):
    """Nothing, whose gradient of `weight` is what `make` computes: made on the way back, so that autograd takes it as it is where
    there is no sum yet. Of what Python holds it makes a copy."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, make: Callable[[], Tensor]) -> Tensor:
        ctx.make = make
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        make, ctx.make = ctx.make, None
        return make(), None


def made_for(edge: GradientEdge, make: Callable[[], Tensor]) -> None:
    """Add what `make` makes to the gradient of a weight, or of what the weight is made of."""
    if hasattr(edge.node, "variable"):
        with torch.enable_grad():
            made = _Made.apply(edge.node.variable, make)
        torch.autograd.backward([made])
    else:
        torch.autograd.backward([edge], [make()])


def add_to_gradient(edge: GradientEdge, gradient: Tensor | None) -> None:
    """As `made_for`, of a gradient that is there, and that nobody else holds; None: the edge begins at a loss."""
    if gradient is None or isinstance(gradient, DTensor):
        torch.autograd.backward([edge], [gradient])
        return
    held = [gradient]
    del gradient
    made_for(edge, held.pop)


@dataclass(slots=True, kw_only=True)
class _Junction:
    """A node on the way to what was received with edges towards weights, and the gradients that arrived at it."""

    node: Node
    edges: list[_Edge]
    arrived: tuple[Tensor | None, ...] = ()

    def places(self) -> list[GradientEdge]:
        """Where gradients leave it towards weights."""
        return [GradientEdge(*edge) for edge in dict.fromkeys(self.edges)]

    def gradients(self) -> dict[GradientEdge, Tensor]:
        """What leaves it there; none if nothing flowed through it."""
        starts = [(k, g) for k, g in enumerate(self.arrived) if g is not None]
        if not starts:
            return {}
        found = torch.autograd.grad(
            [GradientEdge(self.node, k) for k, _ in starts], self.places(), [g for _, g in starts],
            retain_graph=True, allow_unused=True,
        )  # fmt: skip
        return {edge: g for edge, g in zip(self.places(), found, strict=True) if g is not None}


@dataclass(slots=True, kw_only=True)
class WeightHalf:
    """What is left of a backward pass: `run` adds to `.grad` of the weights."""

    junctions: list[_Junction] = field(default_factory=list)
    roots: list[tuple[GradientEdge, Tensor | None]] = field(default_factory=list)
    weights: Sequence[Tensor] | None = None  # the only ones wanted, where roots lead elsewhere too
    accumulate: Callable[..., None] = torch.autograd.backward  # or a stand-in

    def run(
        self,
        complete: Callable[[Tensor], None] | None = None,
        begin: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        """Gradients of the weights, once: one after the other from the outputs back, or, of a pass of its own, all in it.
        `complete` is told of each weight that has all of its gradient, `begin` of those that the next kernels read."""
        gradients: dict[GradientEdge, Tensor | None] = dict(self.roots)
        edges = [*gradients, *(edge for junction in self.junctions for edge in junction.places())]
        families = _families(edges) if self.weights is None else [edges]
        home = {edge: number for number, family in enumerate(families) for edge in family}
        left = Counter(home[edge] for junction in self.junctions for edge in junction.places())

        def deliver(number: int) -> None:
            own = {edge: gradients.pop(edge) for edge in families[number] if edge in gradients}
            if own and begin is not None:
                begin(_leaves(families[number]))
            if len(own) == 1 and self.weights is None:
                add_to_gradient(*own.popitem())
            elif own:
                self.accumulate(list(own), list(own.values()), inputs=self.weights)
            if complete is not None:
                for weight in self.weights or _leaves(families[number]):
                    complete(weight)

        for number in range(len(families)):
            if not left[number]:
                deliver(number)
        while self.junctions:
            junction = self.junctions.pop()
            if begin is not None:
                begin(_leaves(junction.places()))
            for edge, g in junction.gradients().items():
                # A weight that is used twice: autograd takes each place to start from once.
                before = gradients.get(edge)
                gradients[edge] = g if before is None else before + g
                del g, before
            for edge in junction.places():
                left[home[edge]] -= 1
                if not left[home[edge]]:
                    deliver(home[edge])
        self.roots = []


def _families(edges: Sequence[GradientEdge]) -> list[list[GradientEdge]]:
    """The edges, together where they lead to the same weights: those nodes run once, for all that arrives."""
    found: dict[int, list[GradientEdge]] = {}
    home: dict[Node, int] = {}
    for number, edge in enumerate(dict.fromkeys(edges)):
        below = list(_reached(edge.node))
        found[number] = [edge]
        for met in {home[node]: None for node in below if node in home}:
            moved = found.pop(met)
            found[number] += moved
            home.update({node: number for node, own in home.items() if own == met})
        home.update(dict.fromkeys(below, number))
    return list(found.values())


def _leaves(edges: Sequence[GradientEdge]) -> list[Tensor]:
    """The weights that the edges lead to."""
    nodes = dict.fromkeys(node for edge in edges for node in _reached(edge.node))
    return [node.variable for node in nodes if hasattr(node, "variable")]


def backward_input(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor | None],
    received: Sequence[Tensor],
    differentiate: Callable[..., Sequence[Tensor | None]] | None = None,
) -> tuple[list[Tensor | None], WeightHalf]:
    """Gradients of `received` (leaves that want one), and the other half of the pass from the edges of `outputs` back.
    `differentiate(outputs, inputs, gradients)`: a stand-in for torch's own."""
    differentiate = differentiate or _differentiate
    targets = {get_gradient_edge(t).node for t in received}
    inward, weighty = _divide([edge.node for edge in outputs], targets)
    half = WeightHalf(
        roots=[
            (e, g)
            for e, g in zip(outputs, gradients, strict=True)
            if e.node not in inward and e.node in weighty
        ]
    )
    for node in inward:
        leaving = [(m, k) for m, k in node.next_functions if m in weighty and m not in inward]
        if leaving:
            half.junctions.append(_Junction(node=node, edges=leaving))
    if _meet(half.junctions):
        leaves = [m.variable for m in weighty if not m.next_functions and hasattr(m, "variable")]
        return backward_input_recomputed(outputs, gradients, received, leaves, differentiate)
    handles = [junction.node.register_prehook(_note(junction)) for junction in half.junctions]
    used = [n for n, edge in enumerate(outputs) if edge.node in inward]
    found: Sequence[Tensor | None] = [None] * len(received)
    if used and received:
        found = differentiate([outputs[n] for n in used], received, [gradients[n] for n in used])
    for handle in handles:
        handle.remove()
    return list(found), half


_differentiate = partial(torch.autograd.grad, retain_graph=True, allow_unused=True)


def _meet(junctions: Sequence[_Junction]) -> bool:
    """Whether an edge of one junction can be reached by way of another: autograd, asked for the gradient at that
    edge, would add what arrives on both ways. So it is where a bias is used twice."""
    below = [[set(_reached(m)) for m, _ in junction.edges] for junction in junctions]
    held: Counter[Node] = Counter()
    for own in below:
        held.update(set().union(*own))
    return any(held[m] > 1 for junction in junctions for m, _ in junction.edges)


def _reached(node: Node) -> Iterator[Node]:
    stack, seen = [node], {node}
    while stack:
        yield (top := stack.pop())
        new = [m for m, _ in top.next_functions if m is not None and m not in seen]
        seen.update(new)
        stack += new


def backward_input_recomputed(
    outputs: Sequence[GradientEdge],
    gradients: Sequence[Tensor | None],
    received: Sequence[Tensor],
    weights: Sequence[Tensor],
    differentiate: Callable[..., Sequence[Tensor | None]] | None = None,
) -> tuple[list[Tensor | None], WeightHalf]:
    """As `backward_input`, where the forward pass is run again for either half: the second half is a pass of its
    own, because every junction by itself would run the forward pass again. `differentiate(outputs, inputs, gradients)`:
    a stand-in for torch's own."""
    differentiate = differentiate or _differentiate
    found: Sequence[Tensor | None] = [None] * len(received)
    if received:
        found = differentiate(outputs, received, gradients)
    roots = list(zip(outputs, gradients, strict=True))
    return list(found), WeightHalf(roots=roots if weights else [], weights=weights)


def _note(junction: _Junction) -> Any:
    def hook(arrived: tuple[Tensor | None, ...]) -> None:
        junction.arrived = arrived

    return hook


def _divide(roots: Sequence[Node], targets: set[Node]) -> tuple[dict[Node, None], set[Node]]:
    """Nodes from which a target can be reached, in a fixed order, and those from which another leaf can be."""
    inward: dict[Node, None] = {}
    weighty: set[Node] = set()
    done: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, left = stack.pop()
        children = [m for m, _ in node.next_functions if m is not None]
        if not left:
            if node not in done:
                done.add(node)
                stack.append((node, True))
                stack += [(m, False) for m in children if m not in done]
            continue
        if node in targets or any(m in inward for m in children):
            inward[node] = None
        if (not children and node not in targets) or any(m in weighty for m in children):
            weighty.add(node)
    return inward, weighty
