"""Phases with sequences of other lengths, from the model to the saved graphs and their prices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoparallel.inputs import read_saved_graph
from autoparallel.planner.score import score
from autoparallel.planner.strategy.file import read_strategy_file, strategy_from_constraints
from autoparallel.profiles import load_cluster
from tests.cli.runner import refused, run

CLUSTER = "h100-sxm:1x4"
MODEL = """
import torch
from torch import nn

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, 32), nn.Embedding(256, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 64)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x).float().logsumexp(-1).mean()

def model(seq_len: int = 64):
    return Blocks(), torch.zeros(2, seq_len, dtype=torch.int64)
"""
PHASES = "[batch]\nglobal = 64\n[[phase]]\nfrom_step = 9\nbatch = {{ seq_len = {} }}\n"


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path / 'model.py'}:model"


def test_each_phase_is_priced_by_its_own_graph_which_is_saved_with_the_first(
    tmp_path: Path, spec: str
) -> None:
    phases, graph = tmp_path / "phases.toml", tmp_path / "graph.json"
    phases.write_text(PHASES.format(256))
    whole = tmp_path / "whole.toml"
    planned = run(
        "plan", spec, "--cluster", CLUSTER, "--strategy", phases, "--save-graph", graph, "-o", whole, "--json"
    )
    assert planned.status == 0, planned
    assert "only the first phase was searched (steps 1 to 8)" in " ".join(planned.err.split())
    later = planned.json["phases"]
    assert [(one["from_step"], one["seq_len"]) for one in later] == [(1, 64), (9, 256)]
    assert later[0]["step_time_s"] == planned.json["step_time_s"]
    again = run("score", graph, "--cluster", CLUSTER, "--strategy", whole, "--json")
    assert again.json["phases"] == later
    page = tmp_path / "page.html"
    assert run("report", whole, "-o", page).status == 0
    assert "from step 9: batch.seq_len" in page.read_text()
    longer = read_saved_graph(str(save_longer(spec, tmp_path / "longer.json")))
    strategy = strategy_from_constraints(read_strategy_file(whole).constraints)
    alone = score(longer, load_cluster(CLUSTER), replace(strategy, phases=()))
    assert alone.step_time_s == later[1]["step_time_s"] > later[0]["step_time_s"]


def save_longer(spec: str, path: Path) -> Path:
    assert run("score", spec, "--cluster", CLUSTER, "--seq-len", "256", "--save-graph", path).status == 0
    return path


def test_lengths_that_cannot_be_had_are_refused(tmp_path: Path, spec: str) -> None:
    phases, graph = tmp_path / "phases.toml", tmp_path / "graph.json"
    assert run("score", spec, "--cluster", CLUSTER, "--save-graph", graph).status == 0
    phases.write_text(PHASES.format(512))
    for model, words in (
        (spec, "row 511 of a table of 256 rows"),
        (str(graph), "save it again from the model with this strategy file"),
    ):
        refused(
            "score",
            model,
            "--cluster",
            CLUSTER,
            "--strategy",
            phases,
            words=["from step 9: batch.seq_len = 512", words],
        )
    phases.write_text("[batch]\nseq_len = 128\n")
    refused(
        "score",
        spec,
        "--cluster",
        CLUSTER,
        "--strategy",
        phases,
        "--seq-len",
        "64",
        words=["batch.seq_len = 128", "--seq-len 64"],
    )
