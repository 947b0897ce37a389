from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.cli.runner import Answer, refused, run, save, strategy_toml
from tests.report.test_page import Page
from tests.toy_graphs import toy_transformer

CLUSTER = "h100-sxm:1x4"
CONTRACT_KEYS = {
    "model", "feasible", "step_time_s", "tokens_per_s_per_device", "model_tflops_per_device",
    "hardware_tflops_per_device", "mfu", "peak_memory_gib", "memory_gib_by_stage", "breakdown_s", "strategy",
}  # fmt: skip
BREAKDOWN_KEYS = [
    "forward", "backward", "recompute", "tp_comm", "cp_comm", "ep_comm", "pp_comm", "dp_comm", "host_copies",
    "bubble", "optimizer", "other",
]  # fmt: skip


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(
        toy_transformer(layers=4, hidden=256, heads=4, seq=128), tmp_path_factory.mktemp("g") / "graph.json"
    )


@pytest.fixture(scope="module")
def planned(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    """A plan of the toy model for four devices: the file, and what `--json` printed."""
    path = tmp_path_factory.mktemp("plan") / "strategy.toml"
    answer = run(
        "plan", graph, "--cluster", CLUSTER, "--global-batch", "16", "-o", path, "--json", "--explain"
    )
    assert answer.status == 0, answer
    return path, answer


def test_json_has_every_key_of_the_contract_and_sums_to_the_step(planned: tuple[Path, Answer]) -> None:
    answer = planned[1].json
    assert answer.keys() >= CONTRACT_KEYS | {"search", "alternatives"}
    assert list(answer["breakdown_s"]) == BREAKDOWN_KEYS
    assert sum(answer["breakdown_s"].values()) == pytest.approx(answer["step_time_s"])
    assert answer["model"].keys() >= {"name", "parameters", "model_flops_per_step"}
    search = answer["search"]
    assert search.keys() >= {"status", "lower_bound_s", "gap", "candidates", "pruned", "seconds"}
    assert search["seconds"].keys() >= {"capture", "search", "total"}
    assert search["status"] in ("optimal", "feasible")
    assert search["lower_bound_s"] <= answer["step_time_s"] * (1 + 1e-9)
    for stage in answer["memory_gib_by_stage"]:
        parts = ("stage", "parameters", "gradients", "optimizer", "activations", "buffers", "peak")
        assert stage.keys() >= set(parts)
    assert answer["peak_memory_gib"] == max(stage["peak"] for stage in answer["memory_gib_by_stage"])
    for other in answer["alternatives"]:
        assert other.keys() >= {"step_time_s", "peak_memory_gib", "reason"}


def test_people_read_standard_error(planned: tuple[Path, Answer]) -> None:
    said = planned[1].err
    for words in ("step time", "peak memory", "strategy written to", "4 h100-sxm (1 node of 4)"):
        assert words in said, said


def test_the_file_says_what_json_says(planned: tuple[Path, Answer]) -> None:
    path, answer = planned
    file = tomllib.loads(path.read_text())
    assert file["predicted"]["step_time_s"] == answer.json["step_time_s"]
    assert file["search"]["status"] == answer.json["search"]["status"]
    assert file["problem"]["cluster"]["name"] == CLUSTER
    for section, keys in answer.json["strategy"].items():
        if section != "tensor":
            assert file[section] == keys, section


def test_score_of_a_plan_gives_the_plans_numbers(graph: Path, planned: tuple[Path, Answer]) -> None:
    path, answer = planned
    scored = run("score", graph, "--cluster", CLUSTER, "--strategy", path, "--json")
    assert scored.status == 0, scored
    for key in CONTRACT_KEYS:
        assert scored.json[key] == answer.json[key], key


def test_a_plan_is_refused_on_another_cluster_but_not_under_another_name(
    graph: Path, planned: tuple[Path, Answer], tmp_path: Path
) -> None:
    words = ["[problem] cluster", CLUSTER, "h100-sxm:1x8", "groups", "remove [problem]"]
    refused("score", graph, "--cluster", "h100-sxm:1x8", "--strategy", planned[0], words=words)
    words = ["objective", "--objective memory"]
    refused(
        "plan", graph, "--cluster", CLUSTER, "--strategy", planned[0], "--objective", "memory", words=words
    )
    renamed = tmp_path / "renamed.toml"
    renamed.write_text(planned[0].read_text().replace(f'name = "{CLUSTER}"', 'name = "mine"'))
    assert run("score", graph, "--cluster", CLUSTER, "--strategy", renamed).status == 0


def test_planning_again_from_the_file_keeps_every_decision(
    graph: Path, planned: tuple[Path, Answer], tmp_path: Path
) -> None:
    again = run(
        "plan", graph, "--cluster", CLUSTER, "--strategy", planned[0], "-o", tmp_path / "s.toml", "--json"
    )
    assert again.status == 0, again
    assert again.json["strategy"] == planned[1].json["strategy"]


def test_the_same_inputs_give_the_same_bytes(
    graph: Path, planned: tuple[Path, Answer], tmp_path: Path
) -> None:
    path = tmp_path / "again.toml"
    options = ("--cluster", CLUSTER, "--global-batch", "16", "--explain")
    assert run("plan", graph, *options, "-o", path).status == 0
    assert path.read_bytes() == planned[0].read_bytes()


def test_a_partial_strategy_and_settings_stay_as_they_are(graph: Path, tmp_path: Path) -> None:
    partial = tmp_path / "p.toml"
    partial.write_text("[mesh]\npp = 2\n[recompute]\nmode = 'full'\n")
    options = ("--cluster", CLUSTER, "--strategy", partial, "--set", "batch.micro=2", "--global-batch", "16")
    plan = run("plan", graph, *options, "--json")
    assert plan.status == 0, plan
    strategy = plan.json["strategy"]
    assert strategy["mesh"]["pp"] == 2
    assert strategy["recompute"]["mode"] == "full"
    assert strategy["batch"] == {"global": 16, "micro": 2}
    scored = run("score", graph, *options, "--json")
    assert scored.json["strategy"] == strategy
    assert scored.json["step_time_s"] == plan.json["step_time_s"]


def test_every_decision_of_a_complete_file_is_priced_as_it_stands(graph: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(strategy_toml())
    scored = run("score", graph, "--cluster", CLUSTER, "--strategy", path, "--json")
    assert scored.status == 0, scored
    assert scored.json["strategy"]["pipeline"]["stage_blocks"] == [2, 2]
    path.write_text(strategy_toml({"pipeline.stage_blocks": [3, 1]}))
    uneven = run("score", graph, "--cluster", CLUSTER, "--strategy", path, "--json")
    assert uneven.json["step_time_s"] > scored.json["step_time_s"]


def test_the_global_batch_is_one_sequence_per_device_unless_told(graph: Path) -> None:
    plan = run("plan", graph, "--cluster", CLUSTER, "--json")
    assert plan.json["strategy"]["batch"]["global"] == 4


def test_a_plan_can_be_reported_and_compared(
    graph: Path, planned: tuple[Path, Answer], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    assert run("report", planned[0], "-o", page).status == 0
    text = Page(page.read_text()).text
    assert "toy on 4 h100-sxm" in text
    page = tmp_path / "whatif.html"
    clusters = ("--cluster", CLUSTER, "--cluster", "a100-sxm-80gb:1x4")
    answer = run(
        "whatif", graph, *clusters, "--vary", "mesh.tp=1,2", "--global-batch", "16", "--set", "batch.micro=2", "--tokens", "1e12",
        "-o", page, "--json",
    )  # fmt: skip
    assert answer.status == 0, answer
    cases = answer.json["cases"]
    assert [case["settings"] for case in cases] == [
        {"cluster": c, "mesh.tp": t} for c in (CLUSTER, "a100-sxm-80gb:1x4") for t in ("1", "2")
    ]
    assert all(case["strategy"]["mesh"]["tp"] == int(case["settings"]["mesh.tp"]) for case in cases)
    shown = Page(page.read_text())
    assert shown.open == []
    assert "a100-sxm-80gb:1x4 · mesh.tp 2" in shown.text  # each case by what is particular to it
    assert "Days: for 1.00 trillion tokens" in shown.text
    assert "16 sequences" in shown.text  # of a step


def test_a_what_if_says_why_a_case_has_no_plan(graph: Path, tmp_path: Path) -> None:
    page = tmp_path / "whatif.html"
    options = ("--cluster", CLUSTER, "--vary", "mesh.tp=2,3", "--global-batch", "16")
    answer = run("whatif", graph, *options, "-o", page, "--json")
    assert answer.status == 0, answer
    good, bad = answer.json["cases"]
    assert good["feasible"]
    assert not bad["feasible"]
    assert bad["reason"]
    assert "Cases without a plan" in Page(page.read_text()).text


def test_what_if_refuses_what_it_cannot_vary(graph: Path) -> None:
    base = ("whatif", graph, "--cluster", CLUSTER)
    refused(*base, "--vary", "mesh.tq=1,2", words=["mesh.tq", "mesh.tp"])
    refused(*base, "--vary", "mesh.tp", words=["--vary mesh.tp", "KEY=V1,V2"])
    refused(*base, "--vary", "seq_len=a", words=["seq_len=a", "whole number"])
    many = ",".join(str(i) for i in range(1, 300))
    refused(*base, "--vary", f"batch.global={many}", words=["299 cases", "200"])


def test_profiles_lists_and_shows_every_source() -> None:
    listed = run("profiles")
    assert listed.status == 0
    assert listed.out == ""
    assert "h100-sxm" in listed.err
    named = run("profiles", "--json").json
    assert "cpu-gloo" in named["devices"]
    shown = run("profiles", "h100-sxm")
    assert "datasheet" in shown.err
    assert run("profiles", "h100-sxm", "--json").json["name"] == "h100-sxm"
    assert run("profiles", named["clusters"][0]).status == 0


def test_planning_from_a_saved_graph_never_imports_torch(graph: Path, tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "from autoparallel.cli import app\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    try:\n        app(command)\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, (command, end.code)\n"
        "    assert 'torch' not in sys.modules, (command, 'torch was imported')\n"
        "    assert 'transformers' not in sys.modules, command\n"
    )
    out = tmp_path / "s.toml"
    commands = [
        ["--help"],
        ["profiles"],
        ["plan", str(graph), "--cluster", CLUSTER, "--set", "mesh.tp=1", "-o", str(out)],
        ["score", str(graph), "--cluster", CLUSTER, "--strategy", str(out)],
        ["report", str(out), "-o", str(tmp_path / "r.html")],
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_plan_that_is_to_run_here_keeps_to_what_runs(graph: Path) -> None:
    common = ("plan", graph, "--cluster", CLUSTER, "--global-batch", "16", "--runnable")
    answer = run(*common, "--set", "pipeline.schedule=zb1p", "--set", "mesh.pp=2", "--json")
    assert answer.status == 0, answer
    assert answer.json["strategy"]["mesh"]["ep"] == 1
    asked = ("--set", "pipeline.schedule=zb1p", "--set", "execution.kernels=compiled")
    refused(
        *common, *asked, words=['pipeline.schedule = "zb1p" with execution.kernels = "compiled"', "use 1f1b"]
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("objective", ["memory", "cost"])
def test_the_bound_is_also_told_in_the_objectives_own_quantity(
    graph: Path, tmp_path: Path, objective: str
) -> None:
    racks = tmp_path / "racks.toml"
    racks.write_text(
        'schema = 1\nname = "mine"\n[[group]]\ndevice = "h100-sxm"\nnodes = 1\ndevices_per_node = 4\n'
        "price_per_device_hour = 2.5\n[[level]]\nname = 'nvlink'\nsize = 4\nbytes_per_s = 450e9\nlatency_s = 3e-6\n"
    )
    plan = ("plan", graph, "--cluster", racks, "--set", "mesh.tp=1", "--set", "recompute.mode=none", "--json")
    answer = run(*plan, "--objective", objective)
    assert answer.status == 0, answer
    search, found = answer.json["search"], answer.json
    reached = {"memory": found["peak_memory_gib"], "cost": found["cost"]["per_step"]}[objective]
    key = {"memory": "lower_bound_gib", "cost": "lower_bound_cost"}[objective]
    assert search[key] == pytest.approx(reached * (1 - search["gap"]))
    assert "lower_bound_gib" not in run(*plan).json["search"]
