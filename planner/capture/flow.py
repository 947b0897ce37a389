"""What passes between the links of the chain: which make and read each tensor, what crosses their boundaries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autoparallel.planner.capture.links import Link
from autoparallel.planner.capture.nodes import Role, outputs, tensor_inputs, tensor_outputs

Calls = Mapping[Link, Sequence[fx.Node]]
_READ = frozenset(
    {Role.CALL, Role.RESULT, Role.INPUT}
)  # what a link may get from outside, held tensors aside


@dataclass(frozen=True, slots=True)
class Flow:
    """Which link makes and which links use each tensor, by their positions; what the module returns."""

    maker: dict[fx.Node, int]
    users: dict[fx.Node, tuple[int, ...]]
    returned: frozenset[fx.Node]

    def leaves(self, node: fx.Node, position: int) -> bool:
        """Whether a tensor is used outside the link at `position`."""
        return node in self.returned or any(user != position for user in self.users.get(node, ()))


def flow_of(graph: fx.Graph, by_link: Calls) -> Flow:
    """The flow between the links of a graph."""
    maker: dict[fx.Node, int] = {}
    users: dict[fx.Node, list[int]] = defaultdict(list)
    for position, group in enumerate(by_link.values()):
        for call in group:
            for node in tensor_inputs(call):
                if position not in users[node]:
                    users[node].append(position)
            for node in tensor_outputs(call):
                maker[node] = position
    returned = frozenset(outputs(graph))
    return Flow(maker, {node: tuple(where) for node, where in users.items()}, returned)


def boundary(
    links: Sequence[Link], by_link: Calls, flow: Flow, position: int
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """Tensors a link reads (what the link before made first, then by first use) and hands on (in the order in
    which the next link reads them, then the rest)."""
    later = [node for node, made in flow.maker.items() if made == position and flow.leaves(node, position)]
    following = _reads(by_link[links[position + 1]], flow, position + 1) if position + 1 < len(links) else ()
    order = {node: rank for rank, node in enumerate(following)}
    handed = tuple(sorted(later, key=lambda node: order.get(node, len(order))))
    return _reads(by_link[links[position]], flow, position), handed


def _reads(group: Sequence[fx.Node], flow: Flow, position: int) -> tuple[fx.Node, ...]:
    seen: dict[fx.Node, None] = {}
    for call in group:
        for node in tensor_inputs(call):
            if flow.maker.get(node, -1) != position and node.meta["role"] in _READ:
                seen.setdefault(node)
    return tuple(sorted(seen, key=lambda node: flow.maker.get(node, -1) != position - 1))
