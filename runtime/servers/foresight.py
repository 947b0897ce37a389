"""Which indices the tables of a model will be asked with, before they are: where these are views of the model's inputs.

In the first pass each table is asked by itself, and what it is asked with is looked for among the inputs: a tensor that lies in an
input's memory (`categories[:, 3]`). In later passes all of these views are made at once, before the first table, so that one
exchange serves all tables; what a table is then asked with is compared with the view that was made for it (the same memory, not
written to since), and a table that is asked with anything else is served by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path


@dataclass(frozen=True, slots=True)
class View:
    """Where indices lie in an input: its place among the inputs, its shape, and size, strides and offset of the view."""

    place: str
    shape: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Foresight:
    """The inputs of the pass that is going on, and the views that tables were asked with."""

    def __init__(self) -> None:
        self._inputs: dict[str, Tensor] = {}
        self._views: dict[int, View] = {}

    def begin(self, inputs: Any) -> None:
        """A forward pass with these inputs begins."""
        leaves, _ = tree_flatten_with_path(inputs)
        self._inputs = {str(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}

    def end(self) -> None:
        """Keep no inputs alive."""
        self._inputs = {}

    def learn(self, table: int, indices: Tensor) -> None:
        """Note what a table was asked with."""
        self._views.pop(table, None)
        for place, whole in self._inputs.items():
            if (
                whole.dtype == indices.dtype
                and whole.untyped_storage().data_ptr() == indices.untyped_storage().data_ptr()
            ):
                self._views[table] = View(
                    place, tuple(whole.shape), tuple(indices.shape), indices.stride(),
                    int(indices.storage_offset() - whole.storage_offset()),
                )  # fmt: skip
                return

    def foreseen(self) -> dict[int, Tensor]:
        """By table what it will be asked with, as far as it is known."""
        found = {}
        for table, view in self._views.items():
            whole = self._inputs.get(view.place)
            if whole is not None and tuple(whole.shape) == view.shape and whole.is_contiguous():
                found[table] = whole.as_strided(view.size, view.stride, whole.storage_offset() + view.offset)
        return found


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are views of the same numbers."""
    return (
        one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
        and one.dtype == other.dtype
    )  # fmt: skip
