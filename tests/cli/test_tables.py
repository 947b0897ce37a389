"""Recommenders on the command line: tables in tiers planned, scored, told and refused."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.cli.runner import refused, run, save
from tests.toy_tables import toy_recommender

ZIPF = ("--set", "embedding_access.law=zipf:1.1", "--set", "embedding_access.update=touched")
SERVED = '[[embedding]]\nmodule = "tables.*"\ntier = "parameter-server"\nhot_rows = 0\n'


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(toy_recommender(2_000_000, 3_000), tmp_path_factory.mktemp("graph") / "graph.json")


def test_a_plan_with_tables_is_written_told_and_scored_alike(graph: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.toml"
    cluster = ("--cluster", "a100-sxm-80gb:1x4")
    fixed = ("--set", "batch.micro=512", "--set", "recompute.mode=none")
    plan = ("plan", graph, *cluster, "--global-batch", "4096", *ZIPF, *fixed, "--explain")
    planned = run(*plan, "-o", out, "--json")
    assert planned.status == 0, planned.err
    written = tomllib.loads(out.read_text())
    assert written["embedding"][0]["tier"] in ("sharded", "parameter-server")
    assert written["embedding_access"]["law"] == "zipf:1.1"
    assert "Embedding tables (" in planned.err
    assert "zipf:1.1" in planned.err
    scored = run("score", graph, *cluster, "--strategy", out, "--json")
    assert scored.status == 0, scored.err
    assert scored.json["step_time_s"] == planned.json["step_time_s"]
    assert scored.json["strategy"]["embedding"] == planned.json["strategy"]["embedding"]
    page = run("report", out, "-o", tmp_path / "r.html")
    assert page.status == 0, page.err
    assert "Embedding tables" in (tmp_path / "r.html").read_text()
    again = run(*plan, "-o", tmp_path / "t.toml")
    assert again.status == 0
    assert (tmp_path / "t.toml").read_text() == out.read_text()


def test_servers_say_what_their_hosts_hold_and_when_it_is_too_much(graph: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(SERVED)
    cluster = ("--cluster", "a100-sxm-80gb:1x2", "--global-batch", "512", "--strategy", rules)
    fits = run("score", graph, *cluster, "--json")
    assert fits.status == 0, fits.err
    assert "on each host" in fits.err
    assert fits.json["host_memory_gib"] < fits.json["host_capacity_gib"]
    huge = save(toy_recommender(5_000_000_000), tmp_path / "huge.json")
    full = run("score", huge, *cluster, "--json")
    assert full.status == 0, full.err
    assert not full.json["feasible"]
    assert "in the memory of each host" in full.err
    refused("plan", huge, *cluster, words=["no strategy fits", "each host"], status=3)


def test_tables_on_servers_are_run_and_servers_that_are_not_there_are_refused(
    graph: Path, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(SERVED)
    cluster = ("--cluster", "a100-sxm-80gb:1x2", "--global-batch", "512", "--runnable")
    runnable = run("plan", graph, *cluster, "--strategy", rules, "--json")
    assert runnable.status == 0, runnable.err
    assert runnable.json["strategy"]["embedding"][0]["tier"] == "parameter-server"
    for setting, words in {
        "servers.nodes=[3]": ["servers.nodes", "node 3 is not there"],
        "servers.copies=2": ["servers.copies = 2", "there are 1 servers"],
        "servers.memory=0.5": ["servers.memory", "host.disk_bytes_per_s"],
        "servers.mode=eventual": ["servers", "mode", "bounded-stale"],
    }.items():
        refused(
            "score",
            graph,
            *cluster[:-1],
            "--strategy",
            rules,
            "--set",
            "mesh.dp_replicate=2",
            "--set",
            setting,
            words=words,
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[embedding]]\nmodule = "tables.*"\ntier = "ssd"\n', ["[[embedding]]", "tier", "parameter-server"]),
        ('[[embedding]]\nmodule = "tables.*"\nhot = 3\n', ["[[embedding]]", "hot", "hot_rows"]),
        ('[embedding_access]\nlaw = "pareto"\n', ["embedding_access", "pareto", "zipf:EXPONENT"]),
        ('[[embedding]]\nmodule = "users"\ntier = "sharded"\nhot_rows = 0\n', ["users", "tables.0"]),
    ],
)
def test_bad_rules_name_what_to_try(graph: Path, tmp_path: Path, text: str, words: list[str]) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(text)
    refused("plan", graph, "--cluster", "a100-sxm-80gb:1x2", "--strategy", rules, words=words)
