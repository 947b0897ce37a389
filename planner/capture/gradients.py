"""Which backward kernels serve only the gradients of parameters: the W half of a zero-bubble schedule."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from autoparallel.planner.capture.nodes import backward_launches, gradients, tensor


def with_weight_gradients(graph: fx.Graph) -> fx.Graph:
    """`graph`, each backward node told by `weight_only` whether it computes only the gradients of its own call's
    parameters.

    Walks the backward pass from its end: a kernel is weight-only if all its outputs are parameter gradients, or
    are read by weight-only kernels of the same call alone. What another call reads is a gradient of its input.
    """
    wanted = {tensor(node).storage for node in gradients(graph).values()}
    readers: dict[int, list[tuple[fx.Node, bool]]] = defaultdict(list)  # storage -> (call, weight-only)
    for node, launch, call in reversed(list(backward_launches(graph))):
        if launch.is_view:
            continue
        useful = [
            all(same is call and only for same, only in readers[m.storage])
            for m in launch.outputs
            if readers[m.storage] or m.storage in wanted
        ]
        weight_only = bool(useful) and all(useful) and not node.meta["repeats"]
        node.meta["weight_only"] = weight_only
        for meta in launch.inputs:
            readers[meta.storage].append((call, weight_only))
    return graph


def gradient_of(node: fx.Node) -> str:
    """ "weight" or "input", as `KernelSpec.gradient_of` has it."""
    return "weight" if node.meta.get("weight_only") else "input"
