"""Which gradients are reduced together, and when in the backward pass a bucket is full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoparallel.costmodel.program import Collective

Sized = Sequence[tuple[Collective, int]]  # collectives without their sizes, and these in bytes


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
    buckets: list[Bucket] = []
    pending: dict[Collective, float] = {}
    held = 0.0
    known: dict[int, Sized] = {}  # by reduction, as links that are the same block have the same one
    for number, reduction in enumerate(reductions):
        if id(reduction) not in known:
            known[id(reduction)] = [(replace(one, size_bytes=0), one.size_bytes) for one in reduction]
        collectives = known[id(reduction)]
        size = max((size_bytes for _, size_bytes in collectives), default=0)
        done = 0.0
        full: tuple[Collective, ...] = ()  # what a bucket with nothing but this link's gradients reduces
        while size and bucket_bytes and held + size * (1.0 - done) >= bucket_bytes:
            share = (bucket_bytes - held) / size
            done = min(1.0, done + share)
            if pending or not full:
                own = not pending
                _add(pending, collectives, share)
                buckets.append(_close(number, done, pending))
                full = buckets[-1].collectives if own else full
            else:
                buckets.append(Bucket(link=number, fraction=done, collectives=full))
            pending, held = {}, 0.0
        if size and done < 1.0:
            _add(pending, collectives, 1.0 - done)
            held += size * (1.0 - done)
        if pending and not bucket_bytes:
            buckets.append(_close(number, 1.0, pending))
            pending, held = {}, 0.0
    if pending:
        buckets.append(_close(len(reductions) - 1, 1.0, pending))
    return tuple(buckets)


def _add(pending: dict[Collective, float], collectives: Sized, share: float) -> None:
    for kind, size_bytes in collectives:
        pending[kind] = pending.get(kind, 0.0) + size_bytes * share


def _close(link: int, fraction: float, pending: dict[Collective, float]) -> Bucket:
    whole = tuple(replace(kind, size_bytes=round(size)) for kind, size in pending.items())
    return Bucket(link=link, fraction=fraction, collectives=whole)
