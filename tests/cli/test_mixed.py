"""Clusters of unlike devices, and what devices cost, on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.runner import refused, run, save
from tests.toy_graphs import toy_transformer

MIXED = """schema = 1
name = "mixed"
[[group]]
device = "a100-sxm-40gb"
nodes = 1
devices_per_node = 4
price_per_device_hour = 3.0
[[group]]
device = "v100-sxm2-32gb"
nodes = 1
devices_per_node = 4
price_per_device_hour = 1.0
[[level]]
name = "nvlink"
size = 4
bytes_per_s = 150e9
latency_s = 3e-6
[[level]]
name = "infiniband"
size = 8
bytes_per_s = 6e9
latency_s = 14e-6
"""


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(toy_transformer(heads=4), tmp_path_factory.mktemp("graph") / "graph.json")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cluster") / "mixed.toml"
    path.write_text(MIXED)
    return path


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["mesh.groups=[0, 5]"], ["mesh.groups", "0 to 1"]),
        (["mesh.pp=2", "mesh.groups=[0, 0, 1]"], ["mesh.groups", "mesh.pp = 2"]),
    ],
)
@pytest.mark.parametrize("command", ["plan", "score"])
def test_groups_that_are_not_there_are_named(
    graph: Path, mixed: Path, command: str, settings: list[str], words: list[str]
) -> None:
    options = [part for setting in settings for part in ("--set", setting)]
    refused(command, graph, "--cluster", mixed, "--set", "execution.dtype=fp16", *options, words=words)


def test_named_groups_take_their_own_devices_at_their_own_price(graph: Path, mixed: Path) -> None:
    options = ("--set", "execution.dtype=fp16", "--global-batch", "16", "--set", "mesh.groups=[1, 1]")
    answer = run("plan", graph, "--cluster", mixed, *options, "--json")
    assert answer.status == 0, answer
    assert answer.json["devices"] == 4
    cost = answer.json["cost"]
    assert cost["per_hour"] == pytest.approx(4 * 1.0)
    assert cost["per_step"] == pytest.approx(4 * answer.json["step_time_s"] / 3600)
    assert "4 devices of 4 a100-sxm-40gb" in answer.err
    assert "an hour" in answer.err


def test_how_long_and_at_what_price_some_tokens_take(graph: Path, mixed: Path, tmp_path: Path) -> None:
    options = ("--set", "execution.dtype=fp16", "--global-batch", "16", "--vary", "mesh.groups=[0],[1]")
    page = tmp_path / "w.html"
    answer = run("whatif", graph, "--cluster", mixed, *options, "--tokens", "1e9", "-o", page, "--json")
    assert answer.status == 0, answer
    for case in answer.json["cases"]:
        assert case["days"] == pytest.approx(1e9 / case["tokens_per_s"] / 86400)
        assert case["price"] == pytest.approx(case["cost"]["per_hour"] * case["days"] * 24)
    assert "Days" in page.read_text()
    assert "days" in answer.err
