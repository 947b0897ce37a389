"""Tensors that are taken apart sample by sample and put together again: nothing happens to them.

Code that leaves room for images of several sizes makes a list of what belongs to each sample and joins the list. The
step of another micro-batch would be another one, of as many pieces as samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoparallel.planner.capture.nodes import calls

JOINS = frozenset({"cat", "concat", "concatenate"})
_TAKE_APART = frozenset({"unbind", "__iter__"})


class Pieces:
    """What was taken apart along its first dim in a trace."""

    def __init__(self) -> None:
        self._whole: dict[
            int, tuple[torch.Tensor, int, int]
        ] = {}  # id(piece) -> (of what, which, of how many)
        self._alive: list[Any] = []

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """A call has run: its results may be pieces."""
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if name not in _TAKE_APART or dim != 0 or not isinstance(out, list | tuple):
            return
        for index, piece in enumerate(out):
            self._whole[id(piece)] = (args[0], index, len(out))
        self._alive.append(out)

    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The tensor whose pieces, all of them and in order, are joined along their first dim; None for other calls."""
        dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
        items = args[0] if args else kwargs.get("tensors", ())
        if dim != 0 or not isinstance(items, list | tuple) or not items or id(items[0]) not in self._whole:
            return None
        base, _, count = self._whole[id(items[0])]
        known = [self._whole.get(id(item)) for item in items]
        in_order = all(k is not None and k[0] is base and k[1] == i for i, k in enumerate(known))
        return base if in_order and len(items) == count and base.dim() > 1 else None


def without_unread_pieces(graph: fx.Graph) -> None:
    """Leave out what takes a tensor apart for nobody."""
    for call in reversed(calls(graph)):
        if call.meta["torch_name"] not in _TAKE_APART or call.meta["kernels"][1:]:
            continue
        if not any(reader.users for reader in call.users):
            for reader in list(call.users):
                graph.erase_node(reader)
            graph.erase_node(call)
