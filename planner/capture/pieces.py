"""Tensors that are taken apart sample by sample and put together again: nothing happens to them.

Code that leaves room for images of several sizes makes a list of what belongs to each sample and joins the list. The
step of another micro-batch would be another one, of as many pieces as samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoparallel.planner.capture.nodes import calls

_PADS = frozenset({"pad_sequence"})
JOINS = frozenset({"cat", "concat", "concatenate"}) | _PADS
_SINGLE = frozenset({"unbind", "__iter__"})  # each piece has a dim less
_TAKE_APART = _SINGLE | {"split", "split_with_sizes"}
_DIM = {"unbind": 1, "split": 2, "split_with_sizes": 2}  # where the dim stands among the arguments


class Pieces:
    """What was taken apart along its first dim in a trace."""

    def __init__(self) -> None:
        self._whole: dict[int, tuple[torch.Tensor, int, int, bool]] = {}
        # id(piece) -> (of what, which, of how many, whether it has a dim less)
        self._alive: list[Any] = []

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """A call has run: its results may be pieces."""
        place = _DIM.get(name, len(args))
        dim = kwargs.get("dim", args[place] if len(args) > place else 0)
        if name not in _TAKE_APART or dim != 0 or not isinstance(out, list | tuple):
            return
        for index, piece in enumerate(out):
            self._whole[id(piece)] = (args[0], index, len(out), name in _SINGLE)
        self._alive.append(out)

    def joined(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...]] | None:
        """What a call that joins all pieces of a tensor, in order and along their first dim, or puts equal ones side by side,
        comes to: a function and its arguments. None for other calls."""
        if name in _PADS:
            return self._side_by_side(*args)
        dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
        items = args[0] if args else kwargs.get("tensors", ())
        if dim != 0 or not isinstance(items, list | tuple) or not items or id(items[0]) not in self._whole:
            return None
        base, _, count, single = self._whole[id(items[0])]
        known = [self._whole.get(id(item)) for item in items]
        in_order = all(k is not None and k[0] is base and k[1] == i for i, k in enumerate(known))
        if not in_order or len(items) != count or (single and base.dim() < 2):
            return None
        return (torch.flatten, (base, 0, 1)) if single else (torch.cat, ([base],))

    def _side_by_side(
        self, items: Sequence[torch.Tensor], batch_first: bool = False, *rest: Any
    ) -> tuple[Any, tuple[Any, ...]] | None:
        """What puts pieces of one size side by side, so that `rest`, what they would be filled up with, does not matter."""
        del rest
        base, _, count, single = self._whole.get(id(items[0]), (items[0], 0, 0, True))
        sizes = {item.shape[0] for item in items}
        if single or not batch_first or len(sizes) > 1 or not _is_one(self.together(items), base):
            return None
        return torch.reshape, (base, (count, *sizes, *base.shape[1:]))

    def together(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`tensors`, with a tensor itself where all its pieces follow one another: what a model returns for each sample."""
        found: list[torch.Tensor] = []
        at = 0
        while at < len(tensors):
            base, first, count, _ = self._whole.get(id(tensors[at]), (tensors[at], 0, 1, False))
            known = [self._whole.get(id(piece)) for piece in tensors[at : at + count]]
            is_whole = first == 0 and [k[1] for k in known if k is not None and k[0] is base] == list(
                range(count)
            )
            found.append(base if is_whole else tensors[at])
            at += count if is_whole else 1
        return found


def _is_one(found: Sequence[torch.Tensor], base: torch.Tensor) -> bool:
    return len(found) == 1 and found[0] is base


def without_unread_pieces(graph: fx.Graph) -> None:
    """Leave out what takes a tensor apart for nobody."""
    for call in reversed(calls(graph)):
        if call.meta["torch_name"] not in _TAKE_APART or call.meta["kernels"][1:]:
            continue
        if not any(reader.users for reader in call.users):
            for reader in list(call.users):
                graph.erase_node(reader)
            graph.erase_node(call)
