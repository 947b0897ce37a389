"""Sizes by micro-batch: graphs of one step at several micro-batches become one, whose nodes know their likes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autoparallel.planner.capture.errors import ModelError
from autoparallel.planner.capture.nodes import calls, micro_batch, tensor, tensor_inputs, tensor_outputs


def alike(graphs: Sequence[fx.Graph]) -> fx.Graph:
    """The first of `graphs`, with each call's and each tensor's node in all of them as its `twins`.

    Raises ModelError where the model does other things with other micro-batches.
    """
    rows = [calls(graph) for graph in graphs]
    _check(graphs, rows)
    for row in zip(*rows, strict=True):
        for side in (tensor_inputs, tensor_outputs):
            for nodes in zip(*map(side, row), strict=True):
                nodes[0].meta["twins"] = nodes
    for row in zip(*rows, strict=True):  # what a call returns may be read before it is written into, or after
        row[0].meta["twins"] = row
    return graphs[0]


def twins(node: fx.Node) -> tuple[fx.Node, ...]:
    """The same node at each micro-batch."""
    found: tuple[fx.Node, ...] = node.meta["twins"]
    return found


def _check(graphs: Sequence[fx.Graph], rows: Sequence[Sequence[fx.Node]]) -> None:
    first = rows[0]
    for graph, other in zip(graphs[1:], rows[1:], strict=True):
        if [c.meta["torch_name"] for c in other] != [c.meta["torch_name"] for c in first]:
            raise ModelError(
                f"the model runs other operators with a batch of {micro_batch(graph)} than with one of "
                f"{micro_batch(graphs[0])}: make its forward independent of the batch size"
            )
        for call, same in zip(first, other, strict=True):
            name, where = call.meta["torch_name"], call.meta["frame"].path or "the model"
            dims = [[len(tensor(node).shape) for node in tensor_outputs(c)] for c in (call, same)]
            if len(dims[0]) == len(dims[1]) and dims[0] != dims[1]:
                raise ModelError(
                    f"{where}: what {name} returns has other dims with other samples: make its shape independent of values"
                )
            inputs = [len(tensor_inputs(c)) for c in (call, same)]
            if inputs[0] != inputs[1] or len(dims[0]) != len(dims[1]):
                raise ModelError(
                    f"{where} calls {name} on as many tensors as there are samples in a batch, one by one: let it "
                    "compute on the whole batch"
                )
