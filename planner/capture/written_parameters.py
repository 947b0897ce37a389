"""Parameters that a model's own forward pass writes to: layers that initialise themselves from their first batch, tables whose
rows are scaled down as they are looked up, averages of other weights that are kept as parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from autoparallel.costmodel.graph import Written
from autoparallel.planner.capture.nodes import Role, calls, role, tensor
from autoparallel.planner.capture.trees import tensors
from autoparallel.planner.capture.values import storage_key

_NAMED = 3  # parameters that a warning names


def storages_of(module: torch.nn.Module) -> dict[str, int]:
    """The storage that each parameter looks at, by name."""
    return {name: storage_key(parameter) for name, parameter in module.named_parameters()}


def written_parameters(
    graph: fx.Graph, before: Mapping[str, int], after: Mapping[str, int]
) -> tuple[Written, ...]:
    """What a forward pass has written to parameters: in place, seen by its kernels, or another storage in the place of that
    `before` (`parameter.data = …`). In the order of the parameters; one that is written twice stands there once."""
    names = {storage: name for name, storage in before.items()}
    of_samples: dict[str, bool] = {}
    for call in calls(graph):
        for storage in _changed(call):
            if (name := names.get(storage)) is not None:
                of_samples[name] = of_samples.get(name, False) or _comes_from_inputs([call])
    for name, storage in after.items():
        if storage != before[name]:
            made = [node for node in calls(graph) if _makes(node, storage)]
            of_samples[name] = of_samples.get(name, False) or _comes_from_inputs(made)
    return tuple(Written(name=name, from_samples=of_samples[name]) for name in before if name in of_samples)


def write_warnings(found: Sequence[Written]) -> tuple[str, ...]:
    """What a person should know of them before anything runs."""
    said = []
    if drawn := [one.name for one in found if one.from_samples]:
        said.append(
            f"its forward pass writes to {names_of(drawn)} what it makes of its samples: every rank, and every micro-batch, "
            "would write other numbers than one process; if layers initialise themselves so from their first batch, call the model "
            "once on one before it is planned and run"
        )
    if own := [one.name for one in found if not one.from_samples]:
        said.append(
            f"its forward pass writes to {names_of(own)}: a rank that holds a share of them, or a copy for this pass alone, loses "
            "what is written; do that after the optimizer's step"
        )
    return tuple(said)


def names_of(names: Sequence[str]) -> str:
    """A few names, those of every layer once."""
    places = list(
        dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names)
    )
    more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    return ", ".join(places[:_NAMED]) + more


def _changed(call: fx.Node) -> Iterator[int]:
    """Storages that the kernels of a call write into."""
    for launch in call.meta["kernels"]:
        func, args, kwargs = launch.signature
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[number] if number < len(args) else kwargs.get(argument.name)
                yield from map(storage_key, tensors(given))


def _makes(call: fx.Node, storage: int) -> bool:
    return any(tensor(node).storage == storage for node in call.meta["outputs"] if "tensor" in node.meta)


def _comes_from_inputs(made: Sequence[fx.Node]) -> bool:
    """Whether anything that the model is given reaches these nodes."""
    seen, open_ = set(made), list(made)
    while open_:
        node = open_.pop()
        if role(node) is Role.INPUT:
            return True
        before = [other for other in node.all_input_nodes if other not in seen]
        if (call := node.meta.get("call")) is not None and call not in seen:
            before.append(call)
        seen.update(before)
        open_ += before
    return False
