"""Further plans of the Pareto set of tensor plans (`planner.sharding.pareto`), searched where they may be worth it.

The search proper runs every setting (tp, sequence parallelism, ep) with the first plan of its tensor plans. Others are
asked for where, were memory without limit, some variant of the setting could be better than the best strategy:

    FASTEST   in any such setting
    a price   where memory raises the bound of such a variant: what recomputation takes for a KiB that it frees. A plan
              that frees memory for less is the best at that price; where the first plan is, recomputing blocks is the
              cheaper way
    LEANEST   where no price says what memory is worth: memory is the objective or nothing fits (then in any setting that
              comes near), there is no more to recompute than the best strategy does, or that has
              optimizer state on the host

Each plan is a search of its own over its setting, with its `[[tensor]]` entries as constraints and the best value before it
to begin with: bounds and simulations are those of the plan itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np

from autoparallel.errors import UserError
from autoparallel.planner.problem import Objective
from autoparallel.planner.search import spending
from autoparallel.planner.search.bounds.outer import Outer, bound_variants, build_outer, expand_quickly
from autoparallel.planner.search.bounds.settings import representative
from autoparallel.planner.search.bounds.variants import Bounds
from autoparallel.planner.search.driver import Search, Stopped
from autoparallel.planner.search.evaluate import TOLERANCE
from autoparallel.planner.search.open import values_of
from autoparallel.planner.search.space.meshes import Bools, Floats, Ints
from autoparallel.planner.sharding.pareto import FASTEST, LEANEST, WORTH, whole_cost
from autoparallel.planner.sharding.plan import TensorPlan
from autoparallel.planner.strategy.types import Offload, Strategy, TensorRule

PLANS_SHARE = 0.2  # of a search's work, for further plans after one that stopped
SLICE = 150.0  # work done on one of them at a time. Kind: measured
SHAPES_ASKED = 16  # of a setting, those with the least bounds, that say whether it is asked for
VARIANTS_ASKED = 256  # of these shapes likewise
BINDS = 1.001  # times its bound without limit that a variant takes where memory binds. Kind: formula
# Share of what a device needs that a tensor plan frees at most. Kind: formula: kept activations are rarely half of it.
MOST_FREED = 0.5
NS_PER_S = 1e9
KIB = 1024
NO_LIMIT_BYTES = 1e18  # more than any device has


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A setting of which further plans are asked for: a strategy of it, its shapes that could be better than the best
    strategy were memory without limit, and the prices of memory."""

    strategy: Strategy
    rows: Ints
    prices: tuple[float, ...]


def asked_plans(search: Search) -> Iterator[tuple[Ints, tuple[TensorRule, ...]]]:
    """Shapes and the entries of a further plan to search them with, for the best strategy that is known."""
    outer = search.outer
    for asked in list(_asked(search)):
        for price in asked.prices:
            search.sims.work += spending.PER_TENSOR_BLOCK * len(outer.problem.graph.blocks)
            plan = outer.book.expander.works.pareto_plan(asked.strategy, price)
            if plan is not None and _pays(outer, asked.strategy, plan, price):
                yield asked.rows, plan.rules


def search_tensor_plans(
    search: Search, check: Callable[[Search], None], *, ended: bool = True, most_work: float = inf
) -> bool:
    """Search further plans of the settings that ask for them; `search`, whose search is over, takes over what is
    found. They take `most_work` in all, `PLANS_SHARE` of it where `search` has not `ended`, the one with the least bound first;
    what is then still open counts in the bound of `search`. Whether all of them came to an end; `check` is called before every
    step and raises Stopped."""
    opened: list[Search] = []
    for rows, rules in asked_plans(search):
        plan = _of_plan(search.outer, rows, rules)
        if plan is not None:
            opened.append(Search(outer=plan, check=check, below=search.value))
            opened[-1].open()
            search.taken.append(opened[-1])
    left = most_work * (1.0 if ended else PLANS_SHARE)
    while opened and left > 0.0:
        own = min(opened, key=lambda one: one.dual.bound())
        if not ended and own.dual.bound() >= search.dual.bound():
            break  # nothing here is less proved than what `search` has left open
        own.sims.value, before = min(own.value, search.value), own.work
        own.check = partial(_check_slice, check, before + min(left, SLICE))
        if _searched(search, own):
            opened.remove(own)
        left -= own.work - before
        search.sims.work += own.work - before
        check(search)
    return not opened


def _check_slice(check: Callable[[Search], None], until: float, own: Search) -> None:
    """The check of a search that also stops at so much work."""
    check(own)
    if own.work >= until:
        raise Stopped


def _searched(search: Search, own: Search) -> bool:
    """Go on with a tensor plan below the best value, and take over what it finds; whether that came to an end."""
    known = len(own.seen)
    try:
        return own.ended()
    finally:
        search.seen.extend(own.seen[known:])
        if own.incumbent is not None:
            search.consider(own.incumbent)


def _pays(outer: Outer, strategy: Strategy, plan: TensorPlan, price: float) -> bool:
    """Whether a tensor plan is the better one at its price of memory also by what the program will take: fused kernels, and
    what they keep, are the solver's to guess only."""
    (own_s, own_kib), (time_s, kib) = (
        _real(outer, one, held) for one, held in (
            (strategy, outer.book.expander.tensor_plan(strategy)), (replace(strategy, tensor=plan.rules), plan),
        )
    )  # fmt: skip
    if price == LEANEST:
        return kib < own_kib * (1 - WORTH)
    return time_s + price * kib / NS_PER_S < (own_s + price * own_kib / NS_PER_S) * (1 - WORTH)


def _real(outer: Outer, strategy: Strategy, plan: TensorPlan) -> tuple[float, float]:
    """Seconds of a micro-batch through all blocks, and kibibytes held and kept."""
    prices = [outer.book.block_price(strategy, link.block, "none") for link in outer.problem.graph.chain]
    kept = sum(price.saved for price in prices) / KIB
    return sum(price.forward_s + price.backward_s for price in prices), kept + whole_cost(
        outer.problem.graph, plan
    ).held_kib


def _of_plan(outer: Outer, rows: Ints, rules: tuple[TensorRule, ...]) -> Outer | None:
    """The space of some shapes with a tensor plan's entries; None where these do not suit them."""
    problem = replace(outer.problem, constraints={**outer.problem.constraints, "tensor": rules})
    space = replace(outer.space, shapes=outer.space.shapes.take(rows))
    with suppress(UserError):
        return build_outer(problem, space, outer.chain, outer.book, outer.capacity_bytes)
    return None


def _asked(search: Search) -> Iterator[Asked]:
    """The settings that ask for further plans."""
    outer, best = search.outer, search.incumbent
    shapes = outer.space.shapes
    sharded = shapes.tp > 1
    if not sharded.any():
        return
    keys = np.stack([shapes.tp, shapes.sequence_parallel, shapes.ep], axis=1)
    if best is None or outer.problem.objective == Objective.MEMORY:
        yield from _leanest(search, keys)
        return
    could = sharded & _below(search, outer.bounds.time_s, np.arange(len(shapes)))
    for key in np.unique(keys[could], axis=0):
        rows = np.flatnonzero(could & (keys == key).all(axis=1))
        yield from _of_setting(search, outer.best_first(rows, SHAPES_ASKED))


def _leanest(search: Search, keys: Ints) -> Iterator[Asked]:
    """What is asked for where only memory counts: every setting that comes near the best strategy, or near fitting."""
    outer, best = search.outer, search.incumbent
    most_bytes = outer.capacity_bytes if best is None else search.value[0]
    if best is None:  # of what does not fit nothing is known yet
        outer = build_outer(outer.problem, outer.space, outer.chain, outer.book, NO_LIMIT_BYTES)
    least_bytes = np.where(np.isfinite(outer.bounds.time_s), outer.bounds.memory_bytes, inf)
    open_ = (keys[:, 0] > 1) & (least_bytes * (1 - MOST_FREED) <= most_bytes)
    for key in np.unique(keys[open_], axis=0):
        rows = np.flatnonzero(open_ & (keys == key).all(axis=1))
        example = _example(outer, int(rows[np.argmin(least_bytes[rows])]))
        yield Asked(strategy=example, rows=rows, prices=(LEANEST,))


def _of_setting(search: Search, rows: Ints) -> Iterator[Asked]:
    """What a setting asks for, by the bounds of its best shapes with and without a limit of memory."""
    outer = search.outer
    found, bounds = expand_quickly(_without_limit(outer), rows)
    kept = np.flatnonzero(_below(search, bounds.time_s, found.shape))
    found = found.take(kept[np.argsort(bounds.time_s[kept], kind="stable")][:VARIANTS_ASKED])
    free_s = bound_variants(_without_limit(outer), found, inf).time_s
    open_ = _below(search, free_s, found.shape)
    found, free_s = found.take(open_), free_s[open_]
    if not len(found):
        return
    strategy = _example(outer, int(found.shape[np.argmin(free_s)]))
    binds = bool((bound_variants(outer, found, inf).time_s > free_s * BINDS).any())
    yield Asked(strategy=strategy, rows=rows, prices=(FASTEST, *(_prices(search, strategy) if binds else ())))


def _prices(search: Search, strategy: Strategy) -> tuple[float, ...]:
    """Nanoseconds per KiB that recomputation in full takes for what it frees, of the kind of block where that is least;
    and any price, where there is no more to recompute than the best strategy does, or where that has optimizer
    state on the host."""
    outer, best = search.outer, search.incumbent
    rates = []
    for group in outer.chain.groups:
        none, full = (outer.book.block_price(strategy, group[0], mode) for mode in ("none", "full"))
        if none.saved > full.saved:
            rates.append((full.backward_s - none.backward_s) / (none.saved - full.saved))
    if not rates or outer.problem.fixed.recomputed is not None:
        return (LEANEST,)
    assert best is not None
    recompute = best.strategy.recompute
    spent = recompute.mode == "full" or sum(recompute.per_stage) == len(outer.chain.kinds)
    spent |= best.strategy.offload.optimizer > 0  # which takes time in every step
    return (max(min(rates), 0.0) * NS_PER_S * KIB, *((LEANEST,) if spent else ()))


def _example(outer: Outer, shape: int) -> Strategy:
    """A strategy of a shape as its prices were made for: without a pipeline, tensor parallelism between neighbours; and
    nothing on the host."""
    key = outer.prices.keys[outer.prices.setting_of[shape]]
    return replace(representative(outer.problem, outer.chain, key), offload=Offload())


def _below(search: Search, time_s: Floats, shape: Ints) -> Bools:
    """Which bounds of variants of these shapes could be better than the best strategy."""
    outer = search.outer
    bounds = Bounds(time_s=time_s, memory_bytes=np.zeros(len(time_s)))
    values = values_of(outer.problem, bounds, outer.space.shapes.devices[shape])
    return np.asarray(values.first < search.value[0] * (1 - TOLERANCE))


def _without_limit(outer: Outer) -> Outer:
    return replace(outer, capacity_bytes=NO_LIMIT_BYTES)
