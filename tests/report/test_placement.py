"""Where axes sit on irregular networks, in words and in launch files."""

from __future__ import annotations

from dataclasses import replace

from autoparallel.exports.launch import torchrun
from autoparallel.exports.plan import Plan
from autoparallel.planner.strategy.types import Batch, Mesh, Pipeline, Recompute, Strategy
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


def test_expert_parallelism_is_in_the_table_of_axes() -> None:
    cluster = load_cluster("h100-sxm:4x8")
    near = Strategy(batch=Batch(global_=32, micro=1), mesh=Mesh(dp_shard=16, tp=2, ep=8))
    table = places(near, cluster)
    assert [(place.axis, place.size, place.stride, place.level.name) for place in table] == [
        ("dp_shard", 16, 2, "infiniband"), ("tp", 2, 1, "nvlink"), ("ep", 8, 1, "nvlink"),
    ]  # fmt: skip
    far = replace(near, mesh=replace(near.mesh, ep=16))
    assert places(far, cluster)[-1].level.name == "infiniband"
    (told,) = [choice for choice in choices(far, cluster, {}) if choice.name == "Expert parallelism"]
    assert "tokens travel to theirs over infiniband" in told.text
    assert places(replace(ROUND, mesh=replace(ROUND.mesh, ep=8)), RING)[-1].axis == "ep"


def test_many_stages_and_nodes_are_told_in_runs() -> None:
    cluster = load_cluster("a100-v100")
    mesh = Mesh(pp=16, dp_shard=2, groups=(1,) * 8 + (0,) * 8, placement=(3, 2, 1, 0))
    many = Strategy(
        batch=Batch(global_=32, micro=1), mesh=mesh, recompute=Recompute(per_stage=(1,) + (0,) * 15),
        pipeline=Pipeline(schedule="1f1b", stage_blocks=(1,) * 8 + (3,) * 8),
    )  # fmt: skip
    told = {choice.name: choice for choice in choices(many, cluster, {})}
    assert told["Device groups"].setting == "groups = [8 × 1, 8 × 0]"
    assert (
        "ranks 0 to 7 on 2 v100-sxm2-32gb each with [1, 1, 1, 1, 1, 1, 1, 1] blocks"
        in told["Device groups"].text
    )
    assert "(1, 15 × 0 by chunk)" in told["Recomputation"].text
    assert all(choice.text.count(",") < 24 for choice in told.values())
