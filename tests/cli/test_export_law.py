"""Two plans that differ in one key differ in every export, in what it sets or in what it says that it cannot set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoparallel.errors import UserError
from autoparallel.exports import EXPORTS, Exported, Plan, plan_of
from autoparallel.planner.strategy.file import read_strategy_file
from autoparallel.planner.strategy.types import AXES, EmbeddingRule, Phase, Strategy
from tests.report.sample import write_sample

# Values of each key; flags of [execution] that describe the planned software, and the law of lookups, are no decisions.
VALUES: dict[str, tuple[object, ...]] = {
    "batch.global_": (64, 128),
    "batch.micro": (1, 2),
    "mesh.ep": (1, 2),
    "mesh.per_node": (0, 4),
    "mesh.order": (AXES, ("tp", "dp_shard", "dp_replicate", "cp", "pp")),
    "shard.zero": (0, 1, 2, 3),
    "shard.sequence_parallel": (True, False),
    "shard.secondary": (0, 2),
    "recompute.mode": ("none", "selective", "operators", "full"),
    "offload.optimizer": (0.0, 0.5, 1.0),
    "offload.activations": (0.0, 0.25),
    "execution.dtype": ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"),
    "execution.param_dtype": ("bf16", "fp32", "fp16"),
    "execution.master_weights": (True, False),
    "execution.grad_dtype": ("fp32", "bf16", "fp16"),
    "execution.optimizer": ("adamw", "adam", "sgd", "sgd-momentum", "adafactor"),
    "execution.attention": ("flash", "unfused"),
    "execution.kernels": ("eager", "fused", "compiled"),
    "execution.dropout": (0.0, 0.1),
    "grad_sync.algorithm": ("auto", "ring", "tree", "hierarchical", "parameter-server"),
    "grad_sync.bucket_mib": (25.0, 50.0),
    "grad_sync.overlap": (True, False),
    "grad_sync.compression": ((), ("none", "int8"), ("none", "int4")),
    "grad_sync.weights": ("none", "int8"),
    "outer.algorithm": ("none", "diloco"),
    "outer.every": (10, 50),
    "recovery.policy": ("restart", "peers"),
    "recovery.checkpoint_every_s": (0.0, 60.0),
    "servers.copies": (1, 2),
    "phases": ((), (Phase(from_step=3, keys=(("batch.global", 64),)),)),
    "embedding": (
        (),
        (EmbeddingRule(module="a", tier="sharded", hot_rows=0),),
        (EmbeddingRule(module="a", tier="sharded", hot_rows=5),),
    ),
}
ONLY_ZERO_3 = ("shard.secondary", "grad_sync.weights")


def changed(strategy: Strategy, key: str, value: object) -> Strategy:
    section, _, name = key.partition(".")
    part: Any = replace(getattr(strategy, section), **{name: value}) if name else value
    return replace(strategy, **{section: part})


def made(plan: Plan, target: str) -> Exported | None:
    try:
        return EXPORTS[target](plan)
    except UserError:
        return None  # a refusal says it


@pytest.mark.parametrize(
    ("target", "pp"),
    [(target, 1) for target in ("torchtitan", "megatron", "deepspeed", "accelerate")]
    + [("torchtitan", 4), ("megatron", 4)],
)
def test_no_decision_is_dropped_silently(target: str, pp: int, tmp_path: Path) -> None:
    plan = plan_of(read_strategy_file(write_sample(tmp_path / "plan.toml", pp=pp, micro_batches=16)))
    silent, seen = [], 0
    for zero in (0, 1, 3):
        start = changed(plan.strategy, "shard.zero", zero)
        for key, values in VALUES.items():
            if key in ONLY_ZERO_3 and zero != 3:
                continue
            found: dict[tuple[str, tuple[str, ...]], object] = {}
            for value in values:
                export = made(replace(plan, strategy=changed(start, key, value)), target)
                if export is None:
                    continue
                seen += 1
                assert all(
                    item in export.text or item.replace('"', '\\"') in export.text for item in export.unsaid
                )
                same = found.setdefault((export.text, export.unsaid), value)
                if same != value:
                    silent.append((zero, key, same, value))
    assert not silent, silent
    assert seen > 200, seen


@pytest.mark.parametrize("target", ["torchtitan", "megatron"])
def test_a_length_that_the_file_states_is_the_one_that_is_exported(target: str, tmp_path: Path) -> None:
    path = write_sample(tmp_path / "plan.toml", pp=1, micro_batches=8)
    text = path.read_text()
    path.write_text(text.replace("[batch]\n", "[batch]\nseq_len = 512\n", 1))
    assert "512" in EXPORTS[target](plan_of(read_strategy_file(path))).text


def test_what_the_frameworks_own_checks_refuse_is_not_written(tmp_path: Path) -> None:
    """DeepSpeed 0.19 has no MiCS; Megatron keeps Adam alone on the host; both decoders cut sequences in 2 cp pieces."""
    plan = plan_of(read_strategy_file(write_sample(tmp_path / "plan.toml", pp=1, micro_batches=16)))
    s = plan.strategy
    replicas = changed(changed(s, "mesh.dp_replicate", 2), "shard.zero", 3)
    config = EXPORTS["deepspeed"](replace(plan, strategy=replicas))
    assert "mics" not in config.text
    assert any(item.startswith("dp_replicate = 2") for item in config.unsaid)
    sgd = changed(changed(s, "offload.optimizer", 0.5), "execution.optimizer", "sgd")
    flags = EXPORTS["megatron"](replace(plan, strategy=sgd))
    assert "--optimizer-cpu-offload" not in flags.text
    assert "offload.optimizer = 0.5" in flags.unsaid
    half = EXPORTS["megatron"](replace(plan, strategy=changed(s, "execution.dtype", "fp16")))
    assert "--accumulate-allreduce-grads-in-fp32" in half.text
    for target in ("torchtitan", "megatron"):
        with pytest.raises(UserError, match=r"into 8 equal pieces.*multiple of 8 as --seq-len"):
            EXPORTS[target](replace(plan, strategy=changed(s, "mesh.cp", 2), seq_len=1002))
