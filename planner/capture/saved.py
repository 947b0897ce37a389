"""Which activation storages autograd keeps, each listed once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autoparallel.planner.capture.records import SavedStorage, Trace
from autoparallel.planner.capture.split import Link


def saved_by_call(trace: Trace, links: Sequence[Link]) -> dict[int, list[SavedStorage]]:
    """Call -> the storages listed there; parameters, buffers and constants are left out.

    A storage that one link keeps is listed at the first call of the link that keeps it. One that several links
    keep (rotary tables, an encoder's output) is listed at the call that made it, so that equal blocks list
    equal storages and the sum over the chain counts it once.
    """
    link_of = {index: position for position, link in enumerate(links) for index in link.calls}
    maker: dict[int, int] = {}
    held: set[int] = set()
    for value in trace.values:
        if value.origin in {"param", "buffer", "constant"}:
            held.add(value.meta.storage)
        elif value.origin == "call":
            maker.setdefault(value.meta.storage, value.call)
    keepers: dict[int, list[tuple[int, SavedStorage]]] = defaultdict(list)
    for index, call in enumerate(trace.calls):
        for saved in call.saved:
            if saved.storage not in held:
                keepers[saved.storage].append((index, saved))
    result: dict[int, list[SavedStorage]] = defaultdict(list)
    for storage, entries in keepers.items():
        links_keeping = {link_of[index] for index, _ in entries}
        index, saved = entries[0]
        if len(links_keeping) > 1 and storage in maker:
            index = maker[storage]
        result[index].append(saved)
    return result
