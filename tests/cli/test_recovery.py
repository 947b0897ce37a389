"""A plan says how it recovers where the cluster says how often it fails, and is silent where it does not."""

from __future__ import annotations

import tomllib
from pathlib import Path

from autoparallel.profiles import cluster_from_dict, cluster_to_dict, load_cluster
from autoparallel.profiles.record import cluster_hash
from tests.cli.runner import refused, run, save, strategy_toml
from tests.toy_graphs import toy_transformer

CLUSTER = """
schema = 1
name = "failing"
[[group]]
device = "a100-sxm-80gb"
nodes = 2
devices_per_node = 2
"""
FAILURES = """
[failures]
mtbf_hours_per_device = 50000
storage_bytes_per_s = { value = 2e10, kind = "measured", source = "dd" }
replace_s = 600
"""


def test_plans_and_what_ifs_say_the_goodput_of_every_way(tmp_path: Path) -> None:
    graph = save(toy_transformer(layers=4), tmp_path / "graph.json")
    steady, failing, file = tmp_path / "steady.toml", tmp_path / "failing.toml", tmp_path / "s.toml"
    steady.write_text(CLUSTER)
    failing.write_text(CLUSTER + FAILURES)
    file.write_text(strategy_toml())
    quiet = run("score", graph, "--cluster", steady, "--strategy", file, "--json")
    assert "recovery" not in quiet.json
    answer = run("score", graph, "--cluster", failing, "--strategy", file, "--json")
    recovery = answer.json["recovery"]
    assert answer.json["step_time_s"] == quiet.json["step_time_s"]
    assert recovery["mtbf_s"] == 50000 * 3600 / 4
    assert {way["policy"] for way in recovery["policies"]} == {"restart", "peers", "replan", "spares"}
    assert recovery["goodput"] == max(way["goodput"] for way in recovery["policies"])
    assert 10 < recovery["timeout_s"] < 1800
    words = " ".join(answer.err.split()) or " ".join(
        run("score", graph, "--cluster", failing, "--strategy", file).err.split()
    )
    assert f"{recovery['policy']}" in words
    planned, page = tmp_path / "planned.toml", tmp_path / "page.html"
    run("plan", graph, "--cluster", failing, "--set", "mesh.tp=1", "--set", "mesh.pp=1", "-o", planned)
    said = tomllib.loads(planned.read_text())
    assert said["recovery"]["policy"] == said["predicted"]["recovery"]["policy"]
    again = run("score", graph, "--cluster", failing, "--strategy", planned, "--json").json
    assert again["recovery"] == said["predicted"]["recovery"]
    assert again["strategy"]["recovery"] == said["recovery"]
    run("report", planned, "-o", page)
    assert "When something fails" in page.read_text()
    report = tmp_path / "r.html"
    both = run(
        "whatif", graph, "--cluster", steady, "--cluster", failing, "--strategy", file, "--json", "-o", report
    )
    assert ["recovery" in case for case in both.json["cases"]] == [False, True]


def test_failures_are_part_of_the_cluster_and_of_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(CLUSTER)
    steady = load_cluster(str(path))
    path.write_text(CLUSTER + FAILURES)
    failing = load_cluster(str(path))
    assert failing.failures is not None
    assert failing.failures.replace_s == 600
    assert cluster_from_dict(cluster_to_dict(failing)).failures == failing.failures
    assert cluster_hash(failing) != cluster_hash(steady)
    path.write_text(CLUSTER + "[failures]\nmtbf_hours_per_device = 0\nstorage_bytes_per_s = 1\n")
    graph = save(toy_transformer(layers=4), tmp_path / "graph.json")
    refused("plan", graph, "--cluster", path, words=["failures.mtbf_hours_per_device", "more than 0"])


def test_where_no_node_may_be_missing_the_file_is_read_all_the_same(tmp_path: Path) -> None:
    graph, cluster = save(toy_transformer(layers=4), tmp_path / "graph.json"), tmp_path / "one.toml"
    cluster.write_text(CLUSTER.replace("nodes = 2", "nodes = 1") + FAILURES)
    planned = tmp_path / "planned.toml"
    run("plan", graph, "--cluster", cluster, "-o", planned)
    again = run("score", graph, "--cluster", cluster, "--strategy", planned, "--json").json
    assert again["recovery"]["fewer_step_s"] is None
