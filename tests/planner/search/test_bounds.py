"""Lower bounds never exceed what the simulation says, whatever the partition; and they are close where it matters."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds import settings
from autoparallel.planner.search.bounds.families import HARDLY, MOST_ALTERNATIVES, least_of_each
from autoparallel.planner.search.bounds.outer import (
    Outer,
    bound_alike,
    bound_families,
    bound_variants,
    expand_quickly,
    expand_shapes,
    families_of,
    outer_of,
    rows_of,
    spread_families,
)
from autoparallel.planner.search.bounds.paths import weigh
from autoparallel.planner.search.bounds.ranks import RankBounds, rates_of
from autoparallel.planner.search.evaluate import Evaluation, evaluate
from autoparallel.planner.search.partition.inner import price_candidate, stage_problem
from autoparallel.planner.search.partition.paths import SchedulePaths
from autoparallel.planner.search.partition.problem import Partition, Q, Row, partition_value, row_values
from autoparallel.planner.search.partition.quick import even_partition
from autoparallel.planner.search.partition.relaxation import relaxed_bound_s
from autoparallel.planner.search.simulations import Simulations
from autoparallel.planner.search.space.build import Variants
from autoparallel.planner.search.space.candidates import Candidate, candidate, strategy_of
from autoparallel.planner.search.space.meshes import Floats
from autoparallel.planner.strategy.types import Execution, Mesh, Offload
from autoparallel.profiles.load import load_cluster
from tests.toy_graphs import toy_encoder_decoder, toy_transformer

FOREVER = float("inf")
OWN = "own runtime"  # whose parameters and gradients come and go in a step of one micro-batch
APART = "reductions beside nothing"
SLOW = "reductions that take longer than all computation"
SLOW_OWN = "own runtime, whose replicas are summed over slow links"
ALONE = "parameters gathered one by one"
SLOW_ALONE = "parameters gathered one by one over slow links"
ALONE_FIXED = "parameters gathered one by one, under ZeRO-3 alone"
LATE = "updated parameters gathered beside forwards"
BETWEEN = "an encoder and a decoder, whose embedding the tail shares, over slow links"
BETWEEN_OWN = "likewise in the own runtime, whose stages each have it"
SLOW_BUSES = ("a100-pcie-80gb:4x2", "l40s:2x2")  # here with faster links between nodes than inside
CASES = [
    (cluster, scale, kernels)
    for cluster in ("h100-sxm:1x4", "a100-pcie-80gb:2x2", "cpu-gloo:1x4")
    for scale, kernels in ((1, "fused"), (8, "eager"), (16, "fused"), (8, OWN), (16, OWN))
] + [
    ("h100-sxm:2x2", 8, LATE),
    (SLOW_BUSES[0], 16, OWN),
    (SLOW_BUSES[1], 1, "fused"),
    ("h100-sxm:2x2", 8, APART),
    ("h100-sxm:2x2", 8, SLOW_OWN),
    ("h100-sxm:2x2", 8, BETWEEN),
    ("h100-sxm:2x2", 16, BETWEEN_OWN),
    ("h100-sxm:2x2", 16, ALONE),
    ("a100-pcie-80gb:4x2", 16, ALONE_FIXED),
]


def outer_for(cluster: str, scale: int, kernels: str) -> Outer:
    graph = toy_transformer(
        layers=4, hidden=64 * scale, heads=4, seq=32 * scale, vocab=512 * scale, tied=scale == 8,
        ffns=(128 * scale, 512 * scale) if scale == 1 else (),
    )  # fmt: skip
    if kernels in (BETWEEN, BETWEEN_OWN):
        graph = toy_encoder_decoder(hidden=64 * scale, seq=32 * scale, vocab=4096 * scale)
    own, param = kernels in (OWN, SLOW_OWN, BETWEEN_OWN), "fp32" if scale == 8 else "bf16"
    execution = Execution(
        kernels="eager" if kernels != "fused" else kernels,
        dtype="fp32" if cluster.startswith("cpu") else "bf16",
        param_dtype=param,
        grad_dtype=param if own else "fp32",
        fsdp2=own,
        late_gathers=kernels == LATE,
        parameter_gathers=kernels in (ALONE, ALONE_FIXED, SLOW_ALONE),
        joined_pieces=kernels in (ALONE, SLOW_ALONE),
    )
    devices = load_cluster(cluster)
    if kernels in (SLOW, SLOW_OWN, SLOW_ALONE, BETWEEN, BETWEEN_OWN):
        inner, outermost = devices.levels
        far = replace(outermost, bytes_per_s=outermost.bytes_per_s / 100)
        devices = replace(devices, levels=(inner, far))
    if cluster in SLOW_BUSES:
        inner, outermost = devices.levels
        fast = replace(outermost, bytes_per_s=4 * inner.bytes_per_s)
        devices = replace(devices, levels=(inner, fast))
    apart: dict[str, object] = {"grad_sync.overlap": False} if kernels == APART else {}
    apart |= {"shard.zero": 3} if kernels == ALONE_FIXED else {}
    outer = outer_of(
        Problem(
            graph=graph,
            cluster=devices,
            global_batch=8,
            allow_lossy=True,
            execution=execution,
            constraints=apart,
        )
    )
    assert outer is not None
    return outer


def with_host_bytes(outer: Outer, host_bytes: int) -> Outer:
    """The same where each host has room for so many bytes."""
    cluster = outer.problem.cluster
    groups = tuple(
        replace(
            group, device=replace(group.device, constants={
                **group.device.constants, "host.memory_bytes": float(host_bytes), "host.usable": 1.0,
            }),
        )
        for group in cluster.groups
    )  # fmt: skip
    return replace(outer, problem=replace(outer.problem, cluster=replace(cluster, groups=groups)))


def random_partition(rng: random.Random, outer: Outer, chosen: Candidate) -> Partition:
    blocks = len(outer.chain.kinds)
    if rng.random() < 0.4:
        divided = even_partition(blocks, chosen.chunks).blocks
    else:
        while True:
            cuts = sorted(rng.choices(range(blocks + 1), k=chosen.chunks - 1))
            divided = tuple(b - a for a, b in zip([0, *cuts], [*cuts, blocks], strict=True))
            if all(n > 0 for n in divided[1:-1]):
                break
            if chosen.chunks - 2 >= blocks:
                return even_partition(blocks, chosen.chunks)
    free = chosen.mode != "full" and rng.random() < 0.5
    return Partition(blocks=divided, recomputed=tuple(rng.randint(0, n) if free else 0 for n in divided))


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("cluster", "scale", "kernels"), CASES)
def test_no_bound_exceeds_the_simulation(cluster: str, scale: int, kernels: str) -> None:
    outer, rng = outer_for(cluster, scale, kernels), random.Random(scale)
    every, _ = expand_quickly(outer, np.arange(len(outer.space.shapes)))
    placed = outer.communication.inner_placements(every)
    away = np.flatnonzero(outer.space.shapes.activations_offloaded[every.shape] > 0).tolist()
    rows = [*rng.sample(range(len(every)), 25), *rng.sample(away, min(len(away), 15))]
    bounds = bound_variants(outer, every.take(np.array(rows)), FOREVER, memory=True)
    for row, least_bytes in zip(rows, bounds.memory_bytes.tolist(), strict=True):
        chosen = candidate(outer.space, every, row)
        partition = random_partition(rng, outer, chosen)
        found = evaluate(outer.book.expander, strategy_of(outer.problem, chosen, partition))
        shape, shown = int(every.shape[row]), f"{chosen}\n{partition}"
        assert outer.bounds.time_s[shape] <= found.step_time_s * (1 + 1e-9), shown
        assert outer.bounds.memory_bytes[shape] <= found.peak_bytes, shown
        assert least_bytes <= found.peak_bytes + 1, shown
        tight = replace(outer, capacity_bytes=float(found.peak_bytes))
        if found.host_bytes:
            tight = with_host_bytes(tight, found.host_bytes)
        one: Variants = every.take(np.array([row]))
        time_s = bound_variants(tight, one, FOREVER).time_s[0]
        assert time_s <= found.step_time_s * (1 + 1e-9), shown
        if placed[row]:
            outer.far.price(chosen.mesh, outer.space.shapes, shape, int(placed[row]))
            assert bound_variants(tight, one, FOREVER).time_s[0] <= found.step_time_s * (1 + 1e-9), shown
        _paths_are_below(tight, one, chosen, found, shown)
        _stage_problem_is_below(outer, chosen, partition, shown, random_partition(rng, outer, chosen))


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_what_communication_hides_leaves_room_for_no_fewer_blocks(share: float) -> None:
    outer = outer_for("h100-sxm:2x2", 8, SLOW)
    shapes = np.flatnonzero(outer.space.shapes.pp == 2)
    every, _ = expand_shapes(outer, shapes, FOREVER, memory=True)
    bounds = RankBounds(outer.problem, rows_of(outer, every), 2)
    fits = bounds.base_bytes + bounds.running_bytes + bounds.per_block_bytes * len(outer.chain.kinds)
    room = bounds.room(float(np.median(fits)) * share)
    for time_s in (0.1, 1.0, 100.0):
        limit_s, hides_s = np.full(len(every), time_s), bounds.hides_s
        with np.errstate(all="ignore"):
            found = bounds.most_blocks(limit_s, room)
            bounds.hides_s = np.zeros_like(hides_s)
            assert (found >= bounds.most_blocks(limit_s, room)).all()
        bounds.hides_s = hides_s


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("cluster", "scale", "kernels"), CASES[::2])
def test_an_anchor_says_no_more_of_a_setting_than_its_own_price(
    cluster: str, scale: int, kernels: str
) -> None:
    outer = outer_for(cluster, scale, kernels)
    prices, every = outer.prices, np.arange(len(outer.space.shapes))
    before, known = prices.rows.copy(), prices.exact.copy()
    assert known.any()
    assert not known.all()
    prices.ask(every)
    assert prices.exact.all()
    both = np.isfinite(before[:, 0]) & np.isfinite(prices.rows[:, 0])
    bounded = [*settings.SECONDS, *settings.ON_DEVICE, *settings.BYTES]
    assert (before[both][:, bounded] <= prices.rows[both][:, bounded] * (1 + 1e-9)).all()
    assert (before[both][:, settings.COUNTS] == prices.rows[both][:, settings.COUNTS]).all()
    assert np.isinf(prices.rows[np.isinf(before[:, 0]), 0]).all()  # what an anchor rules out is out


@pytest.mark.sweep(5)
@pytest.mark.parametrize(("cluster", "scale", "kernels"), CASES)
def test_no_family_is_bounded_above_one_of_its_variants(cluster: str, scale: int, kernels: str) -> None:
    outer = outer_for(cluster, scale, kernels)
    every, shapes = np.arange(len(outer.space.shapes)), outer.space.shapes
    outer.ask(every)
    every = every[np.isfinite(outer.bounds.time_s)]
    below_s = float(np.quantile(outer.bounds.time_s[every], 0.7))
    assert bound_alike(outer, every, below_s) > 0
    assert bound_alike(outer, every, below_s) == 0  # all is known
    found = families_of(outer, every)
    least_s = bound_families(outer, found, below_s)
    spread, of = spread_families(outer, found)
    rows = np.sort(random.Random(scale).sample(range(len(spread)), min(len(spread), 4_000)))
    own_s = bound_variants(outer, spread.take(rows), below_s).time_s
    close = 1 + 1e-3  # of what bisection agrees to
    assert (np.minimum(least_s[of[rows]], below_s) <= own_s * close).all()
    assert (np.minimum(outer.families_s[spread.shape[rows]], below_s) <= own_s * close).all()
    assert (least_s < below_s).any()
    assert len(np.unique(outer.alike.number)) < len(shapes)


def test_weights_of_one_variant_bound_others_of_its_schedule() -> None:
    assert sum(_weights_bound_others(*case) for case in CASES[::6]) > 0


def _weights_bound_others(cluster: str, scale: int, kernels: str) -> int:
    """How many of the weights had memory among them."""
    outer, rng = outer_for(cluster, scale, kernels), random.Random(scale)
    every, _ = expand_quickly(outer, np.arange(len(outer.space.shapes)))
    shapes = outer.space.shapes
    pipelined = np.flatnonzero(shapes.pp[every.shape] > 1).tolist()
    with_memory = 0
    for row in rng.sample(pipelined, 12):
        chosen = candidate(outer.space, every, row)
        strategy = strategy_of(outer.problem, chosen, random_partition(rng, outer, chosen))
        own = evaluate(outer.book.expander, strategy)
        tight, found_s = replace(outer, capacity_bytes=float(own.peak_bytes)), own.step_time_s
        sims = Simulations(outer=tight)
        problem = sims.problem(chosen)
        weights, _ = (None, 0) if problem is None else weigh(problem, sims.paths(chosen), FOREVER)
        if weights is None:
            continue
        with_memory += weights.held is not None
        assert problem is not None
        for below_s in (FOREVER, found_s / 2):  # ends before anything was walked where memory binds
            quickly, _ = weigh(problem, sims.paths(chosen), below_s)
            assert quickly is None or sum(quickly.layers) == pytest.approx(len(problem.kinds)), f"{chosen}"
        alike = [
            one for one in rng.sample(pipelined, 400)
            if candidate(outer.space, every, one).schedule_key == chosen.schedule_key
        ]  # fmt: skip
        for one in alike[:4]:
            other = candidate(outer.space, every, one)
            partition = random_partition(rng, outer, other)
            found = evaluate(outer.book.expander, strategy_of(outer.problem, other, partition))
            rows = rows_of(outer, every.take(np.array([one])))
            rates, room = rates_of(outer.problem, rows.shapes, rows.zero), float(found.peak_bytes)
            bound_s = weights.bounds_s(rows, outer.chain, rates, room)[0]
            assert bound_s <= found.step_time_s * (1 + 1e-6), f"{chosen}\n{other}\n{partition}"
    return with_memory


def _paths_are_below(outer: Outer, one: Variants, chosen: Candidate, found: Evaluation, shown: str) -> None:
    """Neither the weighted paths of its schedule nor the linear relaxation of its stage problem is above a simulation."""
    sims = Simulations(outer=outer)
    problem = sims.problem(chosen)
    assert problem is not None
    paths = sims.paths(chosen)
    weights, _ = weigh(problem, paths, FOREVER)
    assert (weights is not None) == (problem.chunks > 1)
    if weights is not None:
        rows = rows_of(outer, one)
        rates = rates_of(outer.problem, rows.shapes, rows.zero)
        bound_s = weights.bounds_s(rows, outer.chain, rates, outer.capacity_bytes)[0]
        assert bound_s <= found.step_time_s * (1 + 1e-6), shown
    relaxed_s = relaxed_bound_s(problem, paths.rows)
    assert relaxed_s is not None, shown
    assert relaxed_s <= found.step_time_s * (1 + 1e-6), shown
    again = found.strategy.recompute.per_stage
    if again:  # with that fixed, and no more memory than it takes
        fixed = replace(problem, recomputed=again, capacity_bytes=found.peak_bytes)
        fixed_s = relaxed_bound_s(fixed, paths.rows)
        assert fixed_s is not None, shown
        assert fixed_s <= found.step_time_s * (1 + 1e-6), shown


def test_recomputed_blocks_with_activations_on_the_host_are_bounded() -> None:
    outer = outer_for("a100-pcie-80gb:2x2", 16, "fused")
    chosen = Candidate(
        mesh=Mesh(pp=2, dp_replicate=2), micro=4, micro_batches=1, zero=0, sequence_parallel=False,
        schedule="interleaved-1f1b", virtual_stages=2, mode="none", offload=Offload(activations=1.0), compression=(),
    )  # fmt: skip
    for blocks in ((2, 1, 1, 0), (1, 1, 1, 1)):
        for recomputed in product(*(range(n + 1) for n in blocks)):
            partition = Partition(blocks=blocks, recomputed=recomputed)
            _stage_problem_is_below(outer, chosen, partition, f"{partition}")


def test_a_path_through_tied_gradients_and_reductions_in_turn_says_nearly_all_of_the_step() -> None:
    outer = outer_for("a100-pcie-80gb:2x2", 8, "fused")
    chosen = Candidate(
        mesh=Mesh(pp=2, dp_shard=2), micro=1, micro_batches=4, zero=1, sequence_parallel=False,
        schedule="interleaved-1f1b", virtual_stages=2, mode="none", offload=Offload(), compression=(),
    )  # fmt: skip
    path = _row_says_nearly_all(outer, chosen)
    assert Q.END in {Q(quantity) for quantity, _, _ in path.terms}, path


def test_a_tied_tensor_between_the_ends_and_unlike_messages_are_nearly_all_of_the_step() -> None:
    outer = outer_for("h100-sxm:2x2", 8, BETWEEN)
    for schedule, blocks in product(("gpipe", "zb1p"), ((2, 2), (1, 3), (3, 1))):
        chosen = Candidate(
            mesh=Mesh(pp=2, dp_replicate=2, order=("dp_replicate", "pp", "dp_shard", "cp", "tp")), micro=1, micro_batches=4,
            zero=0, sequence_parallel=False, schedule=schedule, virtual_stages=1, mode="none", offload=Offload(),
            compression=(),
        )  # fmt: skip
        sims = Simulations(outer=outer)
        problem, partition = sims.problem(chosen), Partition(blocks=blocks, recomputed=(0, 0))
        assert problem is not None
        found = sims.simulate(chosen, problem, partition)
        assert not sims.broken
        least_s = partition_value(sims.with_paths(chosen, problem), partition) / 1e12
        assert 0.98 * found.step_time_s < least_s <= found.step_time_s * (1 + 1e-9), (schedule, blocks)


def test_bounds_know_of_parameters_that_are_gathered_one_by_one() -> None:
    outer = outer_for("h100-sxm:4x2", 16, SLOW_ALONE)
    every, _ = expand_quickly(outer, np.arange(len(outer.space.shapes)))
    shapes = outer.space.shapes.take(every.shape)
    apart = every.take((every.zero == 3) & (shapes.dp_shard == 8) & (every.compression == 0))
    bounds, sims = bound_variants(outer, apart, FOREVER), Simulations(outer=outer)
    assert len(apart)
    for row in range(len(apart)):
        found = sims.try_quickly(candidate(outer.space, apart, row))
        assert found is not None
        assert bounds.time_s[row] > 0.5 * found.step_time_s, found.strategy


def test_bounds_know_of_updated_parameters_that_stages_wait_for() -> None:
    outer = outer_for("h100-sxm:4x2", 16, SLOW_OWN)
    every, _ = expand_quickly(outer, np.arange(len(outer.space.shapes)))
    shapes = outer.space.shapes.take(every.shape)
    waits = (every.zero == 1) & (shapes.pp == 2) & (shapes.dp_shard == 4) & (shapes.micro_batches == 2)
    on_device = (
        (shapes.optimizer_offloaded == 0) & (shapes.activations_offloaded == 0) & (shapes.recompute == 0)
    )
    some = every.take(waits & on_device & (every.compression == 0))
    bounds, sims = bound_variants(outer, some, FOREVER), Simulations(outer=outer)
    assert len(set(some.schedule.tolist())) > 3
    for row in range(len(some)):
        found = sims.try_quickly(candidate(outer.space, some, row))
        assert found is not None
        assert bounds.time_s[row] > 0.65 * found.step_time_s, found.strategy


def _row_says_nearly_all(outer: Outer, chosen: Candidate) -> Row:
    """The path of an even partition's simulation, which goes through what is exchanged at the end of the step."""
    partition = Partition(blocks=(1, 1, 1, 1), recomputed=(0, 0, 0, 0))
    priced = price_candidate(outer.problem, outer.chain, outer.book, chosen)
    prepared = outer.book.expander.prepared(priced.strategy)
    paths = SchedulePaths(prepared.timetable, outer.chain.ties)
    found = evaluate(outer.book.expander, strategy_of(outer.problem, chosen, partition), paths)
    problem = stage_problem(outer.problem, outer.chain, outer.book, priced, prepared.states, 1e18)
    assert found.path is not None
    assert Q.TIED in {Q(quantity) for quantity, _, _ in found.path.terms}, found.path
    assert next(row_values(problem, (found.path,), partition)) / 1e12 > 0.9 * found.step_time_s, found.path
    return found.path


def _stage_problem_is_below(
    outer: Outer, chosen: Candidate, partition: Partition, shown: str, other: Partition | None = None
) -> None:
    """No row of a partition's stage problem is above its simulation, its own path and that of another partition among them."""
    priced = price_candidate(outer.problem, outer.chain, outer.book, chosen)
    prepared = outer.book.expander.prepared(priced.strategy)
    paths = SchedulePaths(prepared.timetable, outer.chain.ties)
    found = evaluate(outer.book.expander, strategy_of(outer.problem, chosen, partition), paths)
    if other is not None:
        evaluate(outer.book.expander, strategy_of(outer.problem, chosen, other), paths)
    problem = stage_problem(outer.problem, outer.chain, outer.book, priced, prepared.states, 1e18, paths.rows)
    assert partition_value(problem, partition) / 1e12 <= found.step_time_s * (1 + 1e-9), shown
    for row in problem.memory:
        own = row.capacity_bytes is None
        assert next(row_values(problem, (row,), partition)) <= (
            found.peak_bytes if own else found.host_bytes
        ), shown


def test_bounds_know_of_gradients_that_are_summed_over_replicas_once_a_step() -> None:
    outer = outer_for("h100-sxm:4x2", 8, SLOW_OWN)
    every, _ = expand_quickly(outer, np.arange(len(outer.space.shapes)))
    shapes = outer.space.shapes.take(every.shape)
    summed = (every.zero == 2) & (shapes.dp_replicate == 2) & (shapes.micro_batches > 1) & (shapes.pp == 1)
    plain = every.take(summed & (every.compression == 0))
    bounds, sims = bound_variants(outer, plain, FOREVER), Simulations(outer=outer)
    assert len(plain)
    for row in range(len(plain)):
        found = sims.try_quickly(candidate(outer.space, plain, row))
        assert found is not None
        assert bounds.time_s[row] > 0.6 * found.step_time_s, (plain.take(np.array([row])), found.strategy)
    chosen = Candidate(
        mesh=Mesh(pp=2, dp_replicate=2, dp_shard=2), micro=1, micro_batches=2, zero=2, sequence_parallel=False,
        schedule="zbv", virtual_stages=2, mode="none", offload=Offload(), compression=(),
    )  # fmt: skip
    _row_says_nearly_all(outer, chosen)


def test_bounds_are_close_where_computation_rules() -> None:
    """Large layers, no pipeline: what is left out is latency and the end of the gradient reduction."""
    outer = outer_for("h100-sxm:1x4", 16, "fused")
    every, bounds = expand_shapes(outer, np.arange(len(outer.space.shapes)), FOREVER)
    near = [
        bounds.time_s[row] / evaluate(outer.book.expander, strategy_of(outer.problem, chosen, partition)).step_time_s
        for row in range(len(every))
        if (chosen := candidate(outer.space, every, row)).mesh.pp == 1 and chosen.mesh.tp == 1
        for partition in [even_partition(4, 1)]
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


@given(
    rows=arrays(np.float64, st.tuples(st.integers(1, 40), st.integers(1, 4)), elements=st.integers(0, 5)),
    groups=st.integers(1, 5),
)
def test_every_variant_is_no_faster_than_one_of_its_groups_alternatives(rows: Floats, groups: int) -> None:
    group = np.arange(len(rows)) % groups
    found, of = least_of_each(rows, group)
    assert (np.diff(of) >= 0).all()
    assert np.bincount(of).max() <= MOST_ALTERNATIVES
    for number in range(groups):
        own, least = rows[group == number], found[of == number]
        assert all((least <= row).all(axis=1).any() for row in own)
        if len(least) < MOST_ALTERNATIVES:  # then each is about one of them, not the least of several
            assert all((row >= own * (1 - HARDLY)).all(axis=1).any() for row in least)
