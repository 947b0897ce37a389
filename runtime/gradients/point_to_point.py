"""Reductions of our own making, by messages between neighbours: a ring, and two trees.

A backend that moves messages and leaves the choice to nobody (Gloo) can be told which of its ranks sends what to which.
NCCL chooses by itself, for which it has the topology; there these are refused (`runtime/capabilities/`).

Ring: n - 1 rounds in which every rank adds its part of what the neighbour sends on, and n - 1 in which sums go round.
Trees (Sanders, Speck and Träff, 2009): half of the buffer goes up one binary tree and down again, the other half another,
whose inner ranks are the leaves of the first, in pieces that follow each other. Ranks below one port of the network are a
chain whose end is the node of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.runtime.gradients.feedback import Memory

PIECE_BYTES = 2**19  # of a tree's buffer, on its way at once. Kind: choice


class RingScatter:
    """[ranks, numbers] added up so that every rank gets its row of the sum; it runs when it is waited for."""

    def __init__(self, rows: Tensor, group: dist.ProcessGroup) -> None:
        self._rows, self._group = rows, group

    held_bytes = 0

    def wait(self) -> Tensor:
        rank, size = self._group.rank(), self._group.size()
        total = self._rows[(rank - 1) % size].contiguous()
        for step in range(size - 1):
            received = torch.empty_like(total)
            _exchange(total, received, self._group)
            total = received.add_(self._rows[(rank - 2 - step) % size])
        return total


def ring_gather(part: Tensor, group: dist.ProcessGroup, into: Tensor) -> Tensor:
    """Every rank's part, `into` [ranks, numbers]."""
    rank, size, rows = group.rank(), group.size(), into
    rows[rank].copy_(part.view(-1))
    for step in range(size - 1):
        _exchange(rows[(rank - step) % size], rows[(rank - step - 1) % size], group)
    return rows


def _exchange(sent: Tensor, received: Tensor, group: dist.ProcessGroup) -> None:
    """One round of a ring: on to the next rank, from the one before."""
    rank, size = group.rank(), group.size()
    coming = dist.irecv(received, group=group, group_src=(rank - 1) % size)  # first: see `Direct`
    going = dist.isend(sent, group=group, group_dst=(rank + 1) % size)
    for work in (coming, going):
        if work is not None:
            work.wait()


class Direct:
    """A row to every rank, and one from each: an all-to-all, started.

    Gloo moves a message when its receiver waits for it: receives that are posted before anything is sent let links carry
    both ways at once, which its own all-to-all and all-gather do not (measured: 2 and 1.4 times as long between two nodes).
    """

    def __init__(self, rows: Tensor, group: dist.ProcessGroup, into: Tensor | None = None) -> None:
        rank, size = group.rank(), group.size()
        self._sent, self._received = rows, torch.empty_like(rows) if into is None else into
        self._received[rank].copy_(rows[rank])
        after = [(rank + step) % size for step in range(1, size)]
        before = [(rank - step) % size for step in range(1, size)]
        works = [dist.irecv(self._received[peer], group=group, group_src=peer) for peer in before]
        works += [dist.isend(rows[peer], group=group, group_dst=peer) for peer in after]
        self._works = [work for work in works if work is not None]

    @property
    def held_bytes(self) -> int:
        """Bytes of what comes."""
        return self._received.nbytes

    def wait(self) -> Tensor:
        """What came, by rank."""
        for work in self._works:
            work.wait()
        return self._received


def direct_gather(row: Tensor, group: dist.ProcessGroup, into: Tensor) -> Tensor:
    """Every rank's row, `into` [ranks, numbers], as `Direct` sends."""
    return Direct(row.contiguous().expand(group.size(), -1), group, into).wait()


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in a tree, by positions in the group."""

    parent: int | None
    children: tuple[int, ...]


def tree_places(units: Sequence[Sequence[int]]) -> tuple[list[Place], list[Place]]:
    """The places of all positions in both trees. `units` are the positions below one port of the network each."""
    found = []
    for order in (units, [list(reversed(unit)) for unit in reversed(units)]):
        parents: dict[int, int | None] = {}
        for number, unit in enumerate(order):
            for before, position in zip((None, *unit), unit, strict=False):
                above = order[(number - 1) // 2][0] if number else None
                parents[position] = above if before is None else before
        children: dict[int, list[int]] = {position: [] for position in parents}
        for position, parent in parents.items():
            if parent is not None:
                children[parent].append(position)
        found.append([Place(parents[n], tuple(children[n])) for n in sorted(parents)])
    return found[0], found[1]


class TreeReducer:
    """Mean by two trees over `group`; `units` as in `tree_places`. It runs when it is waited for."""

    biased = beside = False

    def __init__(self, group: dist.ProcessGroup, units: Sequence[Sequence[int]]) -> None:
        self._group = group
        self._places = tuple(places[group.rank()] for places in tree_places(units))

    def start(self, buffer: Tensor, memory: Memory) -> _TreeReduction:
        del memory
        return _TreeReduction(buffer, self._group, self._places)

    def owed(self, buffer: Tensor, memory: Memory) -> Tensor:
        del memory
        return torch.zeros_like(buffer).view(-1)


class _TreeReduction:
    held_bytes = 0

    def __init__(self, buffer: Tensor, group: dist.ProcessGroup, places: Sequence[Place]) -> None:
        self._buffer, self._group, self._places = buffer, group, places

    def wait(self) -> None:
        flat = self._buffer.view(-1)
        halves = flat.tensor_split(2)
        size = max(1, PIECE_BYTES // flat.element_size())
        pieces = [[h for h in half.split(size) if h.numel()] for half in halves]
        rounds = max(map(len, pieces))
        numbered = [(n, tree) for n in range(rounds) for tree in (0, 1) if n < len(pieces[tree])]
        sent = [work for n, tree in numbered for work in self._up(pieces[tree][n], tree)]
        sent += [work for n, tree in numbered for work in self._down(pieces[tree][n], tree)]
        for work in sent:
            work.wait()
        self._buffer.div_(self._group.size())

    def _up(self, piece: Tensor, tree: int) -> list[dist.Work]:
        place = self._places[tree]
        for child in place.children:
            received = torch.empty_like(piece)
            dist.recv(received, group=self._group, group_src=child, tag=tree)
            piece += received
        return self._sent(piece.clone(), [] if place.parent is None else [place.parent], tree)

    def _down(self, piece: Tensor, tree: int) -> list[dist.Work]:
        place = self._places[tree]
        if place.parent is not None:
            dist.recv(piece, group=self._group, group_src=place.parent, tag=tree)
        return self._sent(piece, place.children, tree)

    def _sent(self, piece: Tensor, to: Sequence[int], tree: int) -> list[dist.Work]:
        works = [dist.isend(piece, group=self._group, group_dst=rank, tag=tree) for rank in to]
        return [work for work in works if work is not None]
