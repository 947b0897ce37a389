"""Exports, read by the frameworks' own parsers; each test is skipped where its framework is not installed.

Run last with accelerate 1.15.0, DeepSpeed 0.19.8 and torchtitan 0.3.0, on a CPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autoparallel.exports import EXPORTS, Plan, plan_of
from autoparallel.planner.strategy.file import read_strategy_file
from autoparallel.planner.strategy.types import Offload, Pipeline, Recompute, Strategy
from tests.report.sample import write_sample

RECOMPUTE = (
    Recompute(mode="none"),
    Recompute(mode="selective"),
    Recompute(mode="operators"),
    Recompute(mode="full"),
    Recompute(mode="none", per_stage=(32,)),
    Recompute(mode="none", per_stage=(3,)),
    Recompute(mode="operators", per_stage=(3,)),
)


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = write_sample(tmp_path_factory.mktemp("plan") / "pp1.toml", pp=1, micro_batches=8)
    return plan_of(read_strategy_file(path))


@pytest.fixture(scope="module")
def pipelined(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = write_sample(tmp_path_factory.mktemp("plan") / "pp4.toml", pp=4, micro_batches=16)
    return plan_of(read_strategy_file(path))


def variants(plan: Plan) -> Iterator[Plan]:
    """The plan with every level of sharding, recomputation, offloading and precision that frameworks differ in."""
    s = plan.strategy
    changed: list[Strategy] = [replace(s, shard=replace(s.shard, zero=zero)) for zero in range(4)]
    changed += [replace(s, recompute=recompute) for recompute in RECOMPUTE]
    changed += [replace(s, offload=Offload(optimizer=1.0), shard=replace(s.shard, zero=z)) for z in (1, 3)]
    changed += [replace(s, execution=replace(s.execution, dtype=dtype)) for dtype in ("fp32", "fp16", "bf16")]
    mesh = s.mesh
    changed += [replace(s, mesh=replace(mesh, dp_replicate=2, dp_shard=mesh.dp_shard // 2))]
    for one in changed:
        yield replace(plan, strategy=one)


def test_accelerate_launches_with_what_it_is_told(
    flat: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands import launch
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = tmp_path / "accelerate.yaml"
    for plan in variants(flat):
        s = plan.strategy
        path.write_text(EXPORTS["accelerate"](plan).text)
        arguments = ["--config_file", str(path), "--machine_rank", "0", "--main_process_ip", "localhost"]
        given = launch.launch_command_parser().parse_args(
            [*arguments, "--main_process_port", "29500", "train.py"]
        )
        args, _, _ = launch._validate_launch_command(given)
        assert args.num_processes == s.mesh.devices
        assert args.use_fsdp == (s.shard.zero > 0)
        with monkeypatch.context() as patch:
            for key, value in prepare_multi_gpu_env(args).items():
                if value is not None:
                    patch.setenv(key, str(value))
            sizes = ParallelismConfig()
            assert (sizes.dp_replicate_size, sizes.dp_shard_size) == (s.mesh.dp_replicate, s.mesh.dp_shard)
            assert sizes.tp_size == s.mesh.tp
            if args.use_fsdp:
                plugin = FullyShardedDataParallelPlugin()
                again = s.recompute.mode == "full" or any(s.recompute.per_stage)
                assert plugin.activation_checkpointing == again
                assert plugin.fsdp_version == 2
                assert plugin.reshard_after_forward == (s.shard.zero == 3)
                assert bool(getattr(plugin.cpu_offload, "pin_memory", False)) == (s.offload.optimizer > 0)


def test_deepspeed_reads_its_configuration(flat: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime import config as module

    monkeypatch.setattr(module, "dist", SimpleNamespace(get_rank=lambda: 0))
    for plan in variants(flat):
        s = plan.strategy
        ranks = SimpleNamespace(get_data_parallel_world_size=lambda s=s: s.mesh.data_parallel)
        read = module.DeepSpeedConfig(json.loads(EXPORTS["deepspeed"](plan).text), mpu=ranks)
        assert read.train_batch_size == s.batch.global_
        assert read.zero_optimization_stage == s.shard.zero
        offload = read.zero_config.offload_optimizer
        assert (offload is not None and offload.device == "cpu") == (s.offload.optimizer > 0)


class Layer(nn.Module):
    """As many layers as the plan has blocks stand in for torchtitan's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def recomputed_in_full(config: object, layers: int) -> list[int]:
    """Layers that torchtitan's policy wraps with nothing kept."""
    model = nn.Module()
    model.layers = nn.ModuleDict({str(i): Layer() for i in range(layers)})
    if config is not None:
        config.build().apply(model)  # type: ignore[attr-defined]
    kept: dict[str, object] = {
        name: getattr(layer, "checkpoint_fn", None) for name, layer in model.layers.items()
    }
    return [int(name) for name, fn in kept.items() if fn is not None and "context_fn" not in fn.keywords]


def test_torchtitan_takes_the_configuration_and_recomputes_these_layers(
    flat: Plan, pipelined: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchtitan")
    from torchtitan.config.manager import ConfigManager

    monkeypatch.syspath_prepend(str(tmp_path))
    uneven = replace(
        pipelined.strategy, pipeline=Pipeline(schedule="1f1b", stage_blocks=(9, 8, 8, 7)),
        recompute=Recompute(mode="none", per_stage=(2, 1, 0, 0)),
    )  # fmt: skip
    plans = [*variants(flat), replace(pipelined, strategy=uneven)]
    for number, plan in enumerate(plans):
        s, name = plan.strategy, f"planned_{number}"
        (tmp_path / f"{name}.py").write_text(
            EXPORTS["torchtitan"](plan).text
            + "\n\ndef run():\n    from torchtitan.models.llama3.config_registry import llama3_8b\n\n"
            "    return planned(llama3_8b())\n"
        )
        config = ConfigManager().parse_args(["--module", name, "--config", "run"])
        assert config.training.seq_len == plan.seq_len
        assert config.parallelism.pipeline_parallel_degree == s.mesh.pp
        assert config.training.enable_cpu_offload == (s.offload.optimizer > 0)
        first, expected = 0, []
        for blocks, full in zip(
            s.pipeline.stage_blocks, s.recompute.per_stage or (0,) * s.mesh.pp, strict=True
        ):
            expected += range(first, first + (blocks if s.recompute.mode == "full" else full))
            first += blocks
        assert recomputed_in_full(config.activation_checkpoint, 32) == expected, name
        sys.modules.pop(name)
    assert os.environ.get("WORLD_SIZE") is None  # nothing was started
