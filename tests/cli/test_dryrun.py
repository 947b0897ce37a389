from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.runner import refused, run, save, strategy_toml
from tests.toy_graphs import toy_transformer

MLP = "examples/mlp.py:mlp"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dry") / "strategy.toml"
    fixed = ("--set", "mesh.dp_shard=2", "--set", "mesh.dp_replicate=1", "--set", "execution.kernels=eager",
             "--set", "recompute.mode=none", "--set", "batch.micro=2")  # fmt: skip
    answer = run("plan", MLP, "--cluster", "h100-sxm:1x4", "--global-batch", "16", *fixed, "-o", path)
    assert answer.status == 0, answer
    return path


def plan(path: Path, **fixed: object) -> Path:
    settings = {
        "mesh.pp": 1,
        "batch.micro": 2,
        "recompute.mode": "none",
        "execution.kernels": "eager",
        **fixed,
    }
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    answer = run("plan", MLP, "--cluster", "h100-sxm:1x4", "--global-batch", "16", *options, "-o", path)
    assert answer.status == 0, answer
    return path


def test_what_runs_as_it_was_priced_ends_well(tmp_path: Path) -> None:
    mesh = {"mesh.tp": 2, "mesh.dp_replicate": 2, "mesh.dp_shard": 1}
    whole = {"execution.dtype": "fp32", "execution.param_dtype": "fp32", "execution.master_weights": "false"}
    answer = run("dryrun", plan(tmp_path / "s.toml", **mesh, **whole), "--json")
    assert answer.status == 0, answer
    assert answer.json["differences"] == []
    assert "What runs is what was priced." in answer.err
    peak = answer.json["ranks"][0]["peak_bytes"]
    assert peak["lowered"] == pytest.approx(peak["predicted"], rel=0.01)
    assert peak["lowered"] > sum(pair["lowered"] for pair in answer.json["ranks"][0]["held_bytes"].values())


def test_compiled_kernels_are_said_to_be_eager_in_a_dry_run_and_are_held_against_their_price(
    tmp_path: Path,
) -> None:
    peaks = {}
    for kernels in ("eager", "compiled"):
        path = plan(tmp_path / f"{kernels}.toml", **{"execution.kernels": kernels, "mesh.dp_replicate": 4})
        answer = run("dryrun", path, "--json")
        assert answer.status == 0, answer
        assert ("A dry run does not compile" in answer.err) == (kernels == "compiled")
        peaks[kernels] = answer.json["ranks"][0]["peak_bytes"]
    eager, compiled = peaks["eager"], peaks["compiled"]
    assert compiled["lowered"] == eager["lowered"]
    assert compiled["predicted"] == eager["predicted"]
    assert eager["compiled"] is None
    assert 0 < compiled["compiled"] <= compiled["predicted"]


def test_a_difference_is_an_error_with_module_action_and_who_is_to_blame(tmp_path: Path) -> None:
    mesh = {"mesh.dp_replicate": 2, "mesh.dp_shard": 2, "shard.zero": 2}
    answer = run("dryrun", plan(tmp_path / "s.toml", **mesh), "--json")
    assert answer.crash is None, answer
    assert answer.status == 4, answer
    different = {one["what"]: one for one in answer.json["differences"]}
    shard = different["memory of parameters"]
    assert shard["lowered"] > 1.03 * shard["predicted"]
    assert "than the FSDP2 of auto_parallelize" in shard["blame"]
    for one in different.values():
        assert one.keys() >= {"ranks", "module", "action", "blame"}
        assert all(one.values()) or one["lowered"] == 0
    lines = [line for line in answer.err.splitlines() if line.startswith("error: pipeline rank 0: ")]
    assert len(lines) == len(different)
    assert all("; to blame: the " in line for line in lines)


def test_each_pipeline_rank_is_compared_with_its_prediction(planned: Path) -> None:
    answer = run("dryrun", planned, "--json")
    assert answer.status in (0, 4), answer
    found = answer.json
    assert found["devices"] >= 2
    assert [rank["rank"] for rank in found["ranks"]] == list(range(len(found["ranks"])))
    for rank in found["ranks"]:
        assert rank["held_bytes"].keys() == {"parameters", "gradients", "optimizer"}
        optimizer = rank["held_bytes"]["optimizer"]
        assert optimizer["lowered"] == pytest.approx(optimizer["predicted"], rel=0.01)
        assert rank["sent_bytes"]["dp_shard"]["lowered"] > 0
        assert {"axis", "op", "size_bytes", "lowered", "predicted"} == rank["messages"][0].keys()
    for word in ("parameters", "optimizer state", "sent over dp_shard"):
        assert word in answer.err


def test_what_cannot_be_lowered_is_refused_with_a_remedy(planned: Path, tmp_path: Path) -> None:
    text = planned.read_text(encoding="utf-8")
    refused("dryrun", tmp_path / "missing.toml", words=["missing.toml"])
    part = tmp_path / "part.toml"
    part.write_text("schema = 1\n[mesh]\ntp = 2\n", encoding="utf-8")
    refused("dryrun", part, words=["not a complete strategy"])
    whole = tmp_path / "whole.toml"
    whole.write_text(strategy_toml(), encoding="utf-8")
    refused("dryrun", whole, words=["which model", "--model"])
    other = tmp_path / "other.toml"
    hash_line = next(line for line in text.splitlines() if line.startswith("graph_hash"))
    other.write_text(text.replace(hash_line, 'graph_hash = "0123456789abcdef"'), encoding="utf-8")
    refused("dryrun", other, words=["graph_hash does not match"])
    graph = save(toy_transformer(layers=4, hidden=256, heads=4, seq=128), tmp_path / "graph.json")
    saved = tmp_path / "saved.toml"
    assert run("plan", graph, "--cluster", "h100-sxm:1x2", "--set", "mesh.tp=1", "-o", saved).status == 0
    refused("dryrun", saved, words=["saved graph", "--model hf:PATH"])


DROPS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(256, 1024), nn.Dropout(0.25), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(self.drop(torch.relu(self.up(x))))

def model():
    return nn.Sequential(*(Block() for _ in range(4))), torch.zeros(512, 256)
"""


def test_what_a_model_drops_is_priced_where_the_plan_is_to_run_and_else_to_blame(tmp_path: Path) -> None:
    file, path = tmp_path / "drops.py", tmp_path / "s.toml"
    file.write_text(DROPS)
    common = ("plan", f"{file}:model", "--cluster", "h100-sxm:1x1", "--global-batch", "4096")
    fixed = [
        word
        for key, value in {
            "batch.micro": 4096,
            "execution.kernels": "eager",
            "recompute.mode": "none",
        }.items()
        for word in ("--set", f"{key}={value}")
    ]
    assert run(*common, *fixed, "--runnable", "-o", path).status == 0
    assert "dropout = 0.25" in path.read_text()
    answer = run("dryrun", path)
    assert answer.status == 0, answer
    assert run(*common, *fixed, "-o", path).status == 0
    answer = run("dryrun", path)
    assert answer.status == 4
    assert "execution.dropout=0.25" in answer.err
