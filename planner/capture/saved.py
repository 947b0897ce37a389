"""Which activation storages autograd keeps, each listed once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autoparallel.planner.capture.records import SavedStorage, Trace
from autoparallel.planner.capture.split import Link


def saved_by_call(trace: Trace, links: Sequence[Link]) -> dict[int, list[SavedStorage]]:
    """Call -> the storages listed there; parameters, buffers and constants are left out.

    A storage is listed once, so that equal blocks list equal storages and the sum over the chain is what is kept:
    in the link that made it if that keeps it (an activation that its own backward needs); else at the first call
    that keeps it, if that is one link (the input of the next block); else where it was made (rotary tables, an
    encoder's output).
    """
    link_of = {index: position for position, link in enumerate(links) for index in link.calls}
    maker, held = _origins(trace)
    keepers: dict[int, list[tuple[int, SavedStorage]]] = defaultdict(list)
    for index, call in enumerate(trace.calls):
        for saved in call.saved:
            if saved.storage not in held:
                keepers[saved.storage].append((index, saved))
    own = {
        s for s, kept in keepers.items() if s in maker and link_of[maker[s]] in {link_of[i] for i, _ in kept}
    }
    result: dict[int, list[SavedStorage]] = defaultdict(list)
    for storage, entries in keepers.items():
        if _kept_by_model(trace, maker.get(storage, -1), storage, own):
            continue  # the block of the link that made it, which was stood in for, lists it
        index, saved = entries[0]
        if storage in own:
            index, saved = next(e for e in entries if link_of[e[0]] == link_of[maker[storage]])
        elif len({link_of[i] for i, _ in entries}) > 1 and storage in maker:
            index = maker[storage]
        result[index].append(saved)
    return result


def _origins(trace: Trace) -> tuple[dict[int, int], set[int]]:
    """Storage -> the call that made it; and the storages that are there anyway."""
    maker: dict[int, int] = {}
    held: set[int] = set()
    for value in trace.values:
        if value.origin in {"param", "buffer", "constant"}:
            held.add(value.meta.storage)
        elif value.origin == "call":
            maker.setdefault(value.meta.storage, value.call)
    return maker, held


def _kept_by_model(trace: Trace, call: int, storage: int, own: set[int]) -> bool:
    """Whether the link that stands for the maker of a storage keeps its own such output."""
    if call not in trace.stand_ins:
        return False
    made = next(v for v in trace.values if v.call == call and v.meta.storage == storage)
    return trace.values[made.like].meta.storage in own
