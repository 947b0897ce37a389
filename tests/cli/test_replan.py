"""`replan RUN/`: what its record tells of the device decides what would now be better, and the switch must pay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autoparallel.planner.strategy.file import read_strategy_file
from autoparallel.runtime.monitor.record import NAME
from tests.cli.runner import refused, run, save, strategy_toml
from tests.toy_graphs import toy_transformer

CLUSTER = "a100-pcie-80gb:1x4"

SHALLOW = {"pipeline.stage_blocks": [1, 1]}  # of a model that is planned sooner


def _recorded(folder: Path, strategy: str, seconds: float, starts: tuple[float, ...] = (0.0,)) -> Path:
    """A run of four ranks with such steps, started at these times; each start does eight steps."""
    folder.mkdir()
    save(toy_transformer(layers=2), folder / "graph.json")
    (folder / "strategy.toml").write_text(strategy)
    lines: list[dict[str, Any]] = []
    for at in starts:
        lines.append(
            {
                "event": "start", "step": 0, "world": 4, "stages": [0, 0, 0, 0], "shape": "1x4", "graph": "graph.json",
                "strategy": "strategy.toml", "predicted": {"step_time_s": seconds, "breakdown_s": {}},
            }
        )  # fmt: skip
        lines += [
            {
                "event": "step", "step": n, "seconds": seconds, "time": at + n * seconds, "computing_s": [seconds] * 4,
                "loss": 1.0, "breakdown_s": {},
            }
            for n in range(1, 9)
        ]  # fmt: skip
    (folder / NAME).write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def _asked(folder: Path, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = run("replan", folder, "--cluster", CLUSTER, "--json", *more).json
    return found


def test_a_plan_that_is_better_is_taken_where_the_switch_pays(tmp_path: Path) -> None:
    slow = strategy_toml({**SHALLOW, "batch.micro": 1, "recompute.mode": "full"})
    first = _recorded(tmp_path / "first", slow, 2.0)
    seen = _asked(first)
    assert (seen["measured_s"], seen["rows"], seen["step"]) == (2.0, 1, 8)
    assert abs(seen["corrected_s"] - 2.0) < abs(seen["predicted_s"] - 2.0), "the record corrects the profile"
    assert seen["better"] == (seen["gain"] > max(0.02, seen["unsure"]))
    assert seen["better"]
    assert "switch" in seen["words"]
    assert not (first / "next.toml").exists(), "nobody allowed it"

    pays = seen["pays_after"]
    assert pays * (2.0 - seen["expected_s"]) > 0.99 * seen["switch_s"]
    assert not _asked(first, "--take", "--steps", str(8 + int(pays)))["better"], "too few steps are left"
    assert not (first / "next.toml").exists()
    assert _asked(first, "--take", "--steps", str(9 + int(pays)))["better"]
    taken = read_strategy_file(first / "next.toml").constraints
    assert taken["batch.global"] == read_strategy_file(first / "strategy.toml").constraints["batch.global"]

    # The run goes on under it: there is nothing better now, and two starts say what a switch takes.
    again = _recorded(tmp_path / "again", (first / "next.toml").read_text(), seen["expected_s"], (0.0, 100.0))
    stays = _asked(again)
    assert not stays["better"]
    assert stays["rows"] == 2
    wanted = 100.0 - 8 * seen["expected_s"]
    assert stays["switch_measured"]
    assert abs(stays["switch_s"] - wanted) < 1e-6 * wanted


def test_what_cannot_be_told_is_refused(tmp_path: Path) -> None:
    folder = _recorded(tmp_path / "run", strategy_toml(SHALLOW), 1.0)
    refused("replan", tmp_path, "--cluster", CLUSTER, words=["cannot be read"])
    record = (folder / NAME).read_text().splitlines()
    (folder / NAME).write_text("\n".join(record[:3]) + "\n")
    refused("replan", folder, "--cluster", CLUSTER, words=["let it run on"])
