"""Machines are known by the names that drivers give their devices."""

from __future__ import annotations

import pytest

from autoparallel.profiles import device_names
from autoparallel.profiles.likest import device_of_hardware

NAMES = {
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": None,
    "NVIDIA H200": "h200",
    "NVIDIA GH200 480GB": None,
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA A100-PCIE-40GB": None,
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA GB300": "gb300",
    "NVIDIA B300 SXM6 AC": "b300",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "Tesla V100-SXM2-16GB": "v100-sxm2-16gb",
    "Tesla V100-SXM2-32GB": "v100-sxm2-32gb",
    "AMD Instinct MI300X": "mi300x",
    "Tesla T4": None,
}


@pytest.mark.parametrize(("hardware", "device"), NAMES.items())
def test_a_device_is_known_by_its_drivers_name(hardware: str, device: str | None) -> None:
    assert device_of_hardware(hardware) == device


def test_every_shipped_accelerator_has_a_name_that_finds_it() -> None:
    assert set(device_names()) - set(NAMES.values()) == {"cpu-gloo"}
