"""What other programs rely on, as the file formats and the command line are documented: nothing else is assumed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from autoparallel.planner.strategy.file import missing_keys, read_strategy_file
from tests.cli.runner import Answer, refused, run, save
from tests.toy_graphs import toy_transformer

STRATEGY = """schema = 1
[batch]
global = 512
micro  = 1
[mesh]
pp = 8
dp_replicate = 1
dp_shard = 8
cp = 1
tp = 8
ep = 1
order = ["pp", "dp_replicate", "dp_shard", "cp", "tp"]
groups = []
[shard]
zero = 1
sequence_parallel = true
[pipeline]
schedule = "1f1b"
virtual_stages = 1
stage_blocks = [12, 12, 12, 12, 12, 12, 12, 12]
[recompute]
mode = "selective"
per_stage = []
[offload]
optimizer = 0.0
activations = 0.0
[execution]
dtype = "bf16"
param_dtype = "bf16"
master_weights = true
grad_dtype = "fp32"
optimizer = "adamw"
attention = "flash"
kernels = "fused"
dropout = 0.0
[grad_sync]
algorithm = "auto"
bucket_mib = 25
overlap = true
compression = ["none", "none"]
[[tensor]]
module = "model.layers.*.mlp.down_proj"
params  = { weight = "shard(1)", bias = "replicate" }
inputs  = { input = "shard(-1)" }
outputs = ["shard(1)"]
"""
CLUSTER = """schema = 1
name = "two racks"
[[group]]
device = "h100-sxm"
nodes = 16
devices_per_node = 8
price_per_device_hour = 2.5
[[level]]
name = "nvlink"
size = 8
bytes_per_s = 450e9
latency_s = 3e-6
[[level]]
name = "infiniband"
size = 128
bytes_per_s = { value = 50e9, kind = "datasheet", source = "the vendor" }
latency_s = 8e-6
oversubscription = 1.0
"""
CHOICES = {
    "pipeline.schedule": ["none", "gpipe", "1f1b", "interleaved-1f1b", "zb1p", "zbv", "dualpipev", "program"],
    "recompute.mode": ["none", "selective", "full"],
    "shard.zero": ["0", "1", "2", "3"],
    "execution.dtype": ["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"],
    "execution.optimizer": ["adamw", "adam", "sgd", "sgd-momentum", "adafactor"],
    "execution.attention": ["flash", "unfused"],
    "execution.kernels": ["eager", "fused", "compiled"],
    "grad_sync.algorithm": ["auto", "ring", "tree", "hierarchical", "parameter-server"],
    "grad_sync.weights": ["none", "fp16", "bf16", "fp8", "int8", "int4"],
    "grad_sync.compression": [
        f'["{name}"]'
        for name in ("none", "fp16", "bf16", "fp8", "int8", "int4", "int2", "sign", "topk:0.01", "powersgd:4")
    ],
}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(toy_transformer(heads=8, layers=8), tmp_path_factory.mktemp("graph") / "graph.json")


@pytest.fixture(scope="module")
def racks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cluster") / "racks.toml"
    path.write_text(CLUSTER)
    return path


@pytest.fixture(scope="module")
def planned(graph: Path, racks: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    path = tmp_path_factory.mktemp("plan") / "strategy.toml"
    options = (
        "--set",
        "mesh.dp_shard=16",
        "--set",
        "mesh.tp=2",
        "--set",
        "mesh.pp=4",
        "--set",
        "recompute.mode=none",
    )
    answer = run("plan", graph, "--cluster", racks, *options, "-o", path, "--json")
    assert answer.status == 0, answer
    return path, answer


def test_the_documented_strategy_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "strategy.toml"
    path.write_text(STRATEGY)
    assert missing_keys(read_strategy_file(path).constraints) == ()


def test_a_plan_has_every_documented_key_and_execution_its_documented_defaults(
    planned: tuple[Path, Answer],
) -> None:
    documented = tomllib.loads(STRATEGY)
    strategy = planned[1].json["strategy"]
    for section in ("batch", "mesh", "shard", "pipeline", "recompute", "offload", "execution", "grad_sync"):
        assert strategy[section].keys() >= documented[section].keys(), section
    assert {k: strategy["execution"][k] for k in documented["execution"]} == documented["execution"]
    assert strategy["batch"]["global"] == 128  # one sequence per device


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in CHOICES.items() for v in values])
def test_every_documented_value_is_known(key: str, value: str, tmp_path: Path) -> None:
    section, name = key.split(".")
    quoted = value if value[0] == "[" or key == "shard.zero" else f'"{value}"'
    path = tmp_path / "p.toml"
    path.write_text(f"[{section}]\n{name} = {quoted}\n")
    assert key in read_strategy_file(path).constraints


def test_the_sizes_multiply_to_the_devices_in_use_and_the_blocks_to_the_model(
    planned: tuple[Path, Answer],
) -> None:
    strategy = planned[1].json["strategy"]
    product = 1
    for axis in strategy["mesh"]["order"]:
        product *= strategy["mesh"][axis]
    assert product == planned[1].json["devices"] == 128
    chunks = strategy["mesh"]["pp"] * strategy["pipeline"]["virtual_stages"]
    assert len(strategy["pipeline"]["stage_blocks"]) == chunks
    assert sum(strategy["pipeline"]["stage_blocks"]) == 8


def test_the_file_stands_alone_and_says_what_was_found(planned: tuple[Path, Answer]) -> None:
    file = tomllib.loads(planned[0].read_text())
    assert file["problem"].keys() >= {"model", "graph_hash", "seq_len", "objective", "cluster"}
    assert file["problem"]["cluster"]["group"][0]["nodes"] in (16, {"value": 16})
    assert file["predicted"]["step_time_s"] == planned[1].json["step_time_s"]
    assert file["search"].keys() >= {"status", "lower_bound_s", "gap", "alternatives"}


def test_a_price_in_the_cluster_file_gives_costs(planned: tuple[Path, Answer]) -> None:
    answer = planned[1].json
    assert answer["cost"]["per_hour"] == pytest.approx(128 * 2.5)
    assert answer["cost"]["per_step"] == pytest.approx(128 * 2.5 * answer["step_time_s"] / 3600)


def test_no_strategy_in_the_time_is_status_4(graph: Path) -> None:
    refused(
        "plan", graph, "--cluster", "h100-sxm:1x4", "--time-limit", "0", status=4, words=["no strategy found"]
    )


def test_every_documented_command_says_what_it_takes() -> None:
    for command in (
        "plan",
        "score",
        "whatif",
        "report",
        "export",
        "profiles",
        "profile",
        "calibrate",
        "graph",
    ):
        answer = run(command, "--help")
        assert answer.status == 0, command
        assert "Usage" in answer.out


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "target", ["torchtitan", "megatron", "deepspeed", "accelerate", "torchrun", "slurm", "kubernetes"]
)
def test_a_plan_without_a_pipeline_exports_to_everything(graph: Path, tmp_path: Path, target: str) -> None:
    path = tmp_path / "s.toml"
    options = (
        "--set",
        "mesh.pp=1",
        "--set",
        "mesh.cp=1",
        "--set",
        "mesh.tp=1",
        "--set",
        "mesh.ep=1",
        "-o",
        path,
    )
    assert run("plan", graph, "--cluster", "h100-sxm:1x4", *options).status == 0
    answer = run("export", path, "--to", target)
    assert answer.status == 0, answer
    assert answer.out.strip()
