"""Every mistake a user can make ends in a message that names file, key and remedy: never in a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.cli.runner import refused, run, save, strategy_toml
from tests.toy_graphs import toy_transformer

FEW = ("--set", "mesh.pp=1", "--set", "mesh.tp=1")  # what is left takes little time
CLUSTER = "h100-sxm:1x4"


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(toy_transformer(heads=4), tmp_path_factory.mktemp("graph") / "graph.json")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def config(path: Path, **changes: Any) -> Path:
    """A small Llama's config.json with some keys changed."""
    keys = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 256,
    }  # fmt: skip
    return write(path, json.dumps({k: v for k, v in {**keys, **changes}.items() if v is not None}))


# -- the model ----------------------------------------------------------------------------------------------------


def test_an_unknown_architecture(tmp_path: Path) -> None:
    path = config(tmp_path / "config.json", model_type="lama")
    refused("plan", f"hf:{path}", "--cluster", CLUSTER, words=[str(path), "model_type", "lama"])
    path = config(tmp_path / "config.json", architectures=["LlamaForEverything"])
    refused("plan", f"hf:{path}", "--cluster", CLUSTER, words=[str(path), "LlamaForEverything"])


def test_a_missing_config(tmp_path: Path) -> None:
    path = tmp_path / "none" / "config.json"
    refused("plan", f"hf:{path}", "--cluster", CLUSTER, words=[str(path), "no such file"])


@pytest.mark.parametrize("text", ["{", "[1]", "{}", "\x00\xff"])
def test_a_malformed_config(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "config.json", text)
    refused("plan", f"hf:{path}", "--cluster", CLUSTER, words=[str(path)])


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": "four"},
        {"hidden_size": -1},
        {"num_key_value_heads": 3},  # four query heads cannot share them evenly
    ],
)
def test_a_config_with_impossible_values(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = config(tmp_path / "config.json", **changes)
    refused("plan", f"hf:{path}", "--cluster", CLUSTER, words=[])


def test_a_config_that_asks_for_remote_code_never_runs_it(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    write(tmp_path / "modeling_evil.py", f"open({str(ran)!r}, 'w').write('ran')\n")
    path = config(tmp_path / "config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    words = [str(path), "auto_map", "never run"]
    refused("plan", f"hf:{tmp_path}", "--cluster", CLUSTER, words=words)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nothing", ["nothing", "hf:PATH", "FILE.py:NAME", "GRAPH.json"]),
        ("missing.py:build", ["missing.py", "no such file"]),
        ("no.such.module:build", ["no.such.module"]),
        ("json:no_such_name", ["no_such_name"]),
        ("missing.json", ["missing.json", "no such graph file", "hf:missing.json"]),
    ],
)
def test_a_model_that_is_not_there(model: str, words: list[str]) -> None:
    refused("plan", model, "--cluster", CLUSTER, words=words)


def test_a_model_file_that_raises_or_returns_something_else(tmp_path: Path) -> None:
    path = write(tmp_path / "model.py", "def broken():\n    1 / 0\ndef number():\n    return 3\n")
    refused("plan", f"{path}:broken", "--cluster", CLUSTER, words=["model.py:broken", "ZeroDivisionError"])
    refused("plan", f"{path}:number", "--cluster", CLUSTER, words=["model.py:number", "int"])
    refused("plan", f"{path}:builds", "--cluster", CLUSTER, words=["builds", "broken, number"])
    refused(
        "plan",
        f"{path}:number",
        "--cluster",
        CLUSTER,
        "--model-arg",
        "x",
        words=["--model-arg x", "KEY=VALUE"],
    )


def test_a_damaged_or_newer_graph(tmp_path: Path, graph: Path) -> None:
    whole = json.loads(graph.read_text())
    for name, text in {
        "cut": graph.read_text()[:500],
        "empty": "{}",
        "newer": json.dumps({**whole, "schema": 99}),
        "damaged": json.dumps({**whole, "blocks": [{}]}),
        "shorter": json.dumps({**whole, "chain": whole["chain"][1:]}),
        "dtype": graph.read_text().replace('"float32"', '"float33"', 1),
        "size": graph.read_text().replace("32", '"32"', 1),
        "value": graph.read_text().replace('"outputs":["', '"outputs":["no', 1),
    }.items():
        path = write(tmp_path / f"{name}.json", text)
        refused("plan", path, "--cluster", CLUSTER, words=[str(path), "graph"])


def test_a_sequence_length_that_a_saved_graph_does_not_have(graph: Path) -> None:
    refused(
        "plan", graph, "--cluster", CLUSTER, "--seq-len", "99", words=[str(graph), "32", "99", "--seq-len"]
    )


# -- the cluster --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("h100-smx:1x8", ["h100-smx", "h100-sxm"]),
        ("h100-sxm:8", ["h100-sxm:8", "NODESxPER_NODE"]),
        ("h100-sxm", ["h100-sxm", "1x1"]),
        ("h100-sxm:0x8", ["0"]),
        ("no/such.toml", ["no/such.toml", "no such"]),
        ("dgx-h10", ["dgx-h10", "dgx-h100"]),
    ],
)
def test_an_unknown_device_or_cluster(graph: Path, cluster: str, words: list[str]) -> None:
    refused("plan", graph, "--cluster", cluster, words=words)


def cluster_toml(text: str = "", *, group: str = "", level: str = "", schema: int = 1) -> str:
    return (
        f'schema = {schema}\nname = "mine"\n{text}\n[[group]]\ndevice = "h100-sxm"\nnodes = 1\n'
        f'devices_per_node = 4\n{group}\n[[level]]\nname = "nvlink"\nsize = 4\nbytes_per_s = 450e9\n'
        f"latency_s = 3e-6\n{level}\n"
    )


def test_a_path_that_cannot_be_one_is_named(graph: Path) -> None:
    long = "a" * 400
    refused("plan", graph, "--cluster", f"{long}.toml", words=[long, "name too long", "another path"])
    refused("plan", f"hf:{long}", "--cluster", CLUSTER, words=[long, "name too long"])
    refused("profiles", long, words=[long, "name too long"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (cluster_toml(group="price_per_hour = 2"), ["price_per_hour", "price_per_device_hour"]),
        (cluster_toml(level="latencys = 2"), ["latencys", "latency_s"]),
        (cluster_toml("levels = 2"), ["levels", "level"]),
        (cluster_toml(schema=2), ["schema", "2"]),
        (cluster_toml(level='oversubscription = "two"'), ["oversubscription"]),
        ("schema = [", ["TOML"]),
    ],
)
def test_a_typo_in_a_cluster_file(tmp_path: Path, graph: Path, text: str, words: list[str]) -> None:
    path = write(tmp_path / "mine.toml", text)
    refused("plan", graph, "--cluster", path, words=[str(path), *words])


# -- the strategy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[mesh]\ntpp = 2\n", ["[mesh] tpp", '"tp"']),
        ("[pipelin]\nschedule = '1f1b'\n", ["pipelin", '"pipeline"']),
        ("[pipeline]\nschedule = '1f1'\n", ["schedule", '"1f1b"']),
        ("schema = 2\n", ["schema = 2", "update"]),
        ("[mesh\n", ["TOML"]),
    ],
)
@pytest.mark.parametrize("command", ["plan", "score"])
def test_a_typo_in_a_strategy_file(
    tmp_path: Path, graph: Path, command: str, text: str, words: list[str]
) -> None:
    path = write(tmp_path / "p.toml", text)
    refused(command, graph, "--cluster", CLUSTER, "--strategy", path, words=[str(path), *words])


def test_options_that_contradict_the_file(tmp_path: Path, graph: Path) -> None:
    path = write(tmp_path / "p.toml", "[batch]\nglobal = 8\n[mesh]\ntp = 2\n")
    base = ("plan", graph, "--cluster", CLUSTER, "--strategy", path)
    refused(*base, "--set", "mesh.tp=4", words=["mesh.tp", "contradicts", "2"])
    refused(*base, "--global-batch", "16", words=["--global-batch", "batch.global", "contradicts", "8"])
    refused(*base, "--set", "mesh.tq=4", words=["mesh.tq", "mesh.tp"])
    refused(*base, "--objective", "speed", words=["--objective speed", "time, cost, memory"])


def test_a_file_of_another_kind_is_told_apart(tmp_path: Path, graph: Path) -> None:
    strategy = write(tmp_path / "s.toml", strategy_toml())
    refused("plan", graph, "--cluster", strategy, words=[str(strategy), "is a strategy file", "DEVICE:NODES"])
    group = '[[group]]\ndevice = "h100-sxm"\nnodes = 1\ndevices_per_node = 4\n'
    cluster = write(tmp_path / "c.toml", f'name = "mine"\n{group}')
    words = [str(cluster), "is a cluster file, not a strategy", "--cluster"]
    refused("score", graph, "--cluster", CLUSTER, "--strategy", cluster, words=words)
    refused("report", cluster, "-o", tmp_path / "x.html", words=words)


def test_a_model_that_is_nearly_named(tmp_path: Path) -> None:
    path = config(tmp_path / "config.json")
    refused("plan", path, "--cluster", CLUSTER, words=["not a saved graph", f"hf:{path}"])
    refused("plan", "hf:org/model", "--cluster", CLUSTER, words=["no such file", "Nothing is downloaded"])
    refused("plan", "examples/mlp.py", "--cluster", CLUSTER, words=["examples/mlp.py:NAME"])


def test_a_dtype_by_its_name_in_torch_is_told_ours(graph: Path) -> None:
    command = ("plan", graph, "--cluster", CLUSTER, "--set", "execution.dtype=bfloat16")
    refused(*command, words=['did you mean "bf16"'])


def test_a_varied_key_that_is_none_is_told_of_vary(graph: Path) -> None:
    refused("whatif", graph, "--cluster", CLUSTER, "--vary", "tp=1,2", words=["--vary tp", '"mesh.tp"'])


def test_a_cost_needs_prices(tmp_path: Path, graph: Path) -> None:
    words = ["--objective cost", "no price for h100-sxm", "price_per_device_hour"]
    refused("plan", graph, "--cluster", CLUSTER, "--objective", "cost", words=[*words, "cluster file"])
    group = '[[group]]\ndevice = "h100-sxm"\nnodes = 1\ndevices_per_node = 4\n'
    bare = write(tmp_path / "mine.toml", f'name = "mine"\n{group}')
    refused("whatif", graph, "--cluster", bare, "--objective", "cost", words=[str(bare), *words, "[[group]]"])
    bare.write_text(f'name = "mine"\n{group}price_per_device_hour = 2.5\n')
    answer = run("plan", graph, "--cluster", bare, "--objective", "cost", "--json")
    assert answer.json["cost"]["per_hour"] == pytest.approx(2.5 * answer.json["devices"])


def test_a_compression_for_a_level_that_is_not_there(graph: Path) -> None:
    command = ("plan", graph, "--cluster", CLUSTER, "--set", 'grad_sync.compression=["none", "bf16"]')
    refused(*command, words=["grad_sync.compression", "2 entries", "has 1 (nvlink)"])


def test_a_device_that_lacks_the_dtype(graph: Path) -> None:
    command = ("plan", graph, "--cluster", "v100-sxm2-32gb:1x4")
    refused(*command, words=["v100-sxm2-32gb", "bf16", "--set execution.dtype=fp16"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh.tp": 3, "mesh.dp_shard": 1, "mesh.pp": 1, "pipeline.stage_blocks": [4]}, ["mesh.tp = 3", "heads", "try"]),
        ({"batch.micro": 3}, ["batch.global = 16", "batch.micro 3", "try"]),
        ({"mesh.dp_shard": 3}, ["batch.global = 16"]),
        ({"mesh.dp_shard": 8}, ["devices", "has 4"]),
        ({"mesh.pp": 8, "mesh.dp_shard": 1}, ["8", "has 4"]),
        ({"pipeline.stage_blocks": [2, 3]}, ["pipeline.stage_blocks", "5", "4"]),
        ({"pipeline.stage_blocks": [4]}, ["pipeline.stage_blocks"]),
        ({"shard.zero": 0}, ["shard.zero = 0", "dp_shard"]),
        ({"shard.sequence_parallel": True}, ["shard.sequence_parallel", "tp"]),
    ],
)  # fmt: skip
def test_a_strategy_whose_numbers_do_not_fit_together(
    tmp_path: Path, graph: Path, changes: dict[str, Any], words: list[str]
) -> None:
    tensor = "tensor = []\n" if changes.get("mesh.tp", 1) > 1 else ""
    path = write(tmp_path / "s.toml", tensor + strategy_toml(changes))
    refused("score", graph, "--cluster", CLUSTER, "--strategy", path, words=[str(path), *words])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["mesh.tp=3"], ["mesh.tp", "try mesh.tp = 4"]),
        (["pipeline.stage_blocks=[]"], ["pipeline.stage_blocks = []", "4 repeated blocks"]),
        (["mesh.placement=[1]"], ["mesh.placement = [1]", "nodes from 0 to 0"]),
        (["mesh.tp=8"], ["mesh"]),
        (["mesh.pp=16"], ["mesh"]),
        (["batch.micro=3"], ["batch"]),
        (["pipeline.stage_blocks=[1, 1]"], ["stage_blocks"]),
        (["shard.zero=0", "mesh.dp_shard=2"], ["zero"]),
    ],
)
def test_constraints_that_nothing_satisfies_are_named(
    graph: Path, settings: list[str], words: list[str]
) -> None:
    options = [part for setting in settings for part in ("--set", setting)]
    answer = run("plan", graph, "--cluster", CLUSTER, "--global-batch", "16", *options)
    assert answer.crash is None, repr(answer.crash)
    assert answer.status in (2, 3), answer
    assert answer.out == ""
    for word in words:
        assert word in answer.err


def test_what_no_search_could_meet_is_said_before_it(tmp_path: Path, graph: Path) -> None:
    base = ("plan", graph, "--cluster", CLUSTER)
    refused(*base, "--set", "recompute.per_stage=[9]", words=["recompute.per_stage = [9]", "4 repeated"])
    chunks = ("--set", "recompute.per_stage=[3, 1]", "--set", "pipeline.stage_blocks=[2, 2]")
    refused(*base, *chunks, words=["recompute.per_stage", "[3, 1]", "pipeline.stage_blocks = [2, 2]"])
    refused(*base, "--global-batch", "1" + "0" * 20, words=["--global-batch", "at most"])


def test_a_file_planned_for_something_else_is_refused(tmp_path: Path, graph: Path) -> None:
    problem = '[problem]\nmodel = "hf:other"\ngraph_hash = "0123"\nseq_len = 32\n'
    path = write(tmp_path / "s.toml", problem + strategy_toml().replace("schema = 1\n", ""))
    base = ("score", graph, "--cluster", CLUSTER, "--strategy", path)
    refused(*base, words=[str(path), "graph_hash", "hf:other", "remove [problem]"])
    refused(*base, "--seq-len", "64", words=[str(path), "seq_len = 32", "--seq-len 64"])
    path = write(tmp_path / "s.toml", "[problem]\nseq_len = 64\n")
    refused("score", graph, "--cluster", CLUSTER, "--strategy", path, words=[str(path), "[problem] seq_len"])


def test_a_model_too_large_for_the_cluster(tmp_path: Path) -> None:
    huge = save(toy_transformer(layers=4, hidden=16384, heads=64, seq=32, vocab=256), tmp_path / "huge.json")
    out = tmp_path / "s.toml"
    said = refused(
        "plan", huge, "--cluster", "h100-sxm:1x1", "-o", out, status=3, words=["no strategy fits", "GiB"]
    )
    assert "nearest" in said, said
    assert not out.exists()
    answer = run("score", huge, "--cluster", "h100-sxm:1x1", "--json")
    assert answer.status == 0, answer
    assert answer.json["feasible"] is False
    assert "DOES NOT FIT" in answer.err


# -- the output ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["-o", "--save-graph"])
def test_an_unwritable_path_is_found_before_the_model_is_read(tmp_path: Path, option: str) -> None:
    missing = tmp_path / "no" / "s.toml"
    refused(
        "plan", "hf:nothing", "--cluster", CLUSTER, option, missing, words=[str(missing), "cannot be written"]
    )
    refused(
        "plan", "hf:nothing", "--cluster", CLUSTER, option, tmp_path, words=[str(tmp_path), "is a folder"]
    )


def test_what_an_output_is_made_from_is_never_written_over(tmp_path: Path, graph: Path) -> None:
    out, cluster = tmp_path / "s.toml", write(tmp_path / "mine.toml", cluster_toml())
    assert run("plan", graph, "--cluster", cluster, *FEW, "-o", out).status == 0
    for arguments in (
        ["plan", graph, "--cluster", cluster, "-o", cluster],
        ["plan", graph, "--cluster", cluster, "-o", graph],
        [
            "plan",
            f"hf:{config(tmp_path / 'c.json')}",
            "--cluster",
            cluster,
            "--save-graph",
            tmp_path / "c.json",
        ],
        ["whatif", graph, "--cluster", CLUSTER, "--cluster", cluster, "-o", cluster],
        ["report", out, "-o", out],
        ["export", out, "--to", "slurm", "-o", out],
    ):
        target = Path(arguments[-1])
        before = target.read_text()
        refused(*arguments, words=[str(target), "is what this is made from", "another path"])
        assert target.read_text() == before
    assert (
        run("plan", graph, "--cluster", cluster, "--strategy", out, "-o", out).status == 0
    )  # filled in where it stands


def test_a_report_of_a_file_without_predictions(tmp_path: Path) -> None:
    path = write(tmp_path / "s.toml", strategy_toml())
    refused("report", path, "-o", tmp_path / "r.html", words=[str(path), "[predicted]", "plan"])
    refused("report", tmp_path / "none.toml", "-o", tmp_path / "r.html", words=["none.toml", "no such"])
    assert not (tmp_path / "r.html").exists()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("damage", ["breakdown_s = 3", "timeline.ranks = [[1]]", "peak_memory_gib = inf"])
def test_a_report_of_damaged_predictions(tmp_path: Path, graph: Path, damage: str) -> None:
    out = tmp_path / "s.toml"
    assert run("plan", graph, "--cluster", CLUSTER, *FEW, "-o", out).status == 0
    table = tomllib.loads(out.read_text())
    changed = tomllib.loads(f"[predicted]\n{damage}\n")["predicted"]
    table["predicted"] |= changed
    write(out, tomli_w.dumps(table))
    refused("report", out, "-o", tmp_path / "r.html", words=[str(out), "[predicted]", "plan"])
    del table["predicted"]["numbers_hash"]  # as files have none that were written before there was one
    write(out, tomli_w.dumps(table))
    refused("report", out, "-o", tmp_path / "r.html", words=[str(out), "[predicted]", "plan again"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"], ["plan", "hf:x"], ["plan", "hf:x", "--cluster"], ["paln"], ["plan", "hf:x", "--clustr", "y"],
        ["plan", "hf:x", "--cluster", "y", "--seq-len", "long"],
        ["plan", "hf:x", "--cluster", "y", "--global-batch", "0"], ["profiles", "h100-smx"],
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_status_two(arguments: list[str]) -> None:
    answer = run(*arguments)
    assert answer.crash is None
    assert answer.status == 2, answer


def test_an_interrupt_ends_cleanly_and_leaves_no_half_file(tmp_path: Path) -> None:
    big = save(
        toy_transformer(layers=48, hidden=1024, heads=32, seq=2048, vocab=4096), tmp_path / "graph.json"
    )
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-m", "autoparallel", "plan", str(big), "--cluster", "h100-sxm:64x8"]
    process = subprocess.Popen(
        [*command, "-o", str(out / "s.toml")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    time.sleep(3.0)
    process.send_signal(signal.SIGINT)
    said, complaint = process.communicate(timeout=120)
    assert "Traceback" not in complaint, complaint
    assert said == ""
    left = list(out.iterdir())
    if process.returncode == 0:  # best so far, or done before the signal
        assert [p.name for p in left] == ["s.toml"]
    else:
        assert process.returncode in (4, 130), complaint
        assert left == []
        assert "interrupted" in complaint or "no strategy found" in complaint
