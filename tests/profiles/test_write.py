"""A device that is written is the device that is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoparallel.profiles import load_cluster, load_device
from autoparallel.profiles.load import own_constants
from autoparallel.profiles.write import device_file, write_device


@pytest.mark.parametrize("name", ["cpu-gloo", "h100-sxm"])
def test_a_written_device_reads_back_with_its_sources_and_residuals(name: str, tmp_path: Path) -> None:
    device = load_device(name)
    architecture, own = own_constants(name)
    path = tmp_path / "device.toml"
    write_device(path, device_file(device, architecture, {f"constants.{key}" for key in own}), "a comment")
    again = load_device(str(path))
    assert again.constants == pytest.approx(device.constants, rel=1e-5)
    assert again.peak_flops == pytest.approx(device.peak_flops, rel=1e-5)
    assert again.residuals.keys() == device.residuals.keys()
    for key, known in device.provenance.items():
        if key.startswith(("peak_flops", "memory", "box")):
            assert again.provenance[key] == known, key


def test_a_device_file_stands_for_one_box_of_it(tmp_path: Path) -> None:
    path = tmp_path / "device.toml"
    architecture, own = own_constants("h100-sxm")
    table = device_file(load_device("h100-sxm"), architecture, {f"constants.{key}" for key in own})
    write_device(path, table, "")
    assert load_cluster(str(path)).devices == 8
    assert load_cluster(f"{path}:2x4").devices == 8
