"""Which parameters each link of the chain holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import fx, nn

from autoparallel.costmodel.graph import Parameter
from autoparallel.planner.capture.flow import Calls
from autoparallel.planner.capture.links import Link
from autoparallel.planner.capture.names import ParameterNames
from autoparallel.planner.capture.nodes import Role, tensor_inputs
from autoparallel.planner.capture.writer import dtype_name


def parameters_by_link(
    module: nn.Module, by_link: Calls, names: ParameterNames
) -> list[tuple[Parameter, ...]]:
    """The parameters of each link: all below a repeated module's path, and those that its calls use; in the
    first glue also those that nothing uses."""
    tensors = {id(p): p for p in module.parameters()}
    held: list[dict[str, int]] = []  # absolute name -> tensor
    for link, group in by_link.items():
        inside = names.below(link.path) if link.repeated else {}
        held.append(inside | _used(link, group, names))
    placed = {key for entries in held for key in entries.values()}
    glue = next((i for i, link in enumerate(by_link) if not link.repeated), 0)
    held[glue] |= {aliases[0]: key for key, aliases in names.of_tensor.items() if key not in placed}
    count: dict[int, int] = defaultdict(int)
    for entries in held:
        for key in entries.values():
            count[key] += 1

    def make(name: str, key: int, prefix: str) -> Parameter:
        tensor = tensors[key]
        return Parameter(
            name=name.removeprefix(prefix),
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            trainable=tensor.requires_grad,
            tied=names.of_tensor[key][0] if count[key] > 1 else "",
        )

    return [
        tuple(make(n, key, f"{link.path}." if link.repeated else "") for n, key in entries.items())
        for link, entries in zip(by_link, held, strict=True)
    ]


def _used(link: Link, group: Sequence[fx.Node], names: ParameterNames) -> dict[str, int]:
    """Parameters that the calls of a link use, under the names that its operators call them by."""
    used: dict[str, int] = {}
    for call in group if not link.model else ():
        for node in tensor_inputs(call):
            if node.meta["role"] is Role.PARAM:
                name = names.near(node.meta["name"], call.meta["frame"].path, link.path)
                used[name] = names.tensor_of[name]
    return used
