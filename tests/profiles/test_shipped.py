from __future__ import annotations

import json

import pytest

from autoparallel.profiles import (
    ValueKind,
    cluster_from_dict,
    cluster_names,
    cluster_to_dict,
    device_names,
    load_cluster,
    load_device,
)
from autoparallel.profiles.constants import CONSTANTS

DEVICES = {
    "v100-sxm2-16gb", "v100-sxm2-32gb", "a100-sxm-40gb", "a100-sxm-80gb", "a100-pcie-80gb", "h100-sxm",
    "h100-pcie", "h200", "b200", "b300", "gb200", "gb300", "l40s", "rtx4090", "mi300x", "cpu-gloo",
}  # fmt: skip


def test_the_promised_devices_ship() -> None:
    assert set(device_names()) >= DEVICES


@pytest.mark.parametrize("name", device_names())
def test_every_figure_of_a_device_has_a_kind_and_a_source(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    figures = {"memory.bytes", "memory.reserve_bytes", "hbm_bytes_per_s", "box.devices_per_node"}
    figures |= {f"peak_flops.{dtype}" for dtype in device.peak_flops}
    figures |= {f"constants.{key}" for key in CONSTANTS}
    for index in range(len(device.levels)):
        figures |= {f"box.levels.{index}.bytes_per_s", f"box.levels.{index}.latency_s"}
    unsourced = {
        key: value
        for key, value in device.provenance.items()
        if value.kind is ValueKind.USER or len(value.source) < 5 or value.source.endswith(".toml")
    }
    assert not unsourced
    assert figures <= set(device.provenance), figures - set(device.provenance)


@pytest.mark.parametrize("name", cluster_names())
def test_every_figure_of_a_cluster_has_a_kind_and_a_source(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    for key, value in cluster.provenance.items():
        assert value.kind is not ValueKind.USER, key
        assert len(value.source) > 5, key
    assert "level.0.bytes_per_s" in cluster.provenance


@pytest.mark.parametrize("name", device_names())
def test_figures_of_a_device_are_plausible(name: str) -> None:
    device = load_device(name)
    assert device.reserve_bytes < 0.3 * device.memory_bytes
    assert all(0 < device.constants[key] <= 2 for key in CONSTANTS if ".efficiency" in key)
    assert [level.size for level in device.levels] == sorted(level.size for level in device.levels)
    full = device.peak_flops["fp32"]
    assert all(device.peak_flops.get(dtype, full) >= full for dtype in ("fp8", "mxfp8", "nvfp4"))


@pytest.mark.parametrize("name", cluster_names())
def test_a_cluster_survives_being_written_into_a_strategy_file(name: str) -> None:
    cluster = load_cluster(name)
    table = json.loads(json.dumps(cluster_to_dict(cluster)))
    again = cluster_from_dict(table)
    assert again == cluster
    assert again.device.provenance == cluster.device.provenance
    assert cluster_to_dict(again) == cluster_to_dict(cluster)


def test_nvl72_racks_are_one_nvlink_domain_of_trays_of_four() -> None:
    cluster = load_cluster("gb300:36x4")
    assert [level.size for level in cluster.levels] == [72, 144]
    assert cluster.groups[0].devices_per_node == 4


def test_the_slowest_device_stands_for_a_heterogeneous_cluster() -> None:
    assert load_cluster("a100-v100").device.name == "v100-sxm2-32gb"
