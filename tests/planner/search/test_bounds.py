"""Lower bounds never exceed what the simulation says, whatever the deal; and they are close where it matters."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest

from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds import tables
from autoparallel.planner.search.bounds.outer import (
    Outer,
    bound_variants,
    exchange_bounds,
    expand_quickly,
    expand_shapes,
    outer_of,
    refined_bounds,
)
from autoparallel.planner.search.bounds.variants import Bounds
from autoparallel.planner.search.evaluate import evaluate
from autoparallel.planner.plan import plan
from autoparallel.planner.search.space.build import MODES, Variants
from autoparallel.planner.search.space.candidates import Candidate, candidate, strategy_of
from autoparallel.planner.search.partition.deals import even_deal
from autoparallel.planner.search.partition.inner import price_candidate, stage_problem, with_paths
from autoparallel.planner.search.partition.problem import Deal, deal_value, row_values
from autoparallel.planner.search.partition.rows import path_row
from autoparallel.planner.strategy.types import Execution, Mesh, Offload
from autoparallel.profiles.load import load_cluster
from tests.toy_graphs import toy_transformer

FOREVER = float("inf")
CASES = [
    (cluster, scale, kernels)
    for cluster in ("h100-sxm:1x4", "a100-pcie-80gb:2x2", "cpu-gloo:1x4")
    for scale, kernels in ((1, "fused"), (8, "eager"), (16, "fused"))
]


def outer_for(cluster: str, scale: int, kernels: str) -> Outer:
    graph = toy_transformer(
        layers=4, hidden=64 * scale, heads=4, seq=32 * scale, vocab=512 * scale, tied=scale == 8,
        ffns=(128 * scale, 512 * scale) if scale == 1 else (),
    )  # fmt: skip
    execution = Execution(
        kernels=kernels,
        dtype="fp32" if cluster.startswith("cpu") else "bf16",
        param_dtype="fp32" if scale == 8 else "bf16",
    )
    outer = outer_of(
        Problem(
            graph=graph, cluster=load_cluster(cluster), global_batch=8, allow_lossy=True, execution=execution
        )
    )
    assert outer is not None
    outer.settle(np.arange(len(outer.space.shapes)))
    return outer


def random_deal(rng: random.Random, outer: Outer, chosen: Candidate) -> Deal:
    blocks = len(outer.chain.kinds)
    if rng.random() < 0.4:
        dealt = even_deal(blocks, chosen.chunks).blocks
    else:
        while True:
            cuts = sorted(rng.choices(range(blocks + 1), k=chosen.chunks - 1))
            dealt = tuple(b - a for a, b in zip([0, *cuts], [*cuts, blocks], strict=True))
            if all(n > 0 for n in dealt[1:-1]):
                break
            if chosen.chunks - 2 >= blocks:
                return even_deal(blocks, chosen.chunks)
    free = chosen.mode != "full" and rng.random() < 0.5
    return Deal(blocks=dealt, recomputed=tuple(rng.randint(0, n) if free else 0 for n in dealt))


@pytest.mark.parametrize(("cluster", "scale", "kernels"), CASES)
def test_no_bound_exceeds_the_simulation(cluster: str, scale: int, kernels: str) -> None:
    outer, rng = outer_for(cluster, scale, kernels), random.Random(scale)
    every, bounds = expand_shapes(outer, np.arange(len(outer.space.shapes)), FOREVER, memory=True)
    placed = outer.wires.inner_placements(every)
    away = np.flatnonzero(outer.space.shapes.activations_away[every.shape] > 0).tolist()
    for row in [*rng.sample(range(len(every)), 25), *rng.sample(away, min(len(away), 15))]:
        chosen = candidate(outer.space, every, row)
        deal = random_deal(rng, outer, chosen)
        found = evaluate(outer.book.expander, strategy_of(outer.problem, chosen, deal))
        shape, shown = int(every.shape[row]), f"{chosen}\n{deal}"
        assert outer.bounds.time_s[shape] <= found.step_time_s * (1 + 1e-9), shown
        assert outer.bounds.memory_bytes[shape] <= found.peak_bytes, shown
        assert bounds.memory_bytes[row] <= found.peak_bytes + 1, shown
        tight = replace(outer, capacity_bytes=float(found.peak_bytes))
        one: Variants = every.take(np.array([row]))
        time_s = bound_variants(tight, one, FOREVER).time_s[0]
        assert time_s <= found.step_time_s * (1 + 1e-9), shown
        if placed[row]:
            refined = refined_bounds(tight, one, chosen.mesh, FOREVER, memory=False)
            assert refined.time_s[0] <= found.step_time_s * (1 + 1e-9), shown
        _stage_problem_is_below(outer, chosen, deal, shown, random_deal(rng, outer, chosen))


@pytest.mark.parametrize(("cluster", "scale", "kernels"), CASES)
def test_a_core_bounds_its_settings(
    cluster: str, scale: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = outer_for(cluster, scale, kernels)
    monkeypatch.setattr(tables, "MANY", 0)
    loose = outer_of(exact.problem)
    assert loose is not None
    assert not loose.table.exact.all()
    fits = np.isfinite(exact.units.unit_forward_s)
    for name in (f.name for f in fields(exact.units)):
        one, other = getattr(loose.units, name), getattr(exact.units, name)
        assert (one[fits] <= other[fits] * (1 + 1e-12)).all(), name
    assert (loose.bounds.time_s <= exact.bounds.time_s * (1 + 1e-12)).all()
    assert (loose.bounds.memory_bytes <= exact.bounds.memory_bytes * (1 + 1e-12)).all()


@pytest.mark.parametrize(("cluster", "scale", "kernels"), CASES[::2])
def test_a_block_holds_no_less_in_its_backward_than_its_core_does(
    cluster: str, scale: int, kernels: str
) -> None:
    outer = outer_for(cluster, scale, kernels)

    def held(key: list[float]) -> list[int]:
        """Of each kind of block, kept and recomputed in full."""
        strategy = tables.representative(outer.problem, outer.chain, key)
        modes = dict.fromkeys((strategy.recompute.mode, "full"))
        links = [outer.book.link(strategy, unit[0], mode) for unit in outer.chain.units for mode in modes]
        return [link.saved + link.recomputed + link.backward_temp for link in links]

    for key in outer.table.settings.tolist():
        assert min(held(key)) >= min(held([0, *key[1:3], MODES.index("none"), *key[4:]])), key


def test_shapes_settled_one_by_one_are_bounded_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = outer_for(*CASES[0])
    monkeypatch.setattr(tables, "MANY", 0)
    loose = outer_of(exact.problem)
    assert loose is not None
    untouched = loose.copy()
    for shape in np.random.default_rng(0).permutation(len(loose.space.shapes)):
        loose.settle(np.array([shape]))
    assert loose.table.exact.all()
    assert not untouched.table.exact.all()
    assert (loose.bounds.time_s == exact.bounds.time_s).all()
    assert (loose.bounds.memory_bytes == exact.bounds.memory_bytes).all()
    assert (untouched.bounds.time_s <= exact.bounds.time_s).all()


@pytest.mark.parametrize("case", CASES[::3])
def test_a_search_that_prices_later_finds_the_same(
    case: tuple[str, int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = outer_for(*case).problem
    at_once = plan(problem, advise=False)
    monkeypatch.setattr(tables, "MANY", 0)
    later = plan(problem, advise=False)
    for one, other in ((later, at_once), (at_once, later)):
        assert one.lower_bound_s <= other.prediction.step_time_s * (1 + 2e-6)
    if {later.status, at_once.status} == {"optimal"}:
        assert later.prediction.step_time_s == pytest.approx(at_once.prediction.step_time_s, rel=2e-6)


def test_recomputed_blocks_with_activations_on_the_host_are_bounded() -> None:
    outer = outer_for("a100-pcie-80gb:2x2", 16, "fused")
    chosen = Candidate(
        mesh=Mesh(pp=2, dp_replicate=2), micro=4, micro_batches=1, zero=0, sequence_parallel=False,
        schedule="interleaved-1f1b", virtual_stages=2, mode="none", offload=Offload(activations=1.0), compression=(),
    )  # fmt: skip
    for blocks in ((2, 1, 1, 0), (1, 1, 1, 1)):
        for recomputed in product(*(range(n + 1) for n in blocks)):
            deal = Deal(blocks=blocks, recomputed=recomputed)
            _stage_problem_is_below(outer, chosen, deal, f"{deal}")


def test_a_path_through_tied_gradients_and_reductions_in_turn_says_nearly_all_of_the_step() -> None:
    outer = outer_for("a100-pcie-80gb:2x2", 8, "fused")
    chosen = Candidate(
        mesh=Mesh(pp=2, dp_shard=2), micro=1, micro_batches=4, zero=1, sequence_parallel=False,
        schedule="interleaved-1f1b", virtual_stages=2, mode="none", offload=Offload(), compression=(),
    )  # fmt: skip
    deal = Deal(blocks=(1, 1, 1, 1), recomputed=(0, 0, 0, 0))
    found = evaluate(outer.book.expander, strategy_of(outer.problem, chosen, deal))
    parts = {part for part, _, _ in found.path().terms}
    priced = price_candidate(outer.problem, outer.chain, outer.book, chosen)
    states = outer.book.expander.prepared(priced.strategy).states
    problem = stage_problem(outer.problem, outer.chain, outer.book, priced, states, 1e18)
    (row,) = with_paths(replace(problem, paths=()), [path_row(found.path())]).paths
    assert {"tied", "reduce_s"} <= parts, found.path()
    assert next(row_values(problem, (row,), deal)) / 1e12 > 0.9 * found.step_time_s, found.path()


def _stage_problem_is_below(
    outer: Outer, chosen: Candidate, deal: Deal, shown: str, other: Deal | None = None
) -> None:
    """No row of a deal's stage problem is above its simulation, its own path and that of another deal among them."""
    found = evaluate(outer.book.expander, strategy_of(outer.problem, chosen, deal))
    priced = price_candidate(outer.problem, outer.chain, outer.book, chosen)
    states = outer.book.expander.prepared(priced.strategy).states
    problem = stage_problem(outer.problem, outer.chain, outer.book, priced, states, 1e18)
    learnt = [
        found,
        *(evaluate(outer.book.expander, strategy_of(outer.problem, chosen, d)) for d in [other] if d),
    ]
    problem = with_paths(problem, [path_row(one.path()) for one in learnt])
    assert deal_value(problem, deal) / 1e12 <= found.step_time_s * (1 + 1e-9), shown
    for row in problem.memory:
        own = row.capacity_bytes is None
        assert next(row_values(problem, (row,), deal)) <= (found.peak_bytes if own else found.host_bytes), (
            shown
        )


def test_bounds_are_close_where_computation_rules() -> None:
    """Large layers, no pipeline: what is left out is latency and the end of the gradient reduction."""
    outer = outer_for("h100-sxm:1x4", 16, "fused")
    every, bounds = expand_shapes(outer, np.arange(len(outer.space.shapes)), FOREVER)
    near = [
        bounds.time_s[row] / evaluate(outer.book.expander, strategy_of(outer.problem, chosen, deal)).step_time_s
        for row in range(len(every))
        if (chosen := candidate(outer.space, every, row)).mesh.pp == 1 and chosen.mesh.tp == 1
        for deal in [even_deal(4, 1)]
    ]  # fmt: skip
    assert np.median(near) > 0.9, near


def test_a_bound_below_which_nothing_lies_is_all_that_is_told_of_slow_rows() -> None:
    outer = outer_for("h100-sxm:1x4", 8, "fused")
    rows = np.arange(len(outer.space.shapes))
    _, free = expand_shapes(outer, rows, FOREVER)
    limit = float(np.median(free.time_s))
    _, below = expand_shapes(outer, rows, limit)
    slow = free.time_s > limit
    assert np.all(below.time_s[slow] >= limit * (1 - 1e-3))
    assert np.allclose(below.time_s[~slow], free.time_s[~slow], rtol=1e-3)


def test_what_cannot_fit_has_no_time() -> None:
    outer = outer_for("h100-sxm:1x4", 8, "fused")
    _, bounds = expand_shapes(replace(outer, capacity_bytes=1e4), np.arange(len(outer.space.shapes)), FOREVER)
    assert np.all(np.isinf(bounds.time_s))


@pytest.mark.parametrize(("cluster", "scale", "kernels"), CASES[:2])
def test_what_a_shape_exchanges_at_least_is_no_more_than_what_any_of_its_variants_does(
    cluster: str, scale: int, kernels: str
) -> None:
    outer = outer_for(cluster, scale, kernels)
    rows = np.arange(len(outer.space.shapes))
    least_s = exchange_bounds(outer, rows)
    nothing = np.zeros(len(rows))
    bare = replace(outer, bounds=Bounds(time_s=nothing, memory_bytes=nothing))
    every, bounds = expand_quickly(bare, rows)
    fastest_s = np.full(len(rows), np.inf)
    np.minimum.at(fastest_s, every.shape, bounds.time_s)
    assert np.all(least_s <= fastest_s * (1 + 1e-9))
    closest = (least_s / fastest_s)[np.isfinite(fastest_s)]
    assert np.median(closest) > 0.9
