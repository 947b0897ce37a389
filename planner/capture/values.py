"""The values of tensors of a trace that are known, as long as there is room for them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

import torch

from autoparallel.planner.capture.uniform import distinct

# Of all that is remembered of a trace together, and what counts as large of it. Kind: chosen; it bounds the memory.
_MOST_HELD_BYTES, _LARGE_BYTES = 1 << 30, 1 << 16

_Place = tuple[object, ...]


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of the storage behind `tensor`."""
    return int(tensor.untyped_storage()._cdata)


def _place(meta: torch.Tensor) -> _Place:
    return (meta.storage_offset(), meta.shape, meta.stride(), meta.dtype)


class Values:
    """By tensors on the meta device, none of whose storages may be freed: they are told apart by address."""

    def __init__(self) -> None:
        self._known: dict[int, dict[_Place, torch.Tensor]] = defaultdict(dict)  # by storage
        # Large ones by the address of their own storage: bytes, and where they and their views are; the last asked for last.
        self._large: OrderedDict[int, tuple[int, list[tuple[int, _Place]]]] = OrderedDict()
        self._held_bytes = 0  # of these

    def remember(self, meta: torch.Tensor, real: torch.Tensor) -> None:
        """From now on the values of `meta` are those of `real`. Where there are many already, large ones are let go that nobody has
        asked for the longest."""
        address, entry = real.untyped_storage().data_ptr(), (storage_key(meta), _place(meta))
        if address in self._large:  # a view takes nothing
            self._large[address][1].append(entry)
        elif (size := distinct(real) * real.element_size()) > _LARGE_BYTES:
            while self._large and self._held_bytes + size > _MOST_HELD_BYTES:
                self._let_go()
            self._held_bytes += size
            self._large[address] = (size, [entry])
        self._known[entry[0]][entry[1]] = real

    def of(self, meta: torch.Tensor) -> torch.Tensor | None:
        """What is known of a tensor."""
        held = self._known.get(storage_key(meta))
        value = held.get(_place(meta)) if held else None
        if value is not None and (address := value.untyped_storage().data_ptr()) in self._large:
            self._large.move_to_end(address)
        return value

    def forget(self, meta: torch.Tensor) -> None:
        """Something else was written into the storage of a tensor."""
        self._known.pop(storage_key(meta), None)

    def clear(self) -> None:
        """Let go of all."""
        self._known.clear()
        self._large.clear()
        self._held_bytes = 0

    def _let_go(self) -> None:
        _, (size, entries) = self._large.popitem(last=False)
        self._held_bytes -= size
        for key, place in entries:
            self._known[key].pop(place, None)
