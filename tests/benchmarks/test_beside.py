"""What a device holds beside a program's live tensors, by what the training framework and the measurement add."""

from __future__ import annotations

from dataclasses import replace

from autoparallel.costmodel.prediction import Prediction, StageMemory
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Shard, Strategy
from autoparallel.profiles import load_device
from benchmarks.beside import BF16, ZERO_0, ZERO_1, Beside, deepspeed, held_bytes, shown_bytes
from benchmarks.frameworks import FRAMEWORKS
from benchmarks.models import Shape

PARAMETERS = 1000
SHAPE = Shape(
    family="gpt", hidden=4, heads=1, kv_heads=1, head_dim=4, ffn_hidden=16, gated=False, vocab=100, tied=True, seq_len=8,
    rotary=False,
)  # fmt: skip
BASE = Strategy(
    batch=Batch(global_=64, micro=2),
    mesh=Mesh(pp=4, dp_shard=8, tp=1),
    shard=Shard(zero=1),
    execution=Execution(dtype="fp16", param_dtype="fp16", grad_dtype="fp16"),
)


def stage(number: int, activations: int) -> StageMemory:
    return StageMemory(
        stage=number, parameters=2 * PARAMETERS, gradients=0, optimizer=0, activations=activations, buffers=0,
        peak=2 * PARAMETERS + activations,
    )  # fmt: skip


def prediction(*stages: StageMemory) -> Prediction:
    return Prediction(
        memory=stages, capacities_bytes=(1e9,) * len(stages), step_time_s=1.0, breakdown_s=(), model_flops=1,
        hardware_flops=1, tokens=1, devices=32, peak_flops_per_s=1.0,
    )  # fmt: skip


def test_a_framework_that_adds_nothing_holds_what_is_live() -> None:
    assert held_bytes(prediction(stage(0, 5), stage(1, 7)), BASE, Beside(), SHAPE) == 2007


def test_zero_1_flattens_the_gradients_of_its_share_twice_and_a_bucket_of_all() -> None:
    assert (
        held_bytes(prediction(stage(0, 0)), BASE, ZERO_1, SHAPE) == 2000 + 6 * PARAMETERS / 8 + 2 * PARAMETERS
    )


def test_without_zero_every_gradient_is_there_in_fp32_twice() -> None:
    strategy = replace(BASE, shard=Shard(zero=0))
    assert held_bytes(prediction(stage(0, 0)), strategy, ZERO_0, SHAPE) == 2000 + 8 * PARAMETERS


def test_gradients_that_wait_for_the_last_micro_batch_are_whole_on_every_share() -> None:
    """2,000 bytes of bf16 parameters on one of eight shares are 8,000 parameters."""
    strategy = replace(BASE, mesh=Mesh(dp_shard=8), shard=Shard(zero=3))
    waiting = Beside(per_whole_gradient=4, per_own_parameter=-1)
    assert held_bytes(prediction(stage(0, 0)), strategy, waiting, SHAPE) == 2000 + 4 * 8000 - 1000
    once = replace(strategy, batch=Batch(global_=16, micro=2))
    assert held_bytes(prediction(stage(0, 0)), once, waiting, SHAPE) == 2000 - 1000


def test_a_cast_of_the_largest_gradient_is_the_embedding_s_on_outer_stages() -> None:
    strategy = replace(BASE, mesh=replace(BASE.mesh, tp=2))
    casting = Beside(per_largest=4)
    assert held_bytes(prediction(stage(0, 0)), strategy, casting, SHAPE) == 2000 + 4 * 100 * 4 // 2
    assert held_bytes(prediction(stage(1, 0)), strategy, casting, SHAPE) == 2000 + 4 * 16 * 4 // 2


def test_deepspeed_s_optimizer_follows_dtype_and_zero() -> None:
    assert FRAMEWORKS["megatron-deepspeed"].beside is deepspeed
    assert deepspeed(BASE) == ZERO_1
    assert deepspeed(replace(BASE, shard=Shard(zero=0))) == ZERO_0
    assert deepspeed(replace(BASE, execution=Execution(dtype="bf16"))) == BF16


def test_nvidia_smi_shows_what_the_planner_sets_aside_and_torch_does_not() -> None:
    device = load_device("a100-sxm-80gb")
    assert shown_bytes(1e9, "torch-allocated", device) == 1e9
    assert shown_bytes(1e9, "nvidia-smi", device) == 1e9 + device.reserve_bytes
