"""Where axes sit on irregular networks, in words and in launch files."""

from __future__ import annotations

from dataclasses import replace

from autoparallel.exports.launch import torchrun
from autoparallel.exports.plan import Plan
from autoparallel.planner.strategy.types import Batch, Mesh, Pipeline, Strategy
from autoparallel.profiles import load_cluster
from autoparallel.report.placement import placement_setting, placement_words, places
from autoparallel.report.words import choices, cluster_words

RING = load_cluster("ring-of-four")
ROUND = Strategy(
    batch=Batch(global_=32, micro=1),
    mesh=Mesh(pp=4, dp_shard=8, placement=(1, 0, 3, 2), per_node=8),
    pipeline=Pipeline(schedule="1f1b", stage_blocks=(1, 1, 1, 1)),
)


def test_an_axis_has_what_the_links_leave_it() -> None:
    pp, shard = places(ROUND, RING)
    assert (pp.axis, pp.level.bytes_per_s) == ("pp", 25e9 / 8)
    assert set(pp.link or ()) <= {"node-0", "node-1", "node-2", "node-3"}
    assert (shard.axis, shard.link, shard.level.name) == ("dp_shard", None, "nvlink")
    (worse, _) = places(replace(ROUND, mesh=replace(ROUND.mesh, placement=(0, 1, 2, 3))), RING)
    assert worse.level.bytes_per_s == 2.5e9 / 8
    assert set(worse.link or ()) == {"node-1", "node-2"}


def test_the_placement_is_told_with_the_link_that_holds_each_axis() -> None:
    said = placement_words(ROUND, RING)
    assert said.startswith("8 devices of nodes 1, 0, 3, 2 in rank order; pp at 3.12 GB/s per device")
    assert placement_setting(ROUND) == "placement = [1, 0, 3, 2], per_node = 8"
    names = [choice.name for choice in choices(ROUND, RING, {})]
    assert "Placement" in names
    plain = replace(ROUND, mesh=replace(ROUND.mesh, placement=(), per_node=0))
    assert not placement_words(plain, RING)
    assert cluster_words(load_cluster("short-node")) == "31 a100-sxm-80gb (4 nodes of 8, node 2 of 7)"


def test_each_host_is_told_its_number_where_the_plan_names_nodes() -> None:
    text = torchrun(Plan(path="plan.toml", strategy=ROUND, cluster=RING, seq_len=1)).text
    assert '--nnodes 4 --nproc-per-node 8 --node-rank "$NODE_RANK"' in text
    assert "--node-rank is 0 to 3 on nodes 1, 0, 3, 2" in text
