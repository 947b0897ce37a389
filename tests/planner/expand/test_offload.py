"""State and activations on the host: less memory, and the seconds of the link that nothing hides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.costmodel.kernels import HOST_COPY
from autoparallel.costmodel.program import Kernel
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.expand.offload import whole_storages_bytes
from autoparallel.planner.score import score
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.types import Batch, Mesh, Offload, Pipeline, Strategy
from autoparallel.profiles.load import load_cluster
from tests.toy_graphs import toy_transformer

CLUSTER = load_cluster("h100-sxm:1x2")
GRAPH = toy_transformer(layers=4, hidden=1024, heads=8, seq=512)
BASE = Strategy(
    batch=Batch(global_=8, micro=2), mesh=Mesh(pp=2), pipeline=Pipeline(schedule="1f1b", stage_blocks=(2, 2))
)
ADAMW_BYTES = 12


def with_offload(**shares: float) -> Strategy:
    return replace(BASE, offload=Offload(**shares))


def test_optimizer_state_on_the_host_leaves_the_device_and_travels_once_a_step() -> None:
    here, half, away = (score(GRAPH, CLUSTER, with_offload(optimizer=f)) for f in (0.0, 0.5, 1.0))
    for before, kept, gone in zip(here.memory, half.memory, away.memory, strict=True):
        assert gone.optimizer == 0
        assert kept.optimizer == pytest.approx(before.optimizer / 2)
    moved = max(m.optimizer for m in here.memory)
    link_s = moved / CLUSTER.device.constants["host.bytes_per_s"]
    more_s = away.step_time_s - here.step_time_s
    assert dict(away.breakdown_s)["host_copies"] == pytest.approx(more_s, rel=1e-3)
    assert more_s == pytest.approx(link_s, rel=0.3), (more_s, link_s)
    assert here.step_time_s < half.step_time_s < away.step_time_s


def test_activations_on_the_host_are_copied_out_and_back() -> None:
    expander = Expander(GRAPH, CLUSTER)
    here, away = (expander.work(with_offload(activations=f), 1, "none") for f in (0.0, 0.75))
    copies = [
        s.bytes_moved
        for part in (away.forward, away.backward_input)
        for s in part
        if isinstance(s, Kernel) and s.kind == HOST_COPY
    ]
    assert copies == [here.saved_bytes * 3 // 4] * 2
    assert away.saved_bytes == here.saved_bytes // 4
    ends = expander.work(with_offload(activations=0.75), 0, "none")
    assert ends == expander.work(BASE, 0, "none"), "what stands before the blocks keeps its own"


def test_offloading_activations_saves_memory_where_several_micro_batches_are_held() -> None:
    peaks = [score(GRAPH, CLUSTER, with_offload(activations=f)).memory[0].peak for f in (0.0, 0.5, 1.0)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[-1]


def test_a_slow_link_is_waited_for() -> None:
    slow = load_cluster("rtx4090:1x2")
    times = [score(GRAPH, slow, with_offload(activations=f)) for f in (0.0, 1.0)]
    assert times[1].step_time_s > times[0].step_time_s
    copies_s = [dict(time.breakdown_s)["host_copies"] for time in times]
    assert copies_s[0] == 0 < copies_s[1]
    assert sum(s for _, s in times[1].breakdown_s) == pytest.approx(times[1].step_time_s)


def test_a_share_lies_between_nothing_and_all() -> None:
    assert strategy_problems(GRAPH, CLUSTER, with_offload(optimizer=1.5)) == [
        "offload.optimizer = 1.5: a share, from 0 to 1"
    ]


def test_whole_storages_move_as_long_as_they_stay_within_the_share() -> None:
    """In the order in which they are kept: the large one would be more than half of what was kept until then, and stays."""
    assert whole_storages_bytes([4, 4, 54, 4, 20], 0.5) == 4 + 4 + 20
    assert whole_storages_bytes([4, 4, 54], 1.0) == 62
    assert whole_storages_bytes([8], 0.75) == 0
