"""What collectives took: bytes by kind and level are those that are priced, and seconds those of the network, not of ranks that
come late."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import _functional_collectives as functional

from autoparallel.costmodel.program import Program
from autoparallel.costmodel.step_collectives import CollectiveCost, priced_collectives
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles import load_cluster
from autoparallel.runtime.collectives_private import Ear, Sent, hooked
from autoparallel.runtime.monitor.collectives import CollectiveTable, Levels, Meter, under_way_s
from autoparallel.runtime.ranks.agreement import Agreement
from autoparallel.runtime.ranks.gathers import all_gather_single, reduce_scatter_single
from autoparallel.runtime.start import parallelize
from tests.runtime.harness import Processes
from tests.runtime.models import EXAMPLES
from tests.runtime.test_dryrun import STRATEGIES, _planned

MODEL = "llama_with_labels"
CLUSTER = load_cluster("cpu-gloo:2x2")
LEVELS: Levels = tuple((level.name, level.size) for level in CLUSTER.levels)
RUN = ("zero 3 beside sequence parallelism", "zero 2 and replicas", "a pipeline, tensor parallel")
LATE_S = 0.3


def _costs(everyone: Agreement, table: CollectiveTable, meter: Meter) -> list[CollectiveCost]:
    """Of a step that ends: what a monitor does."""
    return table.costs(everyone.gathered(table.numbers(meter.end())), 1.0, counted=True)


def counted(
    rank: int, world_size: int, strategies: list[tuple[Strategy, Program]]
) -> list[tuple[list[CollectiveCost], float]]:
    """The second counted step of each strategy, by rank 0, and how long it took."""
    everyone, found = Agreement(60.0), []
    for strategy, program in strategies:
        share = strategy.batch.global_ // strategy.mesh.data_parallel
        example = EXAMPLES[MODEL](share)
        model: Any = parallelize(
            example.module, example.inputs, strategy, blocks=example.blocks, program=lambda p=program: p
        )
        optimizer = model.optimizer(torch.optim.SGD, lr=0.01)
        meter, table = Meter(), CollectiveTable(everyone, LEVELS)
        for _ in range(3):
            begun = time.perf_counter()
            with meter.around():
                meter.begin()
                optimizer.zero_grad()
                model.step(example.inputs, example.targets, loss_fn=example.loss_fn)
                optimizer.step()
                everyone.gathered("x" * 10_000)  # no message of the model's
                took_s = time.perf_counter() - begun
                costs = _costs(everyone, table, meter)
        found.append((costs, took_s))
    return found


@pytest.mark.distributed
def test_a_step_has_the_priced_bytes_by_kind_and_level(gloo: Processes) -> None:
    planned = [_planned(MODEL, STRATEGIES[name]) for name in RUN]
    programs = [(strategy, expander.program(strategy)) for expander, strategy in planned]
    ran = gloo.run(4, counted, strategies=programs)[0]
    for name, (_, program), (costs, took_s) in zip(RUN, programs, ran, strict=True):
        priced = priced_collectives(program, CLUSTER)
        for key in (_kind, _level):
            sent, planned_to = _sent(costs, key), _sent(priced, key)
            assert sent == pytest.approx(planned_to, rel=0.05), (name, costs, priced)
        assert all(c.op == "send" or not c.seconds >= took_s for c in costs), (name, costs, took_s)


def _kind(cost: CollectiveCost) -> tuple[str, str]:
    return cost.op, cost.level


def _level(cost: CollectiveCost) -> str:
    return cost.level


def _sent(costs: list[CollectiveCost], key: Callable[[CollectiveCost], Any]) -> dict[Any, float]:
    found: dict[Any, float] = defaultdict(float)
    for cost in costs:
        found[key(cost)] += cost.sent_bytes
    return dict(found)


def late(rank: int, world_size: int) -> list[CollectiveCost]:
    """Of each kind, by rank 0, the shortest of some rounds with the same two ranks late."""
    everyone, value = Agreement(60.0), torch.ones(1 << 16)
    meter, table = Meter(), CollectiveTable(everyone, (("inside", 2), ("between", 4)))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 2]), dist.new_group([1, 3])]
    inside, between = pairs[rank // 2], pairs[2 + rank % 2]
    least: dict[tuple[str, str], CollectiveCost] = {}
    for _ in range(20):
        with meter.around():
            meter.begin()
            if rank == 1:
                time.sleep(LATE_S)
            dist.all_reduce(value, group=inside)
            all_gather_single(torch.empty(2 << 16), value, group=between)
            if rank == 3:
                time.sleep(LATE_S)
            work = reduce_scatter_single(value[: 1 << 15], value.clone(), group=between, async_op=True)
            assert work is not None
            work.wait()
            dist.all_reduce(value[:8])  # too small to count
            costs = _costs(everyone, table, meter)
        # A busy machine may let a rank wait only for what is there already: then nobody knows when that ended.
        for cost in costs:
            known = least.setdefault((cost.op, cost.level), cost)
            if math.isnan(known.seconds) or cost.seconds < known.seconds:
                least[cost.op, cost.level] = cost
        if everyone.from_first(bool(least) and all(c.seconds < LATE_S / 2 for c in least.values())):
            break
    value.add_(1.0)
    dist.all_reduce(value, group=inside)
    assert not meter.end(), "nothing is heard outside"
    return list(least.values())


@pytest.mark.distributed
def test_who_is_late_is_not_what_the_network_takes(gloo: Processes) -> None:
    costs = {(c.op, c.level): c for c in gloo.run(4, late)[0]}
    assert {kind: (c.count, c.sent_bytes) for kind, c in costs.items()} == {
        ("all_reduce", "inside"): (1, 4 << 16),
        ("all_gather", "between"): (1, 4 << 16),
        ("reduce_scatter", "between"): (1, 2 << 16),
    }
    assert all(0 < c.seconds < LATE_S / 2 for c in costs.values()), costs


class _Deaf(Ear):
    """Somebody stops listening between any two looks."""

    def __init__(self) -> None:
        self.sent, self._looks, self.waited = list[Sent](), 0, {}

    @property
    def hear(self) -> Callable[[Sent], None] | None:  # type: ignore[override]
        self._looks += 1
        return self.sent.append if self._looks % 2 else None


def heard_no_more(rank: int, world_size: int) -> list[str]:
    """What is heard of two collectives."""
    value, ear = torch.ones(100), _Deaf()
    with hooked(ear):
        for send in (dist.all_reduce, lambda x: functional.all_reduce(x, "sum", dist.group.WORLD)):
            send(value)
            assert ear.hear is None
    return [sent.op for sent in ear.sent]


@pytest.mark.distributed
def test_a_thread_that_sends_may_be_heard_no_more_meanwhile(gloo: Processes) -> None:
    assert gloo.run(2, heard_no_more)[0] == ["all_reduce", "all_reduce"]


spans = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)).map(lambda x: (x[0], x[0] + x[1])), max_size=8)


@settings(max_examples=100, deadline=None)
@given(spans)
def test_seconds_under_way_count_what_overlaps_once(found: list[tuple[float, float]]) -> None:
    edges = sorted({edge for span in found for edge in span})
    cells = [(a, b) for a, b in pairwise(edges) if any(x <= a and b <= y for x, y in found)]
    assert under_way_s(found) == pytest.approx(sum(b - a for a, b in cells))
