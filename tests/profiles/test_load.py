from __future__ import annotations

from pathlib import Path

import pytest

from autoparallel.errors import UserError
from autoparallel.profiles import cluster_from_dict, cluster_to_dict, load_cluster, load_device
from autoparallel.profiles.parts import grown

DEVICE = """
schema = 1
name = "mine"
hbm_bytes_per_s = 2e12
[memory]
bytes = { value = 80e9, kind = "measured", source = "mine" }
reserve_bytes = 2e9
[peak_flops]
bf16 = 300e12
[box]
devices_per_node = 4
[[box.levels]]
name = "nvlink"
size = 4
bytes_per_s = 300e9
latency_s = 3e-6
[[box.levels]]
name = "ethernet"
bytes_per_s = 3e9
latency_s = 2e-5
"""
CLUSTER = """
schema = 1
name = "two racks"
[[group]]
device = "a100-sxm-80gb"
nodes = 4
devices_per_node = 8
price_per_device_hour = 2.5
[[level]]
name = "nvlink"
size = 8
bytes_per_s = 300e9
latency_s = 3e-6
[[level]]
name = "leaf"
size = 16
bytes_per_s = 25e9
latency_s = 1e-5
[[level]]
name = "spine"
size = 64
bytes_per_s = 25e9
latency_s = 2e-5
oversubscription = 2.0
"""


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_job_takes_equally_many_devices_of_each_domain_that_it_needs() -> None:
    sizes = {spec: load_cluster(spec).levels[0].size for spec in ("gb200:18x4", "gb200:64x4", "gb200:36x4")}
    assert sizes == {"gb200:18x4": 72, "gb200:64x4": 64, "gb200:36x4": 72}
    assert load_cluster("h100-sxm:9x8").levels[0].size == 8


def test_a_device_file_of_bare_numbers_takes_generic_constants(tmp_path: Path) -> None:
    device = load_device(write(tmp_path, "mine.toml", DEVICE))
    assert device.memory_bytes == 80e9
    assert device.provenance["memory.bytes"].source == "mine"
    assert device.provenance["hbm_bytes_per_s"].kind == "user"
    assert device.constants["gemm.units"] > 0


def test_devices_and_clusters_of_a_folder_are_found_by_name(tmp_path: Path) -> None:
    write(tmp_path, "mine.toml", DEVICE)
    write(tmp_path, "racks.toml", CLUSTER.replace("a100-sxm-80gb", "mine").replace("size = 8", "size = 4"))
    assert load_cluster("mine:2x4", dirs=[tmp_path]).devices == 8
    assert load_cluster("racks", dirs=[tmp_path]).device.name == "mine"


def test_a_cluster_file_states_its_own_network(tmp_path: Path) -> None:
    cluster = load_cluster(write(tmp_path, "c.toml", CLUSTER))
    assert cluster.name == "two racks"
    assert [level.size for level in cluster.levels] == [8, 16, 32]  # the outermost holds just the cluster
    assert cluster.levels[2].oversubscription == 2.0
    assert cluster.groups[0].price_per_device_hour == 2.5


def test_a_cluster_file_without_levels_has_those_of_its_device(tmp_path: Path) -> None:
    text = CLUSTER.split("[[level]]")[0]
    assert load_cluster(write(tmp_path, "c.toml", text)).levels == load_cluster("a100-sxm-80gb:4x8").levels


def test_a_box_s_own_links_end_at_a_node_that_holds_fewer_devices(tmp_path: Path) -> None:
    lone = CLUSTER.replace("devices_per_node = 8", "devices_per_node = 1")
    for text in (lone, lone.split("[[level]]")[0]):
        assert load_cluster(write(tmp_path, "c.toml", text)).levels[0].size == 1, text
    rack = CLUSTER.replace("a100-sxm-80gb", "gb200").replace("devices_per_node = 8", "devices_per_node = 4")
    assert load_cluster(write(tmp_path, "c.toml", rack)).levels[0].size == 8  # NVLink that joins nodes


def test_unequal_groups_share_a_box_that_each_node_holds_and_keep_their_own(tmp_path: Path) -> None:
    nodes = "[[group]]\ndevice = '{}'\nnodes = {}\ndevices_per_node = {}\n"
    text = "schema = 1\n" + nodes.format("a100-sxm-80gb", 2, 8) + nodes.format("v100-sxm2-16gb", 4, 1)
    cluster = load_cluster(write(tmp_path, "c.toml", text))
    assert [level.size for level in cluster.levels] == [1, 20]
    assert [[level.size for level in group.levels] for group in cluster.groups] == [[8, 16], []]


def test_a_level_beyond_the_cluster_is_dropped() -> None:
    assert [level.name for level in load_cluster("h100-sxm:1x8").levels] == ["nvlink"]
    assert [level.size for level in load_cluster("h100-sxm:3x2").levels] == [2, 6]
    assert [level.size for level in load_cluster("h100-sxm:1x1").levels] == [1]


def test_processes_that_outnumber_the_cores_share_them_once() -> None:
    two, four = load_cluster("cpu-gloo:1x2"), load_cluster("cpu-gloo:1x4")
    assert four.device.peak_flops["fp32"] == two.device.peak_flops["fp32"] / 2
    assert four.levels[0].bytes_per_s == two.levels[0].bytes_per_s / 2
    assert cluster_from_dict(cluster_to_dict(four)) == four


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("h100-sxn:1x8", ["h100-sxn", "did you mean `h100-sxm`"]),
        ("h100:1x8", ["did you mean `h100-pcie`"]),
        ("h100-sxm:0x8", ["at least one node"]),
        ("h100-sxm:1x0", ["at least one node"]),
        ("h100-sxm:1x16", ["holds 8 devices, not 16", "h100-sxm:2x8"]),
        ("h100-sxm:1000000000x8", ["8,000,000,000 devices", "1,048,576", "name a part"]),
        ("h100-sxm:8", ["NODESxPER_NODE", "h100-sxm:2x8"]),
        ("h100-sxm", ["is a device", "h100-sxm:1x1"]),
        ("dgx-h10", ["did you mean `dgx-h100`"]),
        ("missing.toml", ["missing.toml", "no such cluster file"]),
    ],
)
def test_a_wrong_cluster_name_says_what_to_try(spec: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load_cluster(spec)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("latency_s = 3e-6", "latency = 3e-6", ["level.0", "`latency`", "did you mean `latency_s`"]),
        ("[[group]]", "[group]", ["`group`", "[[group]]"]),
        ("nodes = 4\n", "", ["group.0.nodes", "is missing"]),
        ("nodes = 4", "node = 4", ["group.0", "did you mean `nodes`"]),
        ("schema = 1", "schema = 2", ["schema = 2", "newer", "upgrade"]),
        ("nodes = 4", 'nodes = "four"', ["group.0.nodes", "number"]),
        ("nodes = 4", "nodes = 0", ["group.0.nodes", "more than 0"]),
        ("nodes = 4", "nodes = 1e300", ["group.0", "more than the 1,048,576", "name a part"]),
        ("nodes = 4", "nodes = 1.5", ["group.0.nodes", "whole"]),
        ("nodes = 4", 'nodes = { value = 4, kind = "guessed" }', ["kind `guessed`", "datasheet"]),
        ("nodes = 4", 'nodes = { value = 4, sauce = "x" }', ["did you mean `source`"]),
        ("bytes_per_s = 300e9", "bytes_per_s = -1", ["level.0.bytes_per_s", "at least 1"]),
        ("bytes_per_s = 300e9", "bytes_per_s = inf", ["level.0.bytes_per_s"]),
        ("size = 16", "size = 12", ["level.1.size", "multiple"]),
        ("size = 64", "size = 16", ["level.2.size", "multiple"]),
        ("nodes = 4", "nodes = 40", ["spine", "64", "320"]),
        ("oversubscription = 2.0", "oversubscription = 0.5", ["oversubscription", "at least 1"]),
        ("[[group]]", "[[groop]]", ["did you mean `group`"]),
        ('"a100-sxm-80gb"', '"a100-sxm-80"', ["did you mean `a100-sxm-80gb`"]),
        ("[[level]]", "[[level", ["not valid TOML"]),
    ],
)
def test_a_mistake_in_a_cluster_file_names_file_key_and_remedy(
    tmp_path: Path, old: str, new: str, words: list[str]
) -> None:
    path = write(tmp_path, "broken.toml", CLUSTER.replace(old, new, 1))
    with pytest.raises(UserError) as error:
        load_cluster(path)
    assert "broken.toml" in str(error.value) or "did you mean `a100" in str(error.value)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("bf16 = 300e12", "bf17 = 300e12", ["peak_flops.bf17", "did you mean `bf16`"]),
        ("[box]", "[constants.gemm]\nunit = 3\n[box]", ["constants.gemm.unit", "did you mean `gemm.units`"]),
        ("[box]", "[constants.gemm]\nunits = 0\n[box]", ["constants.gemm.units", "more than 0"]),
        ("bf16 = 300e12", "bf16 = 3e-12", ["peak_flops.bf16", "at least 1"]),
        ("[memory]", 'architecture = "hoper"\n[memory]', ["hoper", "did you mean `hopper`"]),
        ("[memory]", 'architecture = ""\n[memory]', ["constants missing", "architecture"]),
        ("size = 4", "", ["box.levels.0.size", "outermost"]),
    ],
)
def test_a_mistake_in_a_device_file_names_the_key(
    tmp_path: Path, old: str, new: str, words: list[str]
) -> None:
    path = write(tmp_path, "device.toml", DEVICE.replace(old, new, 1))
    with pytest.raises(UserError) as error:
        load_device(path)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (1, 8), (4, 8)])
def test_a_grown_node_is_what_its_box_and_network_are(nodes: int, per_node: int) -> None:
    found, usual = (
        grown(load_cluster("h100-sxm:1x2"), nodes, per_node),
        load_cluster(f"h100-sxm:{nodes}x{per_node}"),
    )
    assert found.groups == usual.groups
    assert found.levels == usual.levels
