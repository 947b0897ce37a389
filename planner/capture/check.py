"""What holds of a captured graph after each pass. An AssertionError here is a bug of ours, never a user's mistake."""

from __future__ import annotations

import itertools

from torch import fx

from autoparallel.planner.capture.links import calls_by_link, links
from autoparallel.planner.capture.nodes import (
    backward_launches,
    calls,
    maker,
    role,
    tensor,
    tensor_inputs,
    tensor_outputs,
)


def check_step(graph: fx.Graph) -> None:
    """Every tensor that a call or a backward kernel reads is made before it; every call's results are its own."""
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        assert seen.issuperset(node.all_input_nodes), f"{node.format_node()} comes before what it reads"
        seen.add(node)
        assert node.op == "output" or role(node)
    for call in calls(graph):
        assert all("tensor" in node.meta for node in tensor_inputs(call)), call.format_node()
        assert all(maker(node) is call for node in tensor_outputs(call)), call.format_node()


def check_twins(graph: fx.Graph) -> None:
    """Every tensor of a call has its likes at the other micro-batches."""
    for call in calls(graph):
        for node in (call, *tensor_inputs(call), *tensor_outputs(call)):
            assert node.meta["twins"][0] is node, call.format_node()


def check_gradients(graph: fx.Graph) -> None:
    """Every kernel of the backward pass serves a parameter or an input."""
    for node, launch, _ in backward_launches(graph):
        assert launch.is_view or "weight_only" in node.meta, node.format_node()


def check_links(graph: fx.Graph) -> None:
    """Every call stands in one link, and the calls of a link stand together."""
    group = calls(graph)
    changes = sum(a.meta["link"] is not b.meta["link"] for a, b in itertools.pairwise(group))
    assert changes + bool(group) == len(links(graph)), [link.path for link in links(graph)]
    position = {node: index for index, node in enumerate(graph.nodes)}
    for call in group:
        late = [node for node in call.all_input_nodes if position[node] > position[call]]
        assert not late, f"{call.format_node()} comes before {late}"


def check_repetition(graph: fx.Graph) -> None:
    """A link repeats one that is the first of its structure, call by call."""
    by_link = calls_by_link(graph)
    for link, group in by_link.items():
        if link.same is not None:
            names = [[c.meta["torch_name"] for c in g] for g in (group, by_link[link.same])]
            assert names[0] == names[1], (link.path, link.same.path)
            assert link.same.first, (link.path, link.same.path)


def check_kept(graph: fx.Graph) -> None:
    """Every storage is listed at most once, at a call."""
    listed = [
        keeper.meta["saved"][position].storage
        for call in calls(graph)
        for keeper, position, _ in call.meta["keeps"]
    ]
    assert len(listed) == len(set(listed)), "a storage is listed twice"


def check_costs(graph: fx.Graph) -> None:
    """Every call of the first link of each structure has costs, and no other."""
    for call in calls(graph):
        assert call.meta["link"].first == ("costs" in call.meta), call.format_node()


def check_shardings(graph: fx.Graph) -> None:
    """Every sharding of a call says something of each of its tensors; the first replicates all."""
    for call in calls(graph):
        sides = (tensor_inputs(call), tensor_outputs(call))
        for sharding in call.meta.get("shardings", ()):
            said = (sharding.inputs, sharding.outputs)
            assert [len(s) for s in said] == [len(s) for s in sides], call.format_node()
            for placements, nodes in zip(said, sides, strict=True):
                for placement, node in zip(placements, nodes, strict=True):
                    assert placement[0] != "S" or tensor(node).shape, call.format_node()
