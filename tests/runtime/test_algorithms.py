"""Uncompressed algorithms of gradient synchronisation are the mean, in the messages that are priced."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.planner.strategy.types import GradSync
from autoparallel.runtime.check.messages import sent_bytes
from autoparallel.runtime.check.traffic import TrafficRecorder
from autoparallel.runtime.gradients.feedback import Memory
from autoparallel.runtime.gradients.point_to_point import tree_places
from autoparallel.runtime.gradients.replicas import replica_reducer, shard_wire, with_levels
from autoparallel.runtime.gradients.sharded import UnitScatter
from autoparallel.runtime.ranks.mesh import build_mesh
from tests.runtime.compare import TOLERANCE, build, run_strategy, strategy_of
from tests.runtime.harness import Processes
from tests.runtime.test_replicas import BY_TWO
from tests.runtime.test_replicas import strategy_of as synchronised

SIZES = (3, 1 << 18)  # fewer numbers than ranks, and several pieces of a tree


@given(st.lists(st.integers(1, 4), min_size=1, max_size=9))
def test_a_tree_joins_all_ranks_and_two_trees_share_the_work(sizes: list[int]) -> None:
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    units = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    home = {position: n for n, unit in enumerate(units) for position in unit}
    for places in tree_places(units):
        roots = [n for n, place in enumerate(places) if place.parent is None]
        assert len(roots) == 1
        reached, waiting = set(), list(roots)
        while waiting:
            reached.add(top := waiting.pop())
            waiting += places[top].children
        assert reached == set(home)
        crossings = sum(p.parent is not None and home[p.parent] != home[n] for n, p in enumerate(places))
        assert crossings == len(units) - 1, "a unit is entered once"
        assert all(len(place.children) <= 3 for place in places)


def _sums(rank: int, world_size: int) -> dict[str, tuple[float, float]]:
    """By algorithm and size: the largest error of the mean, and what this rank sent beside a ring, relative."""
    found = {}
    for algorithm in ("ring", "tree", "hierarchical", "parameter-server"):
        whole = algorithm in ("tree", "parameter-server")
        for axis in ("dp_replicate",) if whole else ("dp_replicate", "dp_shard"):
            strategy = synchronised(GradSync(algorithm=algorithm), **{axis: world_size})
            mesh = with_levels(build_mesh(strategy.mesh, BY_TWO), strategy)
            names = {mesh.group(axis).group_name: axis}
            for numbers in SIZES:
                size = numbers if axis == "dp_replicate" else -(-numbers // world_size) * world_size
                values = torch.randn(size, generator=torch.Generator().manual_seed(rank))
                exact = values.clone()
                dist.all_reduce(exact)
                exact /= world_size
                with TrafficRecorder(names) as recorder:
                    if axis == "dp_replicate":
                        reducer = replica_reducer(strategy, mesh)
                        assert reducer is not None
                        reducer.start(values, Memory()).wait()
                    else:
                        part = torch.empty(size // world_size)
                        UnitScatter(shard_wire(strategy, mesh))(
                            part, values, mesh.group(axis), dist.ReduceOp.AVG
                        )
                        values, exact = part, exact.view(world_size, -1)[rank]
                sent = sum(n * sent_bytes(m, {axis: world_size}) for m, n in recorder.found.items())
                ring = (2 if axis == "dp_replicate" else 1) * 4 * size * (world_size - 1) / world_size
                found[f"{algorithm} {axis} {numbers}"] = ((values - exact).abs().max().item(), sent / ring)
    return found


@pytest.mark.distributed
def test_every_algorithm_finds_the_mean(gloo: Processes) -> None:
    results = gloo.run(4, _sums)
    for name in results[0]:
        assert max(result[name][0] for result in results) < 1e-6, name
        if str(SIZES[1]) in name and not name.startswith(("hierarchical", "parameter-server")):
            sent = [result[name][1] for result in results]
            assert sum(sent) / 4 == pytest.approx(1.0), f"{name}: together the ranks send what a ring sends"
            assert max(sent) < 1.5, name


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("ring", {"dp_shard": 2, "dp_replicate": 2, "zero": 3}),
        ("tree", {"dp_replicate": 2, "tp": 2}),
    ],
)
def test_training_equals_one_process(gloo: Processes, algorithm: str, options: dict[str, int]) -> None:
    strategy = strategy_of(build("llama", 1, torch.float32), micro_batches=2, **options)
    strategy = replace(strategy, grad_sync=replace(strategy.grad_sync, algorithm=algorithm))
    found = gloo.run(4, run_strategy, name="llama", strategy=strategy)[0]
    assert found.gradient < TOLERANCE[torch.float32]
    assert found.loss < TOLERANCE[torch.float32]
