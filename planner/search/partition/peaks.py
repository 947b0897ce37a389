"""Peak bytes of one action of a chunk above what the rank holds when it starts: lower bounds as integer forms.

As `costmodel.memory` walks them: a block runs on top of what the blocks before it saved; its temporaries, what its
recomputation makes, its gathered parameters and the next block's, and gradients on their way live beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import accumulate

from autoparallel.planner.search.bounds.prices import BlockPrice
from autoparallel.planner.search.partition.forms import PricedChain, Prices
from autoparallel.planner.search.partition.problem import Form, Quantity, starts_of

Ends = Sequence[Collection[int]]  # per chunk, the kinds that its last layer group can be of


def last_kinds(kinds: Sequence[int], least: Sequence[int], most: Sequence[int]) -> Ends:
    """The kinds that each chunk's last layer group can be of, where chunks have `least` to `most` of the layer groups
    in order."""
    first = [before + 1 for before in accumulate(least, initial=0)]
    ends = starts_of(len(kinds), least, most)[1:]
    return [
        frozenset(kinds[max(a, end.start) - 1 : end.stop - 1]) for a, end in zip(first, ends, strict=False)
    ]


def forward_peak(chain: PricedChain, ends: Ends) -> Quantity:
    """The last layer group's forward on top of all that is saved, the one before it while the last one's parameters come
    in, and the blocks of head and tail."""
    saved = chain.sums(lambda price: price.saved, 1.0)
    tail_saved = sum(price.saved for price in chain.tail)
    groups = (*chain.kept, *chain.recomputed)
    by_kind = [min(_running(prices, _forward_of) for prices in kind) for kind in _by_kind(chain)]
    last = _least(ends, by_kind)
    first_tail = chain.tail[0].gather_bytes if chain.tail else 0
    every = [True] * chain.chunks
    on_groups = _on_last(saved, _and_last([0] * chain.chunks, first_tail - tail_saved), by_kind, ends)
    tail = _running(chain.tail, _forward_of) if chain.tail else last[-1] - tail_saved
    on_tail = _shifted(saved, [*last[:-1], tail], groups=[*every[1:], not chain.tail])
    on_head = _alone(chain, max((_forward_of(price) for price in chain.head), default=0))
    forms = [on_groups, on_tail, on_head]
    coming = _next_gather(groups, 0)
    if coming:  # needs a layer group before the last
        most = max(sum(price.saved for price in prices) for prices in groups)
        own = min(_forward_of(prices[-1]) for prices in groups) + coming - most
        before = _shifted(saved, _and_last([own] * chain.chunks, -tail_saved), groups=every)
        forms.append(replace(before, when_few=-coming))
    return Quantity(forms=tuple(dict.fromkeys(forms)))


def backward_peak(chain: PricedChain, ends: Ends) -> Quantity:
    """The first block to run backwards with all that is saved beside it: of the tail, or of the layer groups; and the
    second layer group, beside the gradients of the first."""
    saved = chain.sums(lambda price: price.saved, 1.0)
    tail_saved = sum(price.saved for price in chain.tail)
    by_kind = [_backward_of(prices[-1]) for prices in chain.kept]
    kept = _least(ends, by_kind)
    again = _least(ends, [_backward_of(prices[-1]) for prices in chain.recomputed])
    groups = (*chain.kept, *chain.recomputed)
    coming = _next_gather(groups, -1)
    every = [True] * chain.chunks
    # Where activations are on the host, a recomputed layer group, which has fewer to bring back, may need less than a
    # kept one.
    more = min(b - a for a, b in zip(kept, again, strict=True)) if chain.kept else 0
    reducing = chain.tail[0].reduce_bytes if chain.tail else 0
    on_groups = _on_last(saved, _and_last([coming] * chain.chunks, reducing - tail_saved), by_kind, ends)
    on_groups = replace(on_groups, when_all=more, when_few=-coming)
    least = list(map(min, kept, again))
    tail = 0 if chain.tail else least[-1]  # a last chunk may hold the tail alone
    held, before = 0, 0
    for number in range(len(chain.tail) - 1, -1, -1):
        price = chain.tail[number]
        gathers = chain.tail[number - 1].gather_bytes if number else 0
        tail = max(tail, held + _backward_of(price) + gathers + before)
        held, before = held - price.saved, price.reduce_bytes
    on_tail = _shifted(saved, [*least[:-1], tail], groups=[*every[1:], not chain.tail])
    on_head = _alone(chain, max((_backward_of(price) + price.saved for price in chain.head), default=0))
    forms = [on_groups, on_tail, on_head]
    reduced = min((prices[0].reduce_bytes for prices in groups), default=0)
    if reduced:
        most = max(sum(price.saved for price in prices) for prices in groups)
        third = coming if chain.chunks == 1 and chain.count > 2 else 0
        own = min(_backward_of(prices[-1]) for prices in groups) + reduced + third - most
        second = _shifted(saved, _and_last([own] * chain.chunks, -tail_saved), groups=every)
        forms.append(replace(second, when_few=-reduced))
    return Quantity(forms=tuple(dict.fromkeys(forms)))


def _on_last(form: Form, more: Sequence[int], by_kind: Sequence[int], ends: Ends) -> Form:
    """The form, and in each chunk that has layer groups `more` and what its last layer group needs, `by_kind`."""
    every = [True] * len(more)
    if any(len({by_kind[kind] for kind in kinds}) > 1 for kinds in ends):
        return replace(_shifted(form, more, groups=every), last=tuple(by_kind))
    alike = [a + b for a, b in zip(more, _least(ends, by_kind), strict=True)]
    return _shifted(form, alike, groups=every)


def _by_kind(chain: PricedChain) -> list[tuple[Prices, Prices]]:
    """Of each kind of layer group, its blocks kept and recomputed."""
    return list(zip(chain.kept, chain.recomputed, strict=True))


def _least(ends: Ends, values: Sequence[int]) -> list[int]:
    """Per chunk, the least of the values of the kinds that its last layer group can be of."""
    return [min((values[kind] for kind in kinds), default=0) for kinds in ends]


def _and_last(values: Sequence[int], more: int) -> list[int]:
    """The values of the chunks, that of the last chunk with `more`."""
    return [*values[:-1], values[-1] + more]


def _next_gather(groups: Sequence[Prices], position: int) -> int:
    """Parameters that come in beside a layer group, for the one that runs next: those of its first block to run."""
    return min((prices[position].gather_bytes for prices in groups), default=0)


def weight_peak(chain: PricedChain) -> Quantity:
    """What a split backward kept for the weight gradients, and the gradients of one block."""
    kept = chain.sums(lambda price: price.weight_saved, 1.0)
    gradients = min((prices[0].reduce_bytes for prices in chain.kept), default=0)
    return Quantity(forms=(_shifted(kept, [gradients] * chain.chunks, groups=[True] * chain.chunks),))


def in_halves(chain: PricedChain, *, some_whole: bool) -> PricedChain:
    """The prices of which `backward_peak` is that of first halves, beside which nothing is reduced; and of whole passes, of which there are
    `some_whole`, no more."""

    def halved(price: BlockPrice) -> BlockPrice:
        peak = min(price.half_peak, _backward_of(price)) if some_whole else price.half_peak
        return replace(price, backward_temp=peak - price.recomputed, gather_bytes=0, reduce_bytes=0)

    def each(prices: Prices) -> Prices:
        return tuple(map(halved, prices))

    kept, recomputed = (tuple(map(each, groups)) for groups in (chain.kept, chain.recomputed))
    return replace(chain, head=each(chain.head), tail=each(chain.tail), kept=kept, recomputed=recomputed)


def _forward_of(price: BlockPrice) -> int:
    return price.forward_temp + price.gather_bytes


def _backward_of(price: BlockPrice) -> int:
    return price.recomputed + price.backward_temp + price.gather_bytes + price.reduce_bytes


def _running(prices: Prices, peak: Callable[[BlockPrice], int]) -> int:
    """Largest of: a block's peak less what the blocks after it save."""
    after, found = 0, []
    for number in range(len(prices) - 1, -1, -1):
        gathers = prices[number + 1].gather_bytes if number + 1 < len(prices) else 0
        found.append(peak(prices[number]) + gathers - after)
        after += prices[number].saved
    return max(found, default=0)


def _shifted(form: Form, more: Sequence[int], *, groups: Sequence[bool]) -> Form:
    """The form and `more` in each chunk; where that comes from the chunk's `groups`, only if it has some."""
    fixed = tuple(a + b for a, b in zip(form.fixed, more, strict=True))
    none = tuple(-b if b > 0 and group else 0 for b, group in zip(more, groups, strict=True))
    return Form(kept=form.kept, recomputed=form.recomputed, fixed=fixed, when_none=none if any(none) else ())


def _alone(chain: PricedChain, first: int) -> Form:
    """A peak in the first chunk that does not depend on its layer groups."""
    zero = (0,) * len(chain.kept)
    return Form(kept=zero, recomputed=zero, fixed=(first, *(0,) * (chain.chunks - 1)))
