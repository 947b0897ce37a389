"""Which activation storages autograd keeps, each listed once."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from autoparallel.planner.capture.nodes import Role, SavedStorage, calls, is_held, tensor, tensor_outputs

_Keepers = dict[int, list[tuple[fx.Node, SavedStorage]]]  # storage -> the calls that it is kept for


def with_kept_storages(graph: fx.Graph) -> fx.Graph:
    """`graph`, each call told by `keeps` which storages are listed there, as (call that keeps it, position there, node of
    whose rounds each keeps its own); parameters, buffers and constants are left out.

    A storage is listed once, so that equal blocks list equal storages and the sum over the chain is what is kept:
    in the link that made it if that keeps it (an activation that its own backward needs); else at the first call
    that keeps it, if that is one link (the input of the next block); else where it was made (rotary tables, an
    encoder's output).
    """
    makers, keepers = _makers(graph), _keepers(graph)
    own = {
        storage
        for storage, kept in keepers.items()
        if storage in makers
        and makers[storage].meta["link"] in {call.meta["link"] for call, _ in kept}
    }  # fmt: skip
    given = {tensor(node).storage: node for node in graph.nodes if node.meta.get("role") is Role.INPUT}
    for call in calls(graph):
        call.meta["keeps"] = []
    for storage, entries in keepers.items():
        made = makers.get(storage)
        if made is not None and _kept_by_model(made, storage, own):
            continue  # the block of the link that made it, which was stood in for, lists it
        at, saved = entries[0]
        keeper = at
        if storage in own and made is not None:
            keeper, saved = next(e for e in entries if e[0].meta["link"] is made.meta["link"])
            at = keeper
        elif made is not None and len({call.meta["link"] for call, _ in entries}) > 1:
            at = made
        at.meta["keeps"].append((keeper, saved.position, given.get(storage, made or keeper)))
    return graph


def _makers(graph: fx.Graph) -> dict[int, fx.Node]:
    """The call that made each storage."""
    found: dict[int, fx.Node] = {}
    for call in calls(graph):
        for node in tensor_outputs(call):
            found.setdefault(tensor(node).storage, call)
    return found


def _keepers(graph: fx.Graph) -> _Keepers:
    """What is kept that is not there anyway."""
    held = {tensor(node).storage for node in graph.nodes if node.op == "get_attr" and is_held(node)}
    found: _Keepers = defaultdict(list)
    for call in calls(graph):
        for saved in call.meta["saved"]:
            if saved.storage not in held:
                found[saved.storage].append((call, saved))
    return found


def _kept_by_model(call: fx.Node, storage: int, own: set[int]) -> bool:
    """Whether the link that stands for the maker of a storage keeps its own such output."""
    if "stood_in_by" not in call.meta:
        return False
    made = next(node for node in tensor_outputs(call) if tensor(node).storage == storage)
    return tensor(made.meta["like"]).storage in own
