"""Cluster files with switches, links and nodes short of a device."""

from __future__ import annotations

from typing import Any

import pytest

from autoparallel.errors import UserError
from autoparallel.profiles import cluster_from_dict, cluster_to_dict, load_cluster
from autoparallel.profiles.parts import devices_of_nodes, of_nodes, only_group
from tests.clusters import cluster_file, racks, ring


@pytest.mark.parametrize("name", ["two-racks", "ring-of-four", "short-node", "a100-v100"])
def test_a_cluster_reads_back_from_its_table(name: str) -> None:
    cluster = load_cluster(name)
    again = cluster_from_dict(cluster_to_dict(cluster))
    assert again == cluster
    assert {k: v for k, v in again.provenance.items() if k.startswith("network.")} == {
        k: v for k, v in cluster.provenance.items() if k.startswith("network.")
    }


def test_a_trunk_carries_the_ports_of_its_switch_divided_by_the_oversubscription() -> None:
    network = load_cluster("two-racks").network
    assert network is not None
    trunks = [link for link in network.fabric.links if min(link.ends) >= network.fabric.nodes]
    assert [link.bytes_per_s for link in trunks] == [2 * 4e11 / 4] * 2
    assert [network.fabric.name(end) for end in trunks[0].ends] == ["leaf-0", "spine"]


def test_the_level_that_stands_for_the_network_is_no_slower_than_any_node() -> None:
    cluster = ring([1e10, 2e10, 3e10], per_node=2)
    assert cluster.levels[-1].bytes_per_s == 5e10 / 2
    assert cluster.levels[-1].size == 6


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"link": [{"between": ["node-0", "leaf"], "bytes_per_s": 1e9, "latency_s": 0}], "switch": [{"name": "leaf-0"}]},
     "did you mean `leaf-0`"),
    ({"link": [{"between": ["node-0", "node-0"], "bytes_per_s": 1e9, "latency_s": 0}]}, "itself"),
    ({"link": [{"between": ["node-0", "node-1"], "bytes_per_s": 0, "latency_s": 0}]}, "at least 1"),
    ({"link": [{"between": ["node-0", "node-1"], "bytes_per_s": 1e9, "latency_s": 0, "speed": 3}]}, "unknown key `speed`"),
    ({"switch": [{"name": "leaf", "nodes": [0, 5], "bytes_per_s": 1e9, "latency_s": 0}]}, "nodes 0 to 2"),
    ({"switch": [{"name": "leaf", "nodes": [0, 1]}]}, "needs bytes_per_s"),
    ({"switch": [{"name": "leaf", "nodes": [0, 1], "bytes_per_s": 1e9, "latency_s": 0}]}, "nothing joins node-0 and node-2"),
    ({"switch": [{"name": "a"}, {"name": "a"}]}, "name of its own"),
]  # fmt: skip


@pytest.mark.parametrize(("tables", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_mistake_in_a_network_is_named(tables: dict[str, Any], said: str) -> None:
    table = cluster_file(3, ()) | tables
    table = {k: v for k, v in table.items() if k != "link" or "link" in tables}
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        cluster_from_dict(table, "test")


def test_levels_beyond_the_node_and_links_contradict_each_other() -> None:
    table = cluster_file(2, [("node-0", "node-1", 1e9)])
    table["level"].append({"name": "leaf", "size": 4, "bytes_per_s": 1e9, "latency_s": 0.0})
    with pytest.raises(UserError, match="leave it out"):
        cluster_from_dict(table, "test")


def short_file(short: dict[str, int]) -> dict[str, Any]:
    table = cluster_file(4, (), per_node=8)
    table["group"][0]["short"] = short
    table["level"][0]["size"] = 8
    table["level"].append({"name": "fabric", "size": 32, "bytes_per_s": 1e10, "latency_s": 1e-5})
    del table["link"]
    return table


def test_ports_belong_to_links() -> None:
    with pytest.raises(UserError, match="there is none"):
        cluster_from_dict(short_file({}) | {"nics": 2}, "test")


def test_a_node_may_be_short_of_devices() -> None:
    cluster = cluster_from_dict(short_file({"1": 7, "3": 0}), "test")
    assert cluster.devices == 23
    assert devices_of_nodes(cluster) == (8, 7, 8, 0)
    assert cluster_from_dict(cluster_to_dict(cluster)) == cluster
    whole = of_nodes(cluster, (0, 2), 8)
    assert (whole.devices, whole.groups[0].nodes, whole.groups[0].short) == (16, 2, ())
    part = of_nodes(cluster, (0, 1, 2), 7)
    assert (part.devices, [level.size for level in part.levels]) == (21, [7, 21])
    last = of_nodes(cluster, (0, 2, 1), 8)
    assert [(g.nodes, g.devices_per_node) for g in last.groups] == [(2, 8), (1, 7)]
    assert [level.size for level in last.levels] == [8, 23]


@pytest.mark.parametrize(
    ("short", "said"), [({"4": 7}, "nodes 0 to 3"), ({"1": 9}, "more than"), ({"x": 1}, "nodes 0")]
)
def test_a_short_node_that_cannot_be_is_named(short: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        cluster_from_dict(short_file(short), "test")


def test_a_level_whose_units_are_no_longer_alike_is_left_out() -> None:
    table = short_file({})
    table["level"].insert(1, {"name": "leaf", "size": 16, "bytes_per_s": 2e10, "latency_s": 1e-5})
    cluster = cluster_from_dict(table, "test")
    assert [level.name for level in of_nodes(cluster, (0, 1, 2)).levels] == ["nvlink", "leaf", "fabric"]
    assert [level.name for level in of_nodes(cluster, (0, 2, 3)).levels] == ["nvlink", "fabric"]
    assert [(level.name, level.size) for level in of_nodes(cluster, (0, 1, 2, 3), 6).levels] == [
        ("nvlink", 6), ("leaf", 12), ("fabric", 24),
    ]  # fmt: skip


def test_a_group_alone_has_its_own_levels() -> None:
    cluster = load_cluster("a100-v100")
    alone, common = only_group(cluster, 0), cluster.levels
    assert alone.levels[0].bytes_per_s > common[0].bytes_per_s
    assert alone.levels[1].bytes_per_s > common[1].bytes_per_s
    assert only_group(cluster, 1).levels[0].bytes_per_s == common[0].bytes_per_s


def test_one_group_of_an_irregular_network_keeps_its_nodes() -> None:
    cluster = racks([0, 1, 0], 1e10, 1e9)
    assert only_group(cluster, 0).network == cluster.network
