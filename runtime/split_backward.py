"""A backward pass in two halves: gradients of what a stage received first, those of its weights later.

Method: the graph's nodes are divided into those that lead to what was received and those that do not. The first
half runs the former and notes the gradients that arrive where an edge leaves them towards weights (a product's
node computes either gradient alone). The second half runs only these nodes once more, each for its edges to
weights, and from there down to the weights. No kernel runs twice, and nothing is communicated twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_Edge = tuple[Node, int]


@dataclass(slots=True, kw_only=True)
class _Junction:
    """A node on the way to what was received with edges towards weights, and the gradients that arrived at it."""

    node: Node
    edges: list[_Edge]
    arrived: tuple[Tensor | None, ...] = ()


@dataclass(slots=True, kw_only=True)
class WeightHalf:
    """What is left of a backward pass: `run` adds to `.grad` of the weights."""

    junctions: list[_Junction] = field(default_factory=list)
    roots: list[tuple[GradientEdge, Tensor | None]] = field(default_factory=list)
    weights: Sequence[Tensor] | None = None  # the only ones wanted, where roots lead elsewhere too

    def run(self) -> None:
        """Gradients of the weights, once."""
        pending: dict[GradientEdge, Tensor | None] = dict(self.roots)
        for junction in self.junctions:
            starts = [(k, g) for k, g in enumerate(junction.arrived) if g is not None]
            if not starts:
                continue  # nothing flowed through it
            wanted = [GradientEdge(*edge) for edge in dict.fromkeys(junction.edges)]
            found = torch.autograd.grad(
                [GradientEdge(junction.node, k) for k, _ in starts],
                wanted,
                [g for _, g in starts],
                retain_graph=True,
                allow_unused=True,
            )
            for edge, g in zip(wanted, found, strict=True):
                if g is not None:  # a weight that is used twice: autograd takes each place to start from once
                    before = pending.get(edge)
                    pending[edge] = g if before is None else before + g
        self.junctions, self.roots = [], []
        if pending:
            torch.autograd.backward(list(pending), list(pending.values()), inputs=self.weights)


def backward_input(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], received: Sequence[Tensor]
) -> tuple[list[Tensor | None], WeightHalf]:
    """Gradients of `received` (leaves that want one), and the other half of the pass."""
    edges = [get_gradient_edge(t) for t in outputs]
    targets = {get_gradient_edge(t).node for t in received}
    inward, weighty = _divide([edge.node for edge in edges], targets)
    half = WeightHalf(
        roots=[
            (e, g)
            for e, g in zip(edges, gradients, strict=True)
            if e.node not in inward and e.node in weighty
        ]
    )
    for node in inward:
        leaving = [(m, k) for m, k in node.next_functions if m in weighty and m not in inward]
        if leaving:
            half.junctions.append(_Junction(node=node, edges=leaving))
    if _meet(half.junctions):
        leaves = [m.variable for m in weighty if not m.next_functions and hasattr(m, "variable")]
        return backward_input_recomputed(outputs, gradients, received, leaves)
    handles = [junction.node.register_prehook(_note(junction)) for junction in half.junctions]
    used = [n for n, edge in enumerate(edges) if edge.node in inward]
    found: Sequence[Tensor | None] = [None] * len(received)
    if used and received:
        found = torch.autograd.grad(
            [outputs[n] for n in used], received, [gradients[n] for n in used],
            retain_graph=True, allow_unused=True,
        )  # fmt: skip
    for handle in handles:
        handle.remove()
    return list(found), half


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
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    received: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> tuple[list[Tensor | None], WeightHalf]:
    """As `backward_input`, where the forward pass is run again for either half: the second half is a pass of its
    own, because every junction by itself would run the forward pass again."""
    found: Sequence[Tensor | None] = [None] * len(received)
    if received:
        found = torch.autograd.grad(outputs, received, gradients, retain_graph=True, allow_unused=True)
    roots = [(get_gradient_edge(t), g) for t, g in zip(outputs, gradients, strict=True)]
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
