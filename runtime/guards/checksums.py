"""Replicas that are no longer equal: a bit that has flipped in one rank's parameter or gradient.

Ranks that hold the same piece of a tensor must hold the same bits, as all of them got the same sums. A checksum is the sum
of a piece's words as integers, which any one flipped bit changes; where the arithmetic is not deterministic, the norm of the
piece, compared by a tolerance. Of all pieces that the same ranks hold one number is compared; names are asked for when it
differs.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autoparallel.runtime.loading.weights import share_ranges
from autoparallel.runtime.ranks.agreement import Agreement
from autoparallel.runtime.tensor.questions import local

# How far norms of equal pieces may lie apart, relative. Kind: choice; rounding of float32 sums in another order.
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Ranks whose `what` ("parameter", "gradient") of `name` is not that of most who hold it; where there is no
    majority, all who hold it."""

    what: str
    name: str
    ranks: tuple[int, ...]
    sure: bool

    def __str__(self) -> str:
        who = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        if self.sure:
            return f"the {self.what} {self.name} of {who} differs from its other copies"
        return f"the {self.what} {self.name} differs between {who}: of two copies nobody knows which is wrong"


class Checksums:
    """Compares the replicas of a model's parameters and gradients. Collective, as long as `find` is called alike. `island` is the
    number of the replica that this rank is of where replicas train by themselves: what others hold need not be equal."""

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], everyone: Agreement, *, exact: bool = True, island: int | None = None
    ) -> None:  # fmt: skip
        self._named = dict(named)
        self._all, self._exact = everyone, exact
        own = {name: _piece(name, p, island) for name, p in self._named.items()}
        holders: dict[str, list[int]] = {}
        for rank, pieces in enumerate(everyone.gathered(list(own.values()))):
            for piece in pieces:
                holders.setdefault(piece, []).append(rank)
        # By who holds them: the names of this rank's pieces that others hold, too.
        self._sets: dict[tuple[int, ...], list[str]] = {}
        for name, piece in own.items():
            if len(holders[piece]) > 1:
                self._sets.setdefault(tuple(holders[piece]), []).append(name)
        every = sorted({held for sets in everyone.gathered(list(self._sets)) for held in sets})
        self._order = every  # the same on all ranks

    @property
    def useful(self) -> bool:
        """Whether there are any replicas."""
        return bool(self._order)

    @torch.no_grad()
    def find(self) -> list[Difference]:
        """Which replicas differ now, on every rank."""
        found = []
        for what in ("parameter", "gradient"):
            values = {name: self._value(what, name) for names in self._sets.values() for name in names}
            joined = [self._joined([values[n] for n in self._sets.get(held, ())]) for held in self._order]
            odd = [
                h
                for h, s in zip(self._order, zip(*self._all.gathered(joined), strict=True), strict=True)
                if self._odd(h, s)
            ]
            if odd:
                found += self._named_differences(what, odd, values)
        return found

    def _named_differences(
        self, what: str, odd: list[tuple[int, ...]], values: Mapping[str, float | int]
    ) -> list[Difference]:
        own = {name: values[name] for held in odd for name in self._sets.get(held, ())}
        every = self._all.gathered(own)
        found = []
        for held in odd:
            for name in sorted({n for rank in held for n in every[rank]}):
                by_rank = {rank: every[rank][name] for rank in held if name in every[rank]}
                values_here = [by_rank.get(rank, 0) for rank in range(len(every))]
                wrong, sure = self._wrong(held, values_here)
                if wrong:
                    found.append(Difference(what=what, name=name, ranks=wrong, sure=sure))
        return found

    def _odd(self, held: tuple[int, ...], sums: tuple[float | int, ...]) -> bool:
        return bool(self._wrong(held, list(sums))[0])

    def _wrong(self, held: tuple[int, ...], sums: list[float | int]) -> tuple[tuple[int, ...], bool]:
        """Who is not with most of those who hold it, and whether there is a most."""
        near = [[r for r in held if self._same(sums[r], sums[rank])] for rank in held]
        most = max(near, key=len)
        if len(most) == len(held):
            return (), True
        if len(most) * 2 > len(held):
            return tuple(r for r in held if r not in most), True
        return held, False

    def _same(self, one: float | int, other: float | int) -> bool:
        if self._exact:
            return one == other
        return abs(one - other) <= TOLERANCE * max(abs(one), abs(other)) or (one != one and other != other)

    def _value(self, what: str, name: str) -> float | int:
        parameter = self._named[name]
        tensor = parameter if what == "parameter" else parameter.grad
        if tensor is None:
            return 0
        part = local(tensor.detach())
        if not self._exact:
            return float(torch.linalg.vector_norm(part.double() if not part.is_complex() else part))
        return checksum(part)

    def _joined(self, values: list[float | int]) -> float | int:
        if not self._exact:
            return math.sqrt(sum(v * v for v in values))
        text = b"".join(struct.pack("<Q", int(v) % 2**64) for v in values)
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def checksum(part: Tensor) -> int:
    """The sum of a tensor's words of eight bytes, as integers that wrap around, and of the bytes that are left."""
    part = torch.view_as_real(part) if part.is_complex() else part
    content = part.contiguous().view(-1).view(torch.uint8)
    whole = content.numel() // 8 * 8
    words = content[:whole]
    if words.storage_offset() % 8:
        words = words.clone()
    # Words of the sum's own width: others are converted one by one, which takes ten times as long on a CPU.
    return int(words.view(torch.int64).sum()) + int(content[whole:].sum(dtype=torch.int64))


def _piece(name: str, parameter: nn.Parameter, island: int | None) -> str:
    """What tells pieces of a tensor apart: equal exactly where ranks must hold the same numbers."""
    return f"{name} {share_ranges(parameter)} {island}"
