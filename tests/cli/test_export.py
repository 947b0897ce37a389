from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from autoparallel.errors import UserError
from autoparallel.exports import EXPORTS, Plan, plan_of
from autoparallel.planner.strategy.file import read_strategy_file
from autoparallel.planner.strategy.types import Offload, Pipeline, Recompute, Shard, TensorRule
from tests.cli.framework_names import MEGATRON_FLAGS, TITAN_CONFIG, TITAN_POLICIES
from tests.cli.runner import refused, run
from tests.report.sample import write_sample


@pytest.fixture(scope="module")
def pipelined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("plan") / "pp4.toml", pp=4, micro_batches=16)


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("plan") / "pp1.toml", pp=1, micro_batches=8)


def exported(path: Path, target: str) -> str:
    answer = run("export", path, "--to", target)
    assert answer.status == 0, answer
    return answer.out


def policy(name: str) -> type:
    """A stand-in for one of torchtitan's policies: a class with a dataclass `Config`, as all of them are."""
    config = type("Config", (), {"__slots__": (), "__qualname__": f"{name}.Config"})
    return type(name, (), {"Config": config, "__init__": lambda self, config: None})


def titan(text: str) -> SimpleNamespace:
    """The configuration that the exported function returns; AttributeError for a name that torchtitan lacks."""
    module: dict[str, Any] = {"__name__": "autoparallel_plan"}
    policies = ModuleType("torchtitan.distributed.activation_checkpoint")
    vars(policies).update({name: policy(name) for name in TITAN_POLICIES})
    with pytest.MonkeyPatch.context() as patch:
        for name in ("torchtitan", "torchtitan.distributed"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, policies.__name__, policies)
        exec(text, module)
    sections = {name: type(name, (), {"__slots__": keys.split()})() for name, keys in TITAN_CONFIG.items()}
    return module["planned"](SimpleNamespace(activation_checkpoint="not set", **sections))


def test_torchtitan_is_a_configuration_whose_sizes_multiply_to_the_devices(pipelined: Path) -> None:
    text = exported(pipelined, "torchtitan")
    config = titan(text)
    sizes = config.parallelism
    product = 1
    for axis in ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "pipeline_parallel"):
        product *= getattr(sizes, f"{axis}_degree")
    assert product == 16, text
    assert config.training.global_batch_size == config.training.local_batch_size * 2
    assert config.training.disable_cuda_graphs, "torchtitan refuses them with a pipeline"
    assert type(config.activation_checkpoint).__qualname__ == "SelectiveAC.Config"
    assert "grad_sync.compression" in text  # what it cannot say is said


def test_stages_name_every_module_of_torchtitan_once(pipelined: Path) -> None:
    plan = plan_of(read_strategy_file(pipelined))
    uneven = replace(plan.strategy, pipeline=Pipeline(schedule="1f1b", stage_blocks=(9, 8, 8, 7)))
    parts = titan(
        EXPORTS["torchtitan"](replace(plan, strategy=uneven)).text
    ).parallelism.module_fqns_per_model_part
    flat_names = [name for part in parts for name in part]
    assert flat_names == ["tok_embeddings", *(f"layers.{i}" for i in range(32)), "norm", "lm_head"]
    assert [len(part) for part in parts] == [10, 8, 8, 9]


def variants(plan: Plan) -> Iterator[Plan]:
    """The plan with other settings, one plan for each value of any of them."""
    s = plan.strategy
    changes: list[dict[str, Any]] = [{"shard": replace(s.shard, zero=zero)} for zero in range(4)]
    changes += [{"shard": replace(s.shard, sequence_parallel=False)}]
    changes += [{"recompute": Recompute(mode=mode)} for mode in ("none", "selective", "operators", "full")]
    changes += [{"offload": Offload(optimizer=share)} for share in (0.5, 1.0)]
    changes += [
        {"mesh": replace(s.mesh, dp_replicate=2, dp_shard=s.mesh.dp_shard // 2)},
        {"mesh": replace(s.mesh, ep=2)},
    ]
    executions: list[dict[str, Any]] = [
        {"dtype": dtype} for dtype in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")
    ]
    executions += [{"optimizer": name} for name in ("adam", "sgd", "sgd-momentum", "adafactor")]
    executions += [
        {"grad_dtype": "bf16"},
        {"attention": "unfused"},
        {"kernels": "compiled"},
        {"master_weights": False},
    ]
    changes += [{"execution": replace(s.execution, **changed)} for changed in executions]
    for change in changes:
        yield replace(plan, strategy=replace(s, **change))


def test_every_name_that_an_export_writes_is_the_frameworks_own(
    pipelined: Path, flat: Path, tmp_path: Path
) -> None:
    plan = plan_of(read_strategy_file(pipelined))
    for one in variants(plan):
        titan(EXPORTS["torchtitan"](one).text)
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for name, kind in MEGATRON_FLAGS.items():
        if kind is None:
            parser.add_argument(name, action="store_true")
        elif isinstance(kind, tuple):
            parser.add_argument(name, choices=kind)
        else:
            parser.add_argument(name, type=kind)
    for one in variants(plan):
        flags = megatron_flags(EXPORTS["megatron"](one).text, tmp_path)
        assert parser.parse_known_args(flags)[1] == [], flags


@pytest.mark.parametrize(
    ("grads", "zero", "expected"), [("fp32", 0, "bf16"), ("fp32", 1, "fp32"), ("bf16", 0, "bf16")]
)
def test_deepspeed_without_zero_adds_gradients_up_in_the_models_own_dtype(
    flat: Path, grads: str, zero: int, expected: str
) -> None:
    plan = plan_of(read_strategy_file(flat))
    s = plan.strategy
    changed = replace(s, shard=replace(s.shard, zero=zero), execution=replace(s.execution, grad_dtype=grads))
    config = json.loads(EXPORTS["deepspeed"](replace(plan, strategy=changed)).text)
    assert config["data_types"]["grad_accum_dtype"] == expected
    said = " ".join(config["_autoparallel"]["not_said_here"])
    assert ("execution.grad_dtype" in said) == (grads != expected)


def test_megatron_is_told_of_what_its_defaults_would_change(flat: Path, tmp_path: Path) -> None:
    plan = plan_of(read_strategy_file(flat))
    s = plan.strategy
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in EXPORTS["megatron"](plan).text  # it refuses tp without
    sharded = replace(s, shard=replace(s.shard, zero=3), mesh=replace(s.mesh, dp_replicate=2, dp_shard=4))
    text = EXPORTS["megatron"](replace(plan, strategy=sharded)).text
    assert "unset CUDA_DEVICE_MAX_CONNECTIONS" in text  # and Megatron-FSDP with
    flags = megatron_flags(text, tmp_path)
    assert flags[flags.index("--num-distributed-optimizer-instances") + 1] == "2"
    experts = replace(s, mesh=replace(s.mesh, ep=4), grad_sync=replace(s.grad_sync, bucket_mib=100.0))
    flags = megatron_flags(EXPORTS["megatron"](replace(plan, strategy=experts)).text, tmp_path)
    for name, value in {
        "--hidden-dropout": "0",
        "--attention-dropout": "0",
        "--expert-tensor-parallel-size": "1",
        "--ddp-bucket-size": str(100 * 2**20 // 4),
    }.items():
        assert flags[flags.index(name) + 1] == value, flags


def megatron_flags(text: str, tmp_path: Path) -> list[str]:
    """The array as bash reads it."""
    script = tmp_path / "args.sh"
    script.write_text(text + 'printf "%s\\n" "${MEGATRON_ARGS[@]}"\n')
    return subprocess.run(["bash", script], capture_output=True, text=True, check=True).stdout.split("\n")[
        :-1
    ]


def test_megatron_flags_survive_the_shell(pipelined: Path, tmp_path: Path) -> None:
    plan = plan_of(read_strategy_file(pipelined))
    flags = megatron_flags(EXPORTS["megatron"](plan).text, tmp_path)
    for name, value in {
        "--tensor-model-parallel-size": "2",
        "--pipeline-model-parallel-size": "4",
        "--global-batch-size": "32",
        "--recompute-granularity": "selective",
    }.items():
        assert flags[flags.index(name) + 1] == value, flags
    uneven = replace(
        plan.strategy,
        pipeline=Pipeline(schedule="1f1b", stage_blocks=(9, 8, 8, 7)),
        recompute=Recompute(mode="none", per_stage=(2, 1, 0, 0)),
    )
    text = EXPORTS["megatron"](replace(plan, strategy=uneven)).text
    flags = megatron_flags(text, tmp_path)
    assert flags[flags.index("--pipeline-model-parallel-layout") + 1] == "Et*9|t*8|t*8|t*7L"
    assert flags[flags.index("--recompute-num-layers") + 1] == "2"
    assert "every chunk recomputes the most" in text


def test_deepspeed_batch_sizes_agree_with_each_other(flat: Path) -> None:
    config = json.loads(exported(flat, "deepspeed"))
    ranks = 16 // config["tensor_parallel"]["autotp_size"]
    assert (
        config["train_batch_size"]
        == config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * ranks
    )


def test_what_is_kept_on_the_host_is_said_or_named_by_every_export(flat: Path, tmp_path: Path) -> None:
    plan = plan_of(read_strategy_file(flat))
    away = replace(plan, strategy=replace(plan.strategy, offload=Offload(optimizer=0.5, activations=0.25)))
    flags = megatron_flags(EXPORTS["megatron"](away).text, tmp_path)
    assert flags[flags.index("--optimizer-offload-fraction") + 1] == "0.5"
    assert "--optimizer-cpu-offload" in flags
    assert json.loads(EXPORTS["deepspeed"](away).text)["zero_optimization"]["offload_optimizer"] == {
        "device": "cpu"
    }
    whole = replace(away, strategy=replace(away.strategy, shard=Shard(zero=3)))
    assert (
        json.loads(EXPORTS["deepspeed"](whole).text)["zero_optimization"]["offload_optimizer"]["ratio"] == 0.5
    )
    for target in ("torchtitan", "megatron", "deepspeed", "accelerate"):
        text = EXPORTS[target](away).text
        assert "offload.activations = 0.25" in text, text


@pytest.mark.parametrize("dtype", ["fp8", "mxfp8", "nvfp4"])
def test_products_in_few_bits_stand_on_bf16_in_every_export(flat: Path, tmp_path: Path, dtype: str) -> None:
    plan = plan_of(read_strategy_file(flat))
    execution = replace(plan.strategy.execution, dtype=dtype)
    few = replace(plan, strategy=replace(plan.strategy, execution=execution))
    flags = megatron_flags(EXPORTS["megatron"](few).text, tmp_path)
    assert "--bf16" in flags
    assert any(flag.startswith(("--fp8-format", "--fp4-format")) for flag in flags), flags
    config = json.loads(EXPORTS["deepspeed"](few).text)
    assert config["bf16"]["enabled"]
    assert f'"{dtype}": bf16' in " ".join(config["_autoparallel"]["not_said_here"])
    assert "mixed_precision: no" not in EXPORTS["accelerate"](few).text


def test_accelerate_reads_what_yaml_would_read_otherwise(flat: Path) -> None:
    plan = plan_of(read_strategy_file(flat))
    s = plan.strategy
    single = replace(s.execution, dtype="fp32")
    config = yaml.safe_load(EXPORTS["accelerate"](replace(plan, strategy=replace(s, execution=single))).text)
    assert config["mixed_precision"] == "no"
    alone = replace(s, mesh=replace(s.mesh, dp_shard=1, tp=8))
    config = yaml.safe_load(EXPORTS["accelerate"](replace(plan, strategy=alone)).text)
    assert config["distributed_type"] == "MULTI_GPU", "FSDP refuses a mesh with nothing to shard over"
    assert config["parallelism_config"]["parallelism_config_tp_size"] == 8
    replicas = replace(plan, strategy=replace(s, mesh=replace(s.mesh, dp_replicate=8, dp_shard=1)))
    with pytest.raises(UserError, match=r"mesh\.dp_replicate=1"):
        EXPORTS["accelerate"](replicas)


def test_yaml_exports_are_yaml(pipelined: Path, flat: Path) -> None:
    config: dict[str, Any] = yaml.safe_load(exported(flat, "accelerate"))
    assert config["num_processes"] == 16
    assert config["parallelism_config"]["parallelism_config_tp_size"] == 2
    service, job = yaml.safe_load_all(exported(pipelined, "kubernetes"))
    assert service["kind"] == "Service"
    assert job["spec"]["completions"] == 2
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert "--nproc-per-node=8" in container["command"]


def test_pods_are_told_of_fewest_nodes_and_of_labels_by_options(pipelined: Path) -> None:
    options = ("--min-nodes", "1", "--near", "example.com/rack", "--near", "example.com/block")
    answer = run("export", pipelined, "--to", "trainjob", *options)
    assert answer.status == 0, answer
    assert "--nnodes=1:$(PET_NNODES)" in answer.out
    assert answer.out.index("topologyKey: example.com/rack") < answer.out.index(
        "topologyKey: example.com/block"
    )
    refused("export", pipelined, "--to", "torchrun", *options, words=["--min-nodes", "jobset and trainjob"])


@pytest.mark.parametrize("target", ["torchrun", "slurm"])
def test_launch_scripts_are_bash_for_two_nodes_of_eight(pipelined: Path, tmp_path: Path, target: str) -> None:
    script = tmp_path / "launch.sh"
    assert run("export", pipelined, "--to", target, "-o", script).status == 0
    assert subprocess.run(["bash", "-n", script], capture_output=True, check=False).returncode == 0
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "--nnodes 2 --nproc-per-node 8" in text


def test_what_a_framework_cannot_run_is_refused(pipelined: Path, tmp_path: Path) -> None:
    refused("export", pipelined, "--to", "accelerate", words=["pipeline", "mesh.pp=1"])
    refused("export", pipelined, "--to", "deepspeed", words=["pipeline", "mesh.pp=1"])
    refused("export", pipelined, "--to", "ray", words=["--to ray", "torchtitan"])
    partial = tmp_path / "p.toml"
    partial.write_text("[mesh]\ntp = 2\n")
    refused("export", partial, "--to", "slurm", words=["p.toml", "missing", "plan"])


def test_a_placement_that_a_framework_cannot_have_is_said(pipelined: Path) -> None:
    plan = plan_of(read_strategy_file(pipelined))
    inside = ("dp_replicate", "dp_shard", "pp", "cp", "tp")
    odd = ("tp", "dp_replicate", "dp_shard", "cp", "pp")

    def placed(order: tuple[str, ...], target: str) -> str:
        mesh = replace(plan.strategy.mesh, order=order, dp_shard=2, tp=2)
        return EXPORTS[target](replace(plan, strategy=replace(plan.strategy, mesh=mesh))).text

    assert "mesh.order" not in placed(("pp", "dp_replicate", "dp_shard", "cp", "tp"), "torchtitan")
    assert "mesh.order" in placed(inside, "torchtitan")
    assert "--use-tp-pp-dp-mapping" in placed(inside, "megatron")
    assert "mesh.order" not in placed(inside, "megatron")
    assert "mesh.order" in placed(odd, "megatron")


@pytest.mark.parametrize("target", ["torchtitan", "megatron", "deepspeed"])
def test_matrices_that_a_plan_keeps_whole_are_named(flat: Path, target: str) -> None:
    plan = plan_of(read_strategy_file(flat))
    mesh = replace(plan.strategy.mesh, tp=2, dp_shard=plan.strategy.mesh.dp_shard // 2)
    rules = (TensorRule(module="layers.*.attn.q", params=(("weight", "replicate"),)),)
    said = EXPORTS[target](replace(plan, strategy=replace(plan.strategy, mesh=mesh, tensor=rules))).text
    assert "matrices of layers.*.attn.q are whole here" in said
