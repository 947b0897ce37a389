"""What a chunk takes beside what its layers add up to: latencies, and the wait for the first bucket of gradients.

A collective takes so many seconds however small it is, and so many for each byte (`prices.Line`). A chunk that has any gradients
reduces some when all else of its last backward is over, and gathers some after its update. And where reductions stand in line on
their link (`bounds/ends.py`), a bucket of b of s bytes is full when so much of a backward of w seconds is over, w b / s, and there are
s / b of them, each of which takes a seconds beside what its bytes do: no less than 2 sqrt(w a) in all, whatever b.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import floor, sqrt

from autoparallel.planner.expand import state
from autoparallel.planner.expand.expander import mesh_axes
from autoparallel.planner.search.bounds.prices import BlockPrice, PriceBook
from autoparallel.planner.search.partition.forms import PS, PricedChain, Work, more_of
from autoparallel.planner.search.partition.problem import Form, Quantity
from autoparallel.planner.strategy.types import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """By chunk: whether it has any gradients of its own, `some`; and whether it may have none, as it may have no layer, `empty`.
    `most` layers that any chunk may have."""

    prices: PricedChain
    some: tuple[bool, ...]
    empty: tuple[bool, ...]
    most: int

    @staticmethod
    def of(prices: PricedChain, least: Sequence[int]) -> Once:
        """`least`: the layers that each chunk has at least."""
        groups = [any(price.dense_trainable for price in group) for group in prices.kept]
        head, tail = (any(price.dense_trainable for price in side) for side in (prices.head, prices.tail))
        ends = [(head and c == 0) or (tail and c == prices.chunks - 1) for c in range(prices.chunks)]
        inside = bool(groups) and all(groups)
        return Once(
            prices=prices,
            some=tuple(end or inside for end in ends),
            empty=tuple(inside and not end and not n for end, n in zip(ends, least, strict=True)),
            most=max(prices.count - sum(least) + max(least, default=0), 1),
        )

    def more(self, form: Form, seconds: float) -> Form:
        """A form, and so many seconds more of each chunk that has gradients."""
        once = max(floor(seconds * PS), 0)
        return self._added(form, once) if once else form

    def in_line(self, form: Form, work: Callable[[BlockPrice], float], latency_s: float) -> Form | None:
        """A form of backwards beside reductions, or of what is left of these, and 2 sqrt(w a) more for each chunk that has layers:
        w = `work` of them. None where that says no more than the latency itself."""
        links = [price for group in self.prices.kept for price in group]
        experts = any(price.expert_trainable for price in (*links, *self.prices.head, *self.prices.tail))
        rate = min((work(p) / p.trainable for p in (*links, *self.prices.tail) if p.trainable), default=0.0)
        held = min((sum(p.trainable for p in group) for group in self.prices.kept), default=0)
        one_s = 2.0 * sqrt(max(rate * held, 0.0) * max(latency_s, 0.0))
        if experts or one_s <= latency_s:  # experts' reductions fill buckets, too
            return None
        # Of the root the chord from one layer to all that a chunk may have, which is below it.
        slope = one_s * (sqrt(self.most) - 1) / max(self.most - 1, 1)
        each, once = floor(slope * PS), floor((one_s - slope) * PS)
        rising = replace(
            form, kept=tuple(k + each for k in form.kept), recomputed=tuple(k + each for k in form.recomputed)
        )
        layers = replace(self, some=(True,) * self.prices.chunks, empty=(True,) * self.prices.chunks)
        return layers._added(rising, once)

    def _added(self, form: Form, once: int) -> Form:
        fixed = tuple(value + once * some for value, some in zip(form.fixed, self.some, strict=True))
        if not any(self.empty):
            return replace(form, fixed=fixed)
        none = form.when_none or (0,) * len(self.empty)
        less = tuple(value - once * empty for value, empty in zip(none, self.empty, strict=True))
        return replace(form, fixed=fixed, when_none=less)


def reduction_once_s(book: PriceBook, strategy: Strategy) -> float:
    """Seconds of a bucket of gradients beside what its bytes take; 0 where layers reduce theirs apart (ZeRO-3)."""
    if state.zero_level(strategy) == 3 or not strategy.grad_sync.bucket_mib:
        return 0.0
    return book.reduce_line(strategy, mesh_axes(strategy)).least_s


def with_latency(
    once: Once, forms: Sequence[Form], work: Work, latency_s: float, hidden: Form | None
) -> tuple[Form, ...]:
    """Forms of a pass that ends with reductions, of which the last takes its latency when all else is over; `hidden`, one of them, is
    that of communication beside which all computation is hidden that can be."""
    if not latency_s:
        return tuple(forms)
    found = [once.more(form, latency_s) for form in forms]
    if hidden is not None:
        line = once.in_line(hidden, lambda price: once.prices.hides_s(price, work), latency_s)
        found += [line] if line is not None else []
    return tuple(found)


def left_of(
    once: Once, work: Work, head: Sequence[int], latency_s: float, *, none: bool, beside: bool
) -> Quantity:
    """What is left of a chunk's reduction after such a pass, beside which it may run, of the `head`'s so much at least; `none` where
    each pass ends with it."""
    prices, nothing = once.prices, once.prices.constant(0)
    if none:
        return Quantity(forms=(nothing,))
    left = (
        prices.left(work, lambda price: price.reduce_s)
        if beside
        else prices.sums(lambda price: price.reduce_s)
    )
    forms = [once.more(more_of(nothing, head), latency_s)]
    if min((*left.kept, *left.recomputed), default=0) >= 0:
        forms.append(once.more(left, latency_s))
        line = (
            once.in_line(left, lambda price: -prices.left_s(price, work, 0.0), latency_s) if beside else None
        )
        forms += [line] if line is not None else []
    return Quantity(forms=tuple(forms))
