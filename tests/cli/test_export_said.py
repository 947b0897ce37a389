"""What an export keeps of a plan, and what it says that it cannot keep."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from autoparallel.errors import UserError
from autoparallel.exports import EXPORTS, Plan, plan_of
from autoparallel.exports.launch import slurm
from autoparallel.planner.strategy.file import read_strategy_file
from autoparallel.planner.strategy.types import Batch, Mesh, Offload, Pipeline, Recompute, Strategy
from autoparallel.profiles import load_cluster
from tests.cli.runner import run
from tests.report.sample import write_sample


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("plan") / "pp1.toml", pp=1, micro_batches=8)


@pytest.fixture(scope="module")
def plan(flat: Path) -> Plan:
    return plan_of(read_strategy_file(flat))


def recomputing(plan: Plan, recompute: Recompute, pipeline: Pipeline | None = None) -> Plan:
    strategy = replace(plan.strategy, recompute=recompute, pipeline=pipeline or plan.strategy.pipeline)
    return replace(plan, strategy=strategy)


ALL_BLOCKS = Recompute(mode="none", per_stage=(32,))


def test_all_blocks_in_full_are_full_recomputation_everywhere(plan: Plan) -> None:
    whole = recomputing(plan, ALL_BLOCKS)
    assert "config.activation_checkpoint = FullAC.Config()" in EXPORTS["torchtitan"](whole).text
    assert "fsdp_activation_checkpointing: true" in EXPORTS["accelerate"](whole).text
    assert "--recompute-method uniform" in EXPORTS["megatron"](whole).text
    for target in ("torchtitan", "accelerate", "megatron"):
        said = " ".join(EXPORTS[target](whole).unsaid)
        assert "recomput" not in said, (target, said)


def test_torchtitan_recomputes_the_layers_that_each_stage_does(plan: Plan) -> None:
    stages = Pipeline(schedule="1f1b", stage_blocks=(9, 8, 8, 7))
    text = EXPORTS["torchtitan"](
        recomputing(plan, Recompute(mode="none", per_stage=(2, 1, 0, 0)), stages)
    ).text
    assert "WHOLE = {0, 1, 9}" in text
    assert "class PlannedAC(FullAC):" in text
    assert "return module" in text
    some = EXPORTS["torchtitan"](recomputing(plan, Recompute(mode="operators", per_stage=(3,))))
    assert "class PlannedAC(SelectiveAC):" in some.text
    assert "super()._wrap_block(module, base_fqn=base_fqn)" in some.text


def test_accelerate_says_that_it_recomputes_every_block_or_none(plan: Plan) -> None:
    some = EXPORTS["accelerate"](recomputing(plan, Recompute(mode="none", per_stage=(3,))))
    assert "fsdp_activation_checkpointing: true" in some.text  # what fits
    assert (
        "recomputation of 3 of 32 blocks: fsdp_activation_checkpointing recomputes every block" in some.unsaid
    )
    none = EXPORTS["accelerate"](recomputing(plan, Recompute(mode="selective")))
    assert "fsdp_activation_checkpointing: false" in none.text
    assert any("recomputation of attention" in item for item in none.unsaid)


def test_deepspeed_is_told_what_is_recomputed_not_the_mode_of_the_rest(plan: Plan) -> None:
    told = json.loads(EXPORTS["deepspeed"](recomputing(plan, ALL_BLOCKS)).text)["_autoparallel"][
        "not_said_here"
    ]
    assert "recomputation of every block: switch it on in the model" in told
    assert not any('mode = "none"' in item for item in told)


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("target", ["torchtitan", "accelerate"])
def test_offloading_that_takes_the_parameters_along_says_so(plan: Plan, target: str, share: float) -> None:
    away = replace(plan, strategy=replace(plan.strategy, offload=Offload(optimizer=share)))
    said = [
        item for item in EXPORTS[target](away).unsaid if item.startswith(f"offload.optimizer = {share:g}")
    ]
    assert len(said) == 1
    assert "moves all of it, and the parameters and gradients, too" in said[0]


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_a_model_of_images_is_refused_by_frameworks_of_sequences(plan: Plan, target: str) -> None:
    with pytest.raises(UserError, match=r"no sequence \(seq_len = 1.*accelerate or deepspeed.*torchrun"):
        EXPORTS[target](replace(plan, seq_len=1))


MIXED = load_cluster("a100-v100")  # nodes 0 and 1 of one kind, 2 and 3 of the other
IN_GROUPS = Strategy(
    batch=Batch(global_=32, micro=1),
    mesh=Mesh(pp=4, dp_shard=8, groups=(1, 1, 0, 0)),
    pipeline=Pipeline(schedule="1f1b", stage_blocks=(8, 8, 8, 8)),
)


@pytest.mark.parametrize("target", ["slurm", "torchrun", "kubernetes", "megatron", "torchtitan"])
def test_the_hosts_of_device_groups_are_named_in_the_order_of_ranks(target: str) -> None:
    made = EXPORTS[target](Plan(path="p.toml", strategy=IN_GROUPS, cluster=MIXED, seq_len=4096))
    assert "mesh.groups = [1, 1, 0, 0]: --node-rank is 0 to 3 on nodes 2, 3, 0, 1 of" in made.text
    assert "nodes 0 to 1 of a100-sxm-40gb, nodes 2 to 3 of v100-sxm2-32gb" in made.text
    alone = replace(IN_GROUPS, mesh=replace(IN_GROUPS.mesh, pp=2, groups=(1, 1)))
    made = EXPORTS[target](Plan(path="p.toml", strategy=alone, cluster=MIXED, seq_len=4096))
    assert "on nodes 2, 3 of" in made.text


def test_slurm_starts_ranks_on_the_hosts_of_a_file_in_its_order(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(slurm(Plan(path="p.toml", strategy=IN_GROUPS, cluster=MIXED, seq_len=4096)).text)
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("d\nc\nb\na\n")
    for name, body in {
        "srun": 'shift; SLURM_PROCID=2 exec "$@"',
        "torchrun": 'echo "$(cat "$SLURM_HOSTFILE" | tr "\\n" ,)" "$@"',
    }.items():
        tool = tmp_path / name
        tool.write_text(f"#!/usr/bin/env bash\n{body}\n")
        tool.chmod(0o755)
    done = subprocess.run(
        ["bash", script, "train.py", "an argument"], capture_output=True, text=True, check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.split() == [
        "d,c,b,a,",
        "--nnodes",
        "4",
        "--nproc-per-node",
        "8",
        "--node-rank",
        "2",
        "--master-addr",
        "d",
        "--master-port",
        "29500",
        "train.py",
        "an",
        "argument",
    ]


def test_what_a_target_cannot_say_goes_to_standard_error_too(flat: Path, tmp_path: Path) -> None:
    out = tmp_path / "config.yaml"
    answer = run("export", flat, "--to", "accelerate", "-o", out)
    assert answer.status == 0, answer
    assert answer.out == ""
    said = " ".join(answer.err.split())
    assert "not said there, accelerate has no setting for it: grad_sync.compression = " in said
    assert "recomputation of attention" in said
    assert "not said there" not in out.read_text()


def test_launch_files_say_what_auto_parallelize_refuses(plan: Plan) -> None:
    compiled = replace(plan.strategy, execution=replace(plan.strategy.execution, kernels="compiled"))
    sharded = replace(plan, strategy=replace(compiled, mesh=replace(compiled.mesh, tp=2)))
    for target in ("torchrun", "slurm", "kubernetes", "jobset"):
        said = [item for item in EXPORTS[target](sharded).unsaid if "auto_parallelize refuses" in item]
        assert len(said) == 1, target
        assert 'execution.kernels = "compiled" with mesh.tp = 2' in said[0]
