"""What the devices of a node keep on its host: by node, at the fullest moment."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.costmodel.host_memory import fullest_host_bytes, host_bytes_by_rank, ranks_on_hosts
from autoparallel.costmodel.program import Axis
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.score import score
from autoparallel.planner.strategy.types import Batch, Mesh, Offload, Pipeline, Strategy
from autoparallel.profiles.load import load_cluster
from tests.toy_graphs import toy_transformer

GRAPH = toy_transformer(layers=4, hidden=256, heads=4, seq=128)
CLUSTER = load_cluster("h100-sxm:2x4")
BASE = Strategy(
    batch=Batch(global_=16, micro=1), mesh=Mesh(pp=2, dp_replicate=4),
    pipeline=Pipeline(schedule="1f1b", stage_blocks=(2, 2)), offload=Offload(activations=1.0),
)  # fmt: skip


def test_a_node_has_the_micro_batches_of_its_own_ranks_on_its_host() -> None:
    expander = Expander(graph=GRAPH, cluster=CLUSTER)
    saved = expander.work(replace(BASE, offload=Offload()), 1, "none").saved_bytes
    program, states = expander.program(BASE), expander.prepared(BASE).states
    assert host_bytes_by_rank(states, program.stages) == (2 * 2 * saved, 2 * saved)  # two in flight, then one
    assert fullest_host_bytes(program, (4 * saved, 2 * saved), CLUSTER) == 4 * 4 * saved
    inside = replace(BASE, mesh=replace(BASE.mesh, order=("dp_replicate", "dp_shard", "cp", "tp", "pp")))
    assert score(GRAPH, CLUSTER, inside).host_bytes == (2 * 4 + 2 * 2) * saved


def test_a_strategy_fits_up_to_the_last_byte_of_its_hosts() -> None:
    used = score(GRAPH, CLUSTER, BASE).host_bytes

    def feasible(memory_bytes: float) -> bool:
        constants = {"host.memory_bytes": memory_bytes, "host.usable": 1.0}
        groups = tuple(
            replace(g, device=replace(g.device, constants={**g.device.constants, **constants}))
            for g in CLUSTER.groups
        )
        return score(GRAPH, replace(CLUSTER, groups=groups), BASE).feasible

    assert feasible(used)
    assert not feasible(used - 1)
    assert feasible(0.0), "nobody knows"


def test_state_on_the_host_is_what_left_the_devices() -> None:
    here = replace(BASE, offload=Offload())
    before, after = (score(GRAPH, CLUSTER, s) for s in (here, replace(BASE, offload=Offload(optimizer=1.0))))
    assert before.host_bytes == 0
    left = [a.optimizer - b.optimizer for a, b in zip(before.memory, after.memory, strict=True)]
    assert after.host_bytes == 4 * max(left)


@given(size=st.integers(1, 8), inside=st.integers(1, 24), outside=st.integers(1, 3), each=st.integers(1, 8))
def test_every_host_has_all_its_devices(size: int, inside: int, outside: int, each: int) -> None:
    devices = size * inside * outside
    cluster = load_cluster(f"h100-sxm:{-(-devices // each)}x{each}")
    axes = (
        Axis(name="dp_replicate", size=outside, stride=size * inside),
        Axis(name="pp", size=size, stride=inside), Axis(name="dp_shard", size=inside, stride=1),
    )  # fmt: skip
    shares = ranks_on_hosts(axes, cluster)
    homes = [device // inside % size for device in range(devices)]
    hosts = [homes[start : start + each] for start in range(0, devices, each)]
    assert {tuple(sorted(Counter(host).items())) for host in hosts} >= {tuple(sorted(s)) for s in shares}
    assert {rank for share in shares for rank, _ in share} == set(range(size))
    fullest = max(sum(rank + 1 for rank in host) for host in hosts)
    assert max(sum((rank + 1) * count for rank, count in share) for share in shares) == fullest


def test_nothing_on_the_host_is_nothing() -> None:
    assert score(GRAPH, CLUSTER, replace(BASE, offload=Offload())).host_bytes == pytest.approx(0)
