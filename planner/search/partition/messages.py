"""What the stages of a candidate send each other: activations after each chunk, and once a step gradients of tied tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import floor

from autoparallel.planner.expand import state
from autoparallel.planner.expand.expander import mesh_axes, scatters_messages
from autoparallel.planner.expand.schedules import V_SHAPED, rank_of_stage
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.exchanges import summed_line
from autoparallel.planner.search.bounds.prices import PriceBook
from autoparallel.planner.search.partition.forms import PS, Chain, PricedChain
from autoparallel.planner.search.partition.problem import Form
from autoparallel.planner.search.partition.ties import Names
from autoparallel.planner.search.space.candidates import Candidate
from autoparallel.planner.strategy.types import Strategy


def tied(
    book: PriceBook, chain: Chain, chosen: Candidate, strategy: Strategy, prices: PricedChain
) -> tuple[Form, ...]:
    """The exchange of gradients of tied tensors, which the stages wait for that hold them where these are on several ranks (the
    first and the last one, or that of a layer group and the last one), and the sum of gradients over the replicas, where that
    is due once a step."""
    form, ties = _summed(book, strategy, prices), chain.ties
    if chosen.mesh.pp == 1 or chosen.schedule in V_SHAPED:
        return (form,)
    axes, every = mesh_axes(strategy), range(len(book.expander.graph.chain))

    def exchange(names: Names) -> int:
        collectives = book.expander.tied(strategy, every, sorted(names))
        return floor(sum(book.pricer.collective_s(one, axes) for one in collectives) * PS)

    once = exchange(ties.ends)
    first, *others, last = form.fixed
    form = replace(form, fixed=(first + once, *others, last + once))
    between = ties.first & ties.tail if chosen.virtual_stages == 1 else Names()
    if not between:
        return (form,)
    # Both chunks wait unless the last one has the layer group: one form for either.
    more = [0] * len(form.kept)
    for name in sorted(between):
        more[ties.between[name]] += exchange(Names((name,)))
    *others, last = form.fixed
    return tuple(
        replace(
            form, fixed=(*others, last - sign * sum(more)),
            kept=tuple(k + sign * n for k, n in zip(form.kept, more, strict=True)),
            recomputed=tuple(k + sign * n for k, n in zip(form.recomputed, more, strict=True)),
        )
        for sign in (1, -1)
    )  # fmt: skip


def _summed(book: PriceBook, strategy: Strategy, prices: PricedChain) -> Form:
    """What a chunk's gradients take to be summed over the replicas once a step; nothing where they are no shards till then."""
    if not state.replicas_at_end(strategy):
        return prices.constant(0)
    whole = max(book.expander.graph.parameter_count, 1)
    dense, experts = (summed_line(book, strategy, whole, experts=one).each_s for one in (False, True))
    return prices.sums(lambda price: price.dense_trainable * dense + price.expert_trainable * experts)


def sends(problem: Problem, chain: Chain, book: PriceBook, strategy: Strategy, prices: PricedChain) -> Form:
    """The message after each chunk: the shortest there is, and what the one where it ends takes longer. On an irregular network
    the way back to the first rank is another."""
    there_s = _send_each_s(problem, chain, book, strategy)
    back_s = there_s
    if problem.cluster.network is not None and strategy.pipeline.virtual_stages > 1:
        back_s = _send_each_s(problem, chain, book, strategy, wraps=True)
    home = rank_of_stage(strategy.pipeline.schedule, strategy.mesh.pp, strategy.pipeline.virtual_stages)
    least_s, least_back_s = (_least_send_s(chain, each) for each in (there_s, back_s))
    wraps = [c + 1 < len(home) and home[c + 1] < home[c] for c in range(prices.chunks)]
    longer = [
        max(min(there_s[cut] - least_s, back_s[cut] - least_back_s), 0.0) if chain.messages[cut] else 0.0
        for cut in chain.cuts
    ]
    return replace(
        prices.constant(0),
        fixed=tuple(floor((least_back_s if back else least_s) * PS) for back in wraps),
        after=tuple(floor(seconds * PS) for seconds in longer) if any(longer) else (),
    )


def _least_send_s(chain: Chain, each_s: Sequence[float]) -> float:
    """The shortest of all messages that there are."""
    return min((each_s[cut] for cut in chain.sent), default=0.0)


def _send_each_s(
    problem: Problem, chain: Chain, book: PriceBook, strategy: Strategy, *, wraps: bool = False
) -> list[float]:
    """Seconds of each of the chain's messages to the next stage."""
    if strategy.mesh.pp == 1:
        return [0.0] * len(chain.messages)
    shared = strategy.shard.sequence_parallel or scatters_messages(strategy)
    parts = strategy.mesh.cp * (strategy.mesh.tp if shared else 1)
    dtype, micro = problem.execution.dtype, strategy.batch.micro
    sizes, axes = (
        [book.message_bytes(specs, dtype, micro, parts) for specs in chain.messages],
        mesh_axes(strategy),
    )
    sent_s = [book.send_s(axes, size, wraps=wraps) for size in sizes]
    if not scatters_messages(strategy):
        return sent_s
    return [
        seconds + book.join_s(axes, size * strategy.mesh.tp)
        for seconds, size in zip(sent_s, sizes, strict=True)
    ]
