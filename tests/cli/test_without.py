"""`whatif RUN/ --without RANK`: what a rank costs is read off the record, and the slower it is the more leaving it out gives."""

from __future__ import annotations

import json
from pathlib import Path

from autoparallel.runtime.monitor.record import NAME
from tests.cli.runner import refused, run, save, strategy_toml
from tests.toy_graphs import toy_transformer

SHALLOW = {"pipeline.stage_blocks": [1, 1]}  # of a model that is planned sooner


def _recorded(folder: Path, slow_s: float) -> Path:
    """A run of four ranks, of which the third computes so much longer."""
    folder.mkdir()
    save(toy_transformer(layers=2), folder / "graph.json")
    (folder / "strategy.toml").write_text(strategy_toml(SHALLOW))
    start = {
        "event": "start", "step": 0, "world": 4, "stages": [0, 0, 0, 0], "shape": "1x4", "graph": "graph.json",
        "strategy": "strategy.toml", "predicted": {"step_time_s": 1.0, "breakdown_s": {}},
    }  # fmt: skip
    computing = [1.0, 1.0, 1.0 + slow_s, 1.0]
    step = {
        "event": "step",
        "seconds": 1.2 + slow_s,
        "computing_s": computing,
        "loss": 1.0,
        "breakdown_s": {},
    }
    lines = [start, *({**step, "step": n} for n in range(1, 9))]
    (folder / NAME).write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def test_the_slower_a_rank_is_the_more_leaving_it_out_gives(tmp_path: Path) -> None:
    gains = []
    for slow_s in (0.0, 0.5, 3.0):
        folder = _recorded(tmp_path / f"run-{slow_s}", slow_s)
        found = run("whatif", folder, "--cluster", "a100-pcie-80gb:1x4", "--without", "2", "--json").json
        assert abs(found["costs_s"] - slow_s) < 1e-9
        assert found["expected_s"] > 0
        gains.append(found["gain"])
    assert gains[0] < gains[1] < gains[2]
    assert "keep it" in found["words"] or "leave it out" in found["words"]
    other = run("whatif", folder, "--cluster", "a100-pcie-80gb:1x4", "--without", "1", "--json").json
    assert other["costs_s"] == 0
    said = ("whatif", folder, "--cluster", "a100-pcie-80gb:1x4")
    refused(*said, "--without", "4", words=["ranks 0 to 3"])
    refused("whatif", tmp_path, "--cluster", "a100-pcie-80gb:1x4", "--without", "0", words=["cannot be read"])
