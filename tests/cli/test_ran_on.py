"""`whatif RUN/ --without` and `replan RUN/` are about the machines that the run was on: its record says which."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from autoparallel.profiles import load_cluster
from autoparallel.ran_on import said_of
from autoparallel.runtime.monitor.record import NAME
from tests.cli.runner import Answer, refused, run, save, strategy_toml
from tests.toy_graphs import toy_transformer

CLUSTER = "a100-pcie-80gb:1x4"
# The same machines, whose network was measured.
MEASURED = """schema = 1
name = "measured"
[[group]]
device = "a100-pcie-80gb"
nodes = 1
devices_per_node = 4
[[level]]
name = "pcie"
size = 4
bytes_per_s = 2e10
latency_s = 1e-5
"""
ASKS = (("whatif", "--without", "2"), ("replan",))
Said = Mapping[str, Any]

SHALLOW = {"pipeline.stage_blocks": [1, 1]}  # of a model that is planned sooner


def _on(cluster: str) -> Said:
    return said_of(load_cluster(cluster))


def _recorded(folder: Path, *starts: Said, world: int = 4, strategy: str = "") -> Path:
    """A run of so many ranks, which was started on these clusters; each start does eight steps."""
    folder.mkdir()
    save(toy_transformer(layers=2), folder / "graph.json")
    (folder / "strategy.toml").write_text(strategy or strategy_toml(SHALLOW))
    lines: list[dict[str, Any]] = []
    for said in starts:
        lines.append({
            "event": "start", "step": 0, "world": world, "stages": [0] * world, "shape": f"1x{world}", "graph": "graph.json",
            "strategy": "strategy.toml", "predicted": {"step_time_s": 1.0, "breakdown_s": {}}, **said,
        })  # fmt: skip
        lines += [
            {"event": "step", "step": n, "seconds": 1.2, "computing_s": [1.0] * world, "loss": 1.0, "breakdown_s": {}}
            for n in range(1, 9)
        ]  # fmt: skip
    (folder / NAME).write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def _asked(ask: Sequence[str], folder: Path, *more: str | Path) -> Answer:
    found = run(ask[0], folder, *ask[1:], "--json", *more)
    assert found.status == 0, found.err
    return found


@pytest.mark.sweep(1)
@pytest.mark.parametrize("ask", ASKS, ids=lambda ask: ask[0])
def test_the_record_says_the_cluster_and_another_one_is_refused(ask: tuple[str, ...], tmp_path: Path) -> None:
    folder = _recorded(tmp_path / "run", _on(CLUSTER))
    known, named = _asked(ask, folder), _asked(ask, folder, "--cluster", CLUSTER)
    assert known.json == named.json
    assert "warning" not in known.err + named.err
    for other, machines in (("h100-sxm:1x8", "8 h100-sxm on 1 node"), ("a100-pcie-80gb:2x2", "on 2 nodes")):
        said = refused(
            ask[0], folder, *ask[1:], "--cluster", other,
            words=[f"--cluster {other}", machines, f"was on {CLUSTER} (4 a100-pcie-80gb on 1 node)", "leave --cluster out"],
        )  # fmt: skip
        assert f"autoparallel plan {folder / 'graph.json'} --cluster {other}" in " ".join(said.split())
    assert _asked(ask, folder, "--cluster", "a100-pcie-80gb:4x4").json == known.json, (
        "as much as the run has of it"
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("ask", ASKS, ids=lambda ask: ask[0])
def test_other_figures_of_the_same_machines_are_used_and_told(ask: tuple[str, ...], tmp_path: Path) -> None:
    folder = _recorded(tmp_path / "run", _on(CLUSTER))
    (file := tmp_path / "measured.toml").write_text(MEASURED)
    found = _asked(ask, folder, "--cluster", file)
    told = " ".join(found.err.split())
    assert "warning: --cluster measured has other figures than the run in" in told
    assert "was planned with: levels differ; the answer is by these" in told
    again = _recorded(tmp_path / "again", said_of(load_cluster(str(file))))
    mine = _asked(ask, again)
    assert "warning" not in mine.err, "a cluster that does not ship is in the record"
    assert mine.json["predicted_s"] == found.json["predicted_s"]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("ask", ASKS, ids=lambda ask: ask[0])
def test_records_that_do_not_say_are_read_as_before(ask: tuple[str, ...], tmp_path: Path) -> None:
    folder = _recorded(tmp_path / "run", {})
    refused(ask[0], folder, *ask[1:], words=["does not say which cluster the run is on: give --cluster"])
    for cluster in (CLUSTER, "h100-sxm:1x8"):
        assert "warning" not in _asked(ask, folder, "--cluster", cluster).err


def test_starts_on_other_devices_do_not_correct_the_profile(tmp_path: Path) -> None:
    folder = _recorded(tmp_path / "run", _on("h100-sxm:1x4"), _on(CLUSTER))
    found = _asked(("replan",), folder)
    assert found.json["rows"] == 1
    assert "1 of 2 starts of the run in" in found.err
    assert _asked(("replan",), _recorded(tmp_path / "both", {}, _on(CLUSTER))).json["rows"] == 2


def test_a_run_corrects_no_profile_of_other_devices(tmp_path: Path) -> None:
    ask = ("calibrate", "a100-pcie-80gb", "--measured")
    out = ("-o", tmp_path / "new.toml")
    other, mixed = _recorded(tmp_path / "other", _on("h100-sxm:1x4")), {"devices": ["a100-pcie-80gb", "v100"]}
    words = ["the run was on h100-sxm", "say nothing of a100-pcie-80gb", "the profile of h100-sxm"]
    refused(*ask, other, *out, words=words)
    refused(
        *ask,
        _recorded(tmp_path / "mixed", mixed),
        *out,
        words=["a100-pcie-80gb and v100", "one kind of device"],
    )
    moved = run(*ask, _recorded(tmp_path / "moved", _on("h100-sxm:1x4"), _on(CLUSTER), {}), *out)
    assert moved.status == 0, moved
    assert "1 of 3 starts of the run in" in moved.err
    assert "calibrated on 2 measured steps" in (tmp_path / "new.toml").read_text()


def test_one_device_is_one_and_a_model_needs_a_cluster(tmp_path: Path) -> None:
    two = strategy_toml({**SHALLOW, "mesh.dp_shard": 1})
    folder = _recorded(tmp_path / "run", _on("a100-pcie-80gb:1x2"), world=2, strategy=two)
    assert "without it 1 device would take" in run("whatif", folder, "--without", "1").err
    refused("whatif", save(toy_transformer(), tmp_path / "graph.json"), words=["--cluster is missing"])
