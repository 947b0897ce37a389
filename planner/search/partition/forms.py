"""The stage problem of a candidate: block prices turned into integer forms per chunk, each a true lower bound.

A repeated block and the glue between it and the next one are one *layer group*: cuts fall between layer groups. Glue before
the first layer group (`head`) stands in the first chunk, glue after the last repeated block (`tail`) in the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import floor

from autoparallel.costmodel.graph import ModelGraph, TensorSpec
from autoparallel.planner.search.bounds.prices import BlockPrice
from autoparallel.planner.search.partition.problem import Form
from autoparallel.planner.search.partition.ties import Ties

PS = 1e12  # picoseconds per second
Prices = tuple[BlockPrice, ...]
Value = Callable[[BlockPrice], float]
Work = Callable[[BlockPrice], tuple[float, float]]  # seconds, and how much longer that takes on shared links

_Spans = Callable[[Prices, Work, float, Value], float]  # of blocks, before what is gathered next


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The model as layer groups: `kinds[j]` is the kind of layer group j; a kind is its chain of blocks."""

    head: tuple[int, ...]  # blocks before the first repeated one
    kinds: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]  # per kind, its blocks: the repeated one, then glue
    tail: tuple[int, ...]  # blocks after the last repeated one
    cuts: tuple[
        int, ...
    ] = ()  # before each layer group, and after the last one: which of `messages` is sent there
    messages: tuple[tuple[TensorSpec, ...], ...] = ()  # the distinct ones
    ties: Ties = field(default_factory=Ties)

    @property
    def counts(self) -> list[int]:
        """Layer groups of each kind."""
        return [self.kinds.count(kind) for kind in range(len(self.groups))]

    @property
    def places(self) -> tuple[int, ...]:
        """At how many places of the chain each of `messages` is sent; 0 of one that has nothing in it."""
        return tuple(self.cuts.count(cut) if specs else 0 for cut, specs in enumerate(self.messages))

    @property
    def sent(self) -> tuple[int, ...]:
        """Which of `messages` are sent somewhere, and have something in them."""
        return tuple(cut for cut in dict.fromkeys(self.cuts) if self.messages[cut])


def chain_of(graph: ModelGraph) -> Chain:
    """Cut the chain into layer groups; a model without repeated blocks is all head."""
    blocks = tuple(link.block for link in graph.chain)
    starts = graph.repeated_positions
    if not starts:
        ties = Ties.find(graph, blocks, (), (), ())
        return Chain(head=blocks, kinds=(), groups=(), tail=(), ties=ties)
    ends = (*starts[1:], starts[-1] + 1)
    runs = [blocks[a:b] for a, b in zip(starts, ends, strict=True)]
    groups = tuple(dict.fromkeys(runs))
    kinds = tuple(groups.index(run) for run in runs)
    sent = [graph.chain[start - 1].sends if start else () for start in starts] + [
        graph.chain[starts[-1]].sends
    ]
    messages = tuple(dict.fromkeys(sent))
    head, tail = blocks[: starts[0]], blocks[starts[-1] + 1 :]
    return Chain(
        head=head, kinds=kinds, groups=groups, tail=tail,
        cuts=tuple(messages.index(specs) for specs in sent), messages=messages,
        ties=Ties.find(graph, head, kinds, groups, tail),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedChain:
    """Prices of head and tail, and of each kind of layer group kept and recomputed (the same where nothing is)."""

    head: Prices
    tail: Prices
    kept: tuple[Prices, ...]
    recomputed: tuple[Prices, ...]
    chunks: int
    count: int  # layer groups
    compute_slowdown: float
    comm_slowdown: float

    def sums(self, value: Value, scale: float = PS) -> Form:
        """The sum of a value over a chunk's blocks."""
        return Form(
            kept=tuple(_down(sum(map(value, prices)), scale) for prices in self.kept),
            recomputed=tuple(_down(sum(map(value, prices)), scale) for prices in self.recomputed),
            fixed=self._ends(sum(map(value, self.head)), sum(map(value, self.tail)), scale),
        )

    def constant(self, value: float) -> Form:
        """The same for every chunk."""
        return Form(
            kept=(0,) * len(self.kept), recomputed=(0,) * len(self.kept),
            fixed=(_down(value, 1.0),) * self.chunks,
        )  # fmt: skip

    def streamed(self, work: Work, *, backward: bool) -> Form:
        """Computation that waits for gathered parameters, one block fetched ahead: exact for equal layer groups."""
        return self._streamed(work, self._spans, _regather_s if backward else _gather_s, backward=backward)

    def waits(self, work: Work, gathered: Value) -> Form:
        """By how much such a pass is longer than what it computes."""

        def longer(prices: Prices, work: Work, after: float, waited: Value) -> float:
            return self._spans(prices, work, after, waited) - sum(work(price)[0] for price in prices)

        return self._streamed(work, longer, gathered, backward=False)

    def _streamed(self, work: Work, spans: _Spans, waited: Value, *, backward: bool) -> Form:
        """The first gather of a chunk is waited for; then each block takes `span(its computation, the next gather)`.
        A layer group is charged with the smallest gather that may follow it; the last of a chunk is followed by none."""
        order = -1 if backward else 1
        groups = [prices[::order] for prices in (*self.kept, *self.recomputed)]
        first, final = (self.tail[::-1], self.head[::-1]) if backward else (self.head, self.tail)
        if not groups:
            alone = (*first, *final)
            whole = sum(map(waited, alone[:1])) + spans(alone, work, 0.0, waited)
            return Form(kept=(), recomputed=(), fixed=(_down(whole, PS),) * self.chunks)
        least = min(waited(prices[0]) for prices in groups)
        charged = [spans(prices, work, least, waited) for prices in groups]

        def too_much(gather_s: float, *more: BlockPrice) -> float:
            """What a chunk's last layer group (or one of `more`) is charged beyond a following gather of `gather_s`."""
            ends = [work(price) for price in (*(prices[-1] for prices in groups), *more)]
            return max(0.0, *(self.span(*end, least) - self.span(*end, gather_s) for end in ends))

        start, end = [least] * self.chunks, [-too_much(0.0)] * self.chunks
        begins, ends = (self.chunks - 1, 0) if backward else (0, self.chunks - 1)
        if final:
            start[ends] = min(least, waited(final[0]))
            end[ends] = spans(final, work, 0.0, waited) - too_much(waited(final[0]))
        if first:  # a chunk of nothing else ends with it
            start[begins] = waited(first[0]) + spans(first, work, least, waited)
            gather_s = waited(final[0]) if final and begins == ends else 0.0
            end[begins] += too_much(gather_s) - too_much(gather_s, first[-1])
        half = len(self.kept)
        return Form(
            kept=tuple(_down(u, PS) for u in charged[:half]),
            recomputed=tuple(_down(u, PS) for u in charged[half:]),
            fixed=tuple(_down(a + b, PS) for a, b in zip(start, end, strict=True)),
        )

    def beside(
        self, work: Work, communicate: Value, alone: Sequence[float] | None = None
    ) -> tuple[Form, ...]:
        """Computation w[i] of each block beside communication C on another stream, whatever overlaps: with both at once for
        o[i] seconds, the one slowed s[i] times and the other m[i] times,

            t = sum w[i] + C - sum k[i] o[i]    k = 1/s + 1/m - 1    o[i] <= w[i] s[i]    sum o[i] / m[i] <= C

        which for every x >= 0 is no less than sum w (1 - max(k - x/m, 0) s) + (1 - x) C: the best x is 0 or a block's k m. Of C
        nothing is computed beside the seconds `alone` [chunk], which are taken from it and added whole: x of them more.
        """

        def rates(price: BlockPrice) -> tuple[float, float, float]:
            slow, slow_comm = self._slow(*work(price))
            return slow, slow_comm, max(1.0 / slow + 1.0 / slow_comm - 1.0, 0.0)

        def worth(price: BlockPrice) -> float:
            _, slow_comm, gain = rates(price)
            return gain * slow_comm

        def least(x: float) -> Form:
            def value(price: BlockPrice) -> float:
                slow, slow_comm, gain = rates(price)
                hidden = max(gain - x / slow_comm, 0.0) * slow
                return work(price)[0] * max(1.0 - hidden, 0.0) + max(1.0 - x, 0.0) * communicate(price)

            form = self.sums(value)
            if alone is None:
                return form
            more = (_down(min(x, 1.0) * seconds, PS) for seconds in alone)
            return replace(form, fixed=tuple(a + b for a, b in zip(form.fixed, more, strict=True)))

        every = (
            *self.head,
            *self.tail,
            *(price for prices in (*self.kept, *self.recomputed) for price in prices),
        )
        return tuple(least(x) for x in sorted({0.0, *map(worth, every)}, reverse=True))

    def ending(self, value: Value, *, backward: bool) -> tuple[float, ...]:
        """By chunk, what the last link of a pass through it has at least of a value."""
        order = -1 if backward else 1
        side, other = (self.head, self.tail) if backward else (self.tail, self.head)
        links = [prices[::order][-1] for prices in (*self.kept, *self.recomputed)]
        inside = min(map(value, links), default=0.0)
        found = [inside] * self.chunks
        if other:  # a chunk of nothing else ends with these
            found[-1 if backward else 0] = (
                min(inside, value(other[::order][-1])) if links else value(other[::order][-1])
            )
        if side:
            found[0 if backward else -1] = value(side[::order][-1])
        return tuple(found)

    def left(self, work: Work, communicate: Value) -> Form:
        """Communication that is left after a computation w beside it: C - w s/m at least (`beside`), negative where that may
        hide all of it."""

        return self.sums(lambda price: self.left_s(price, work, communicate(price)))

    def left_s(self, price: BlockPrice, work: Work, communicate_s: float) -> float:
        """`left` of one block."""
        slow, slow_comm = self._slow(*work(price))
        return communicate_s - work(price)[0] * slow / slow_comm

    def hides_s(self, price: BlockPrice, work: Work) -> float:
        """Of a block's computation what communication beside it takes no time of (`beside`)."""
        slow, slow_comm = self._slow(*work(price))
        return work(price)[0] * slow * max(1.0 / slow + 1.0 / slow_comm - 1.0, 0.0)

    def _slow(self, compute_s: float, contended_s: float) -> tuple[float, float]:
        """How many times as long a computation takes beside communication, and that beside it."""
        contention = contended_s / compute_s if compute_s else 0.0
        return 1.0 + self.compute_slowdown + contention, 1.0 + self.comm_slowdown + contention

    def span(self, compute_s: float, contended_s: float, gather_s: float) -> float:
        """Seconds until both a computation and the gather beside it are done, each slowing the other."""
        slow, slow_comm = self._slow(compute_s, contended_s)
        if gather_s <= 0.0:
            return compute_s
        if compute_s * slow >= gather_s * slow_comm:
            return compute_s + gather_s * slow_comm * (1.0 - 1.0 / slow)
        return gather_s + compute_s * slow * (1.0 - 1.0 / slow_comm)

    def _spans(self, prices: Prices, work: Work, after: float, waited: Value) -> float:
        following = [*map(waited, prices[1:]), after]
        return sum(self.span(*work(price), gather) for price, gather in zip(prices, following, strict=True))

    def _ends(self, first: float, last: float, scale: float) -> tuple[int, ...]:
        if self.chunks == 1:
            return (_down(first + last, scale),)
        return (_down(first, scale), *(0,) * (self.chunks - 2), _down(last, scale))


def _gather_s(price: BlockPrice) -> float:
    return price.gather_s


def _regather_s(price: BlockPrice) -> float:
    return price.regather_s


def _down(value: float, scale: float) -> int:
    return floor(value * scale)


def more_of(form: Form, fixed: Sequence[int]) -> Form:
    """A form and so much more of each chunk."""
    return replace(form, fixed=tuple(a + b for a, b in zip(form.fixed, fixed, strict=True)))
