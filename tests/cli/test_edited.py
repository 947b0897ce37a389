"""A strategy file and its numbers: what was edited is not shown with what was predicted before."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.cli.runner import refused, run, save
from tests.toy_graphs import toy_transformer

CLUSTER = "h100-sxm:1x4"
OWN = """schema = 1
name = "mine"
[[group]]
device = "h100-sxm"
nodes = 1
devices_per_node = 4
[[level]]
name = "nvlink"
size = 4
bytes_per_s = 450e9
latency_s = 3e-6
"""


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graph")
    return save(toy_transformer(layers=4, hidden=256, heads=4, seq=128), folder / "graph.json")


@pytest.fixture(scope="module")
def planned(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plan(graph, tmp_path_factory.mktemp("plan") / "s.toml", CLUSTER)


def plan(graph: Path, path: Path, cluster: str | Path, *options: str) -> Path:
    fixed = ("--set", "mesh.dp_shard=4", "--set", "shard.zero=3", "--global-batch", "16")
    answer = run("plan", graph, "--cluster", cluster, *fixed, *options, "-o", path)
    assert answer.status == 0, answer
    return path


def edited(path: Path, old: str, new: str, to: Path) -> Path:
    text = path.read_text()
    assert old in text
    to.write_text(text.replace(old, new))
    return to


@pytest.mark.parametrize(
    ("old", "new"),
    [("zero = 3", "zero = 1"), ("seq_len = 128", "seq_len = 256"), ('mode = "none"', 'mode = "full"')],
)
def test_an_edited_file_is_not_reported_with_its_old_numbers(
    planned: Path, tmp_path: Path, old: str, new: str
) -> None:
    changed = edited(planned, old, new, tmp_path / "edited.toml")
    words = ["edited.toml: was edited", "autoparallel score", f"--cluster {CLUSTER}", "-o NEW.toml"]
    refused("report", changed, "-o", tmp_path / "r.html", words=words)
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize("key", ["step_time_s", "peak_memory_gib", "lower_bound_s", "forward", "not_there"])
def test_edited_numbers_are_not_reported(planned: Path, tmp_path: Path, key: str) -> None:
    """The first of these keys in the file is halved: of [predicted], of [search], of a table inside."""
    lines = planned.read_text().splitlines()
    at = next((n for n, line in enumerate(lines) if line.startswith(f"{key} = ")), None)
    if at is None:
        at = next(n for n, line in enumerate(lines) if line.startswith("[predicted]")) + 1
        lines.insert(at, f"{key} = 2.0")
    value = lines[at].partition(" = ")[2].split(",")[0]
    lines[at] = lines[at].replace(value, str(float(value) / 2), 1) if key != "not_there" else lines[at]
    changed = tmp_path / "edited.toml"
    changed.write_text("\n".join(lines) + "\n")
    words = ["edited.toml: was edited", "[predicted] or [search] among it", "autoparallel score"]
    refused("report", changed, "-o", tmp_path / "r.html", words=words)


def test_comments_and_the_spelling_of_numbers_are_no_edit(planned: Path, tmp_path: Path) -> None:
    same = edited(planned, "optimizer = 0.0  ", "optimizer = 0  # mine ", tmp_path / "same.toml")
    assert run("report", same, "-o", tmp_path / "r.html").status == 0


def test_a_file_without_a_stamp_is_taken_at_its_word(planned: Path, tmp_path: Path) -> None:
    lines = [
        line
        for line in planned.read_text().splitlines()
        if not line.startswith(("strategy_hash", "numbers_hash"))
    ]
    old = tmp_path / "old.toml"
    old.write_text("\n".join(lines))
    assert run("report", old, "-o", tmp_path / "r.html").status == 0


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_that_are_none_are_refused(planned: Path, tmp_path: Path, value: str) -> None:
    line = next(one for one in planned.read_text().splitlines() if one.startswith("step_time_s"))
    changed = edited(planned, line, f"step_time_s = {value}", tmp_path / "s.toml")
    words = [f"[predicted] step_time_s = {value}", "finite"]
    refused("report", changed, "-o", tmp_path / "r.html", words=words)
    for key in ("offload.optimizer", "grad_sync.bucket_mib", "execution.dropout"):
        refused("plan", "g.json", "--cluster", CLUSTER, "--set", f"{key}={value}", words=["finite number"])


def test_options_that_are_no_numbers_are_refused(graph: Path, tmp_path: Path) -> None:
    common = (graph, "--cluster", CLUSTER)
    refused("whatif", *common, "--tokens", "inf", words=["--tokens inf", "finite"])
    for command in ("plan", "score", "whatif"):
        refused(command, *common, "--time-limit", "inf", words=["--time-limit inf", "finite"])
    racks = tmp_path / "racks.toml"
    racks.write_text(OWN.replace("450e9", "inf"))
    words = ["racks.toml", "level.0.bytes_per_s", "finite number"]
    refused("plan", graph, "--cluster", racks, words=words)


def test_a_shipped_cluster_is_named_and_any_cluster_can_be_embedded(
    graph: Path, planned: Path, tmp_path: Path
) -> None:
    assert tomllib.loads(planned.read_text())["problem"]["cluster"].keys() == {"name", "hash"}
    assert len(planned.read_text().splitlines()) < 220
    whole = plan(graph, tmp_path / "whole.toml", CLUSTER, "--embed-cluster")
    table = tomllib.loads(whole.read_text())["problem"]["cluster"]
    assert table["group"][0]["device"]["name"] == "h100-sxm"
    for path in (planned, whole):
        assert run("report", path, "-o", tmp_path / "r.html").status == 0
        assert run("score", graph, "--cluster", CLUSTER, "--strategy", path).status == 0


def test_a_file_that_was_planned_for_an_own_cluster_stands_alone(graph: Path, tmp_path: Path) -> None:
    racks = tmp_path / "racks.toml"
    racks.write_text(OWN)
    path = plan(graph, tmp_path / "s.toml", racks)
    racks.unlink()
    assert run("report", path, "-o", tmp_path / "r.html").status == 0
    assert run("export", path, "--to", "torchrun").status == 0
    table = tomllib.loads(path.read_text())["problem"]["cluster"]
    assert table["group"][0]["device"] == "h100-sxm"
    assert path.read_text().rindex("[problem.cluster]") > path.read_text().index("[search]")
    faster = edited(path, "bytes_per_s = 450000000000.0", "bytes_per_s = 9e11", tmp_path / "f.toml")
    refused("report", faster, "-o", tmp_path / "r.html", words=["[problem] cluster", "was edited"])
