"""Which gradients are reduced together, and when in the backward pass a bucket is full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autoparallel.costmodel.program import Collective

Sized = Sequence[tuple[int, int]]  # numbers of collectives that differ in more than size, and bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Collectives that start when `fraction` of the backward of link `link` (in backward order) is done."""

    link: int
    fraction: float
    collectives: tuple[Collective, ...]


def fill_buckets(reductions: Sequence[tuple[Collective, ...]], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Buckets of `bucket_bytes` (0: one per link), from the reductions of the links in backward order.

    A link's gradients become ready evenly over its backward. A bucket's size is that of the largest collective
    of each link, so that a reduce-scatter and the all-reduce of its shard count once. Collectives that differ
    only in size are merged. The last bucket goes when the backward ends, full or not.
    """
    filler = _Filler()
    held = 0.0
    known: dict[int, Sized] = {}  # by reduction, as links that are the same block have the same one
    for number, reduction in enumerate(reductions):
        if id(reduction) not in known:
            known[id(reduction)] = filler.sized(reduction)
        collectives = known[id(reduction)]
        size = max((size_bytes for _, size_bytes in collectives), default=0)
        done = 0.0
        while size and bucket_bytes and held + size * (1.0 - done) >= bucket_bytes:
            share = (bucket_bytes - held) / size
            done = min(1.0, done + share)
            filler.add(collectives, share)
            filler.close(number, done)
            held = 0.0
        if size and done < 1.0:
            filler.add(collectives, 1.0 - done)
            held += size * (1.0 - done)
        if filler.pending and not bucket_bytes:
            filler.close(number, 1.0)
            held = 0.0
    if filler.pending:
        filler.close(len(reductions) - 1, 1.0)
    return tuple(filler.buckets)


@dataclass(slots=True)
class _Filler:
    """Buckets so far, and what is in the one that is being filled: bytes by kind of collective. Buckets of the same sizes
    have the same collectives, as one object."""

    buckets: list[Bucket] = field(default_factory=list)
    pending: dict[int, float] = field(default_factory=dict)
    _kinds: dict[Collective, int] = field(default_factory=dict)
    _whole: dict[tuple[tuple[int, int], ...], tuple[Collective, ...]] = field(default_factory=dict)

    def sized(self, reduction: Sequence[Collective]) -> Sized:
        kinds = [replace(one, size_bytes=0) for one in reduction]
        numbers = [self._kinds.setdefault(kind, len(self._kinds)) for kind in kinds]
        return [(number, one.size_bytes) for number, one in zip(numbers, reduction, strict=True)]

    def add(self, collectives: Sized, share: float) -> None:
        for kind, size_bytes in collectives:
            self.pending[kind] = self.pending.get(kind, 0.0) + size_bytes * share

    def close(self, link: int, fraction: float) -> None:
        sizes = tuple((kind, round(size_bytes)) for kind, size_bytes in self.pending.items())
        if sizes not in self._whole:
            kinds = list(self._kinds)
            self._whole[sizes] = tuple(replace(kinds[kind], size_bytes=size) for kind, size in sizes)
        self.buckets.append(Bucket(link=link, fraction=fraction, collectives=self._whole[sizes]))
        self.pending = {}
