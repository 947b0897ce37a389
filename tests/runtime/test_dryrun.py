from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoparallel.costmodel.program import CollectiveOp
from autoparallel.dryrun import compare
from autoparallel.errors import UserError
from autoparallel.model_errors import on_tensors_without_values
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.load import keyword_inputs, load_model
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.expand.state import optimizer_bytes_per_parameter
from autoparallel.planner.expand.units import own_units
from autoparallel.planner.score import completed
from autoparallel.planner.strategy.types import (
    Batch,
    Execution,
    Mesh,
    Offload,
    Pipeline,
    Recompute,
    Shard,
    Strategy,
    TensorRule,
)
from autoparallel.profiles import load_cluster
from autoparallel.runtime.check import dryrun
from autoparallel.runtime.check.dryrun import LoweredStage, dry_run
from autoparallel.runtime.check.messages import Message
from autoparallel.runtime.check.traffic import TrafficRecorder
from autoparallel.runtime.lowering.lower import lower_module
from autoparallel.runtime.start import parallelize
from tests.runtime.harness import Processes
from tests.runtime.models import EXAMPLES, Example
from tests.runtime.shared import no_program

CLUSTER = "cpu-gloo:1x4"
SAMPLES = 8
FP32 = Execution(dtype="fp32", param_dtype="fp32", master_weights=False, kernels="eager", fsdp2=True)
STRATEGIES = {
    "zero 3 beside sequence parallelism": Strategy(
        batch=Batch(global_=SAMPLES, micro=1), mesh=Mesh(dp_shard=2, tp=2),
        shard=Shard(zero=3, sequence_parallel=True), pipeline=Pipeline(stage_blocks=(2,)), execution=FP32,
    ),
    "zero 1, one micro-batch": Strategy(
        batch=Batch(global_=4, micro=1), mesh=Mesh(dp_shard=4), shard=Shard(zero=1),
        pipeline=Pipeline(stage_blocks=(2,)), execution=FP32,
    ),
    "zero 1, several": Strategy(
        batch=Batch(global_=SAMPLES, micro=1), mesh=Mesh(dp_shard=4), shard=Shard(zero=1),
        pipeline=Pipeline(stage_blocks=(2,)), execution=FP32,
    ),
    "zero 2 and replicas": Strategy(
        batch=Batch(global_=SAMPLES, micro=1), mesh=Mesh(dp_shard=2, dp_replicate=2), shard=Shard(zero=2),
        pipeline=Pipeline(stage_blocks=(2,)), execution=FP32,
    ),
    "zero 2": Strategy(
        batch=Batch(global_=SAMPLES, micro=1), mesh=Mesh(dp_shard=4), shard=Shard(zero=2),
        pipeline=Pipeline(stage_blocks=(2,)), execution=FP32, offload=Offload(optimizer=0.5),
    ),
    "zero 3 in a pipeline": Strategy(
        batch=Batch(global_=8, micro=1), mesh=Mesh(pp=2, dp_shard=2), shard=Shard(zero=3),
        pipeline=Pipeline(schedule="1f1b", stage_blocks=(1, 1)), execution=FP32,
    ),
    "half of the activations on the host": Strategy(
        batch=Batch(global_=4, micro=1), mesh=Mesh(dp_replicate=4), pipeline=Pipeline(stage_blocks=(2,)),
        execution=FP32, offload=Offload(activations=0.5),
    ),
    "cast without a rank to shard over": Strategy(
        batch=Batch(global_=SAMPLES, micro=1), mesh=Mesh(dp_replicate=4), pipeline=Pipeline(stage_blocks=(2,)),
        execution=replace(FP32, dtype="bf16"),
    ),
    "shares of a sequence, in halves of backwards": Strategy(
        batch=Batch(global_=SAMPLES, micro=2), mesh=Mesh(pp=2, cp=2), shard=Shard(zero=3),
        pipeline=Pipeline(schedule="zb1p", stage_blocks=(1, 1)), execution=FP32,
    ),
    "a pipeline, tensor parallel": Strategy(
        batch=Batch(global_=SAMPLES, micro=2), mesh=Mesh(pp=2, tp=2),
        pipeline=Pipeline(schedule="1f1b", stage_blocks=(1, 1)), execution=FP32,
    ),
}  # fmt: skip


def _planned(name: str, strategy: Strategy) -> tuple[Expander, Strategy]:
    example = EXAMPLES[name](4)
    graph = capture(example.module, keyword_inputs(example.module, example.inputs), name=name)
    expander = Expander(graph, load_cluster(CLUSTER))
    return expander, completed(expander, strategy)


def _on_meta(name: str) -> tuple[Example, torch.nn.Module]:
    with torch.device("meta"):
        example = EXAMPLES[name](4)
    return example, example.module


@pytest.mark.sweep(4)
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_what_a_dry_run_holds_and_sends_is_what_is_predicted(strategy: Strategy) -> None:
    expander, strategy = _planned("llama_with_labels", strategy)
    example, module = _on_meta("llama_with_labels")
    lowered = dry_run(
        module,
        example.inputs,
        strategy,
        blocks=example.blocks,
        level_sizes=(4,),
        alone=own_units(expander.graph),
    )
    assert not dist.is_initialized(), "the process is as it was before"
    for rank in compare(strategy, expander.program(strategy), lowered):
        for name, pair in rank.held_bytes.items():
            assert pair.lowered == pytest.approx(pair.predicted, rel=0.03), (name, rank)
        for axis, pair in rank.sent_bytes.items():
            assert pair.lowered == pytest.approx(pair.predicted, rel=0.05), (axis, rank)


def _traffic(rank: int, world_size: int, strategy: Strategy) -> tuple[Counter[Message], int]:
    """One real step's collectives and parameter bytes, of models that no all-to-all runs in."""
    example = EXAMPLES["mlp"](SAMPLES // strategy.mesh.data_parallel)
    model = parallelize(example.module, None, strategy, blocks=example.blocks, program=no_program)
    held = sum(p.detach().to_local().nbytes for p in model.parameters() if hasattr(p, "to_local"))
    axes = {model._run.mesh.group(a).group_name: a for a in ("dp_shard",)}
    with TrafficRecorder(axes) as recorder:
        model.step(example.inputs, example.targets, loss_fn=example.loss_fn)
    return Counter({m: c for m, c in recorder.found.items() if m.axis == "dp_shard"}), held


@pytest.mark.distributed
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_dry_run_sends_over_dp_shard_what_a_run_sends(gloo: Processes, zero: int) -> None:
    strategy = Strategy(
        batch=Batch(global_=SAMPLES, micro=1), mesh=Mesh(dp_shard=2), shard=Shard(zero=zero),
        pipeline=Pipeline(stage_blocks=(3,)), execution=FP32,
    )  # fmt: skip
    real, _ = gloo.run(2, _traffic, strategy=strategy)[0]
    example, module = _on_meta("mlp")
    (dry,) = dry_run(module, example.inputs, strategy, blocks=example.blocks)
    counted = Counter({m: c for m, c in dry.traffic.items() if m.axis == "dp_shard"})
    large = 64  # scalars and the loss's own reduction are not the model's units
    assert {m: c for m, c in counted.items() if m.size_bytes > large} == {
        m: c for m, c in real.items() if m.size_bytes > large
    }


@pytest.mark.parametrize("zero", [1, 2])
def test_halves_of_backward_passes_send_what_whole_ones_do(zero: int) -> None:
    found = []
    for schedule in ("1f1b", "zb1p"):
        strategy = Strategy(
            batch=Batch(global_=SAMPLES, micro=1), mesh=Mesh(pp=2, dp_shard=2), shard=Shard(zero=zero),
            pipeline=Pipeline(schedule=schedule, stage_blocks=(1, 2)), execution=FP32,
        )  # fmt: skip
        example, module = _on_meta("mlp")
        stages = dry_run(module, example.inputs, strategy, blocks=example.blocks)
        found.append([stage.traffic for stage in stages])
    assert found[0] == found[1]


def test_what_dtensor_computes_with_to_know_shapes_is_not_held() -> None:
    """A weight of two thousand rows that tp has halves of, which no rank ever holds whole."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(1024, 2048, bias=False))
    rule = TensorRule(module="0", params=(("weight", "shard(0)"),), outputs=("shard(-1)",))
    strategy = Strategy(
        batch=Batch(global_=1, micro=1), mesh=Mesh(tp=2), tensor=(rule,), execution=FP32,
        pipeline=Pipeline(stage_blocks=()),
    )  # fmt: skip
    (stage,) = dry_run(module, torch.zeros(1, 1024), strategy, blocks=())
    half = 4 * 1024 * 2048 // 2
    assert stage.parameter_bytes == half
    assert half <= stage.live["B"].peak < 1.05 * half  # the gradient


def test_optimizer_state_follows_the_optimizer_and_its_master_weights() -> None:
    def state(**execution: Any) -> int:
        example, module = _on_meta("mlp")
        strategy = Strategy(
            batch=Batch(global_=1, micro=1), pipeline=Pipeline(stage_blocks=(3,)),
            execution=Execution(dtype="bf16", param_dtype="bf16", grad_dtype="bf16", kernels="eager", **execution),
        )  # fmt: skip
        return dry_run(module, example.inputs, strategy, blocks=example.blocks)[0].optimizer_bytes

    numbers = sum(p.numel() for p in EXAMPLES["mlp"](1).module.parameters())
    assert state(optimizer="sgd", master_weights=False) == 0
    assert state(optimizer="sgd", master_weights=True) == 4 * numbers
    assert state(optimizer="sgd-momentum", master_weights=False) == 2 * numbers
    for name, master in (("sgd-momentum", False), ("sgd-momentum", True), ("adamw", False)):
        execution = Execution(optimizer=name, master_weights=master)
        predicted = optimizer_bytes_per_parameter(execution) * numbers
        assert state(optimizer=name, master_weights=master) == pytest.approx(predicted, rel=0.01)


def test_inputs_are_in_the_precision_that_the_parameters_are_planned_in() -> None:
    with torch.device("meta"):
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        encoder = torch.nn.TransformerEncoder(layer, 2)
    strategy = Strategy(
        batch=Batch(global_=2, micro=1), mesh=Mesh(pp=2), pipeline=Pipeline(schedule="gpipe", stage_blocks=(1, 1)),
        execution=Execution(kernels="eager"),
    )  # fmt: skip
    blocks = ("layers.0", "layers.1")
    first, _ = dry_run(encoder, torch.zeros(1, 8, 32), strategy, blocks=blocks)
    sent = {message.size_bytes for message in first.traffic if message.axis == "pp"}
    assert sent == {2 * 8 * 32}  # one sample in bf16, though the example is in fp32


class _CastsToItsWeight(nn.Module):
    """As transformers' vision models do."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.layer = nn.Conv2d(3, 8, 4), nn.Linear(8, 8)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        found = self.patches(image.to(self.patches.weight.dtype))
        made: torch.Tensor = self.layer(found.mean(dim=(2, 3)))
        return made


@pytest.mark.parametrize("zero", [1, 3])
def test_code_that_casts_to_a_weight_s_dtype_computes_in_the_one_it_is_gathered_in(zero: int) -> None:
    with torch.device("meta"):
        module = _CastsToItsWeight()
    strategy = Strategy(
        batch=Batch(global_=2, micro=1), mesh=Mesh(dp_shard=2), shard=Shard(zero=zero), pipeline=Pipeline(stage_blocks=()),
        execution=Execution(dtype="bf16", param_dtype="fp32", grad_dtype="fp32"),
    )  # fmt: skip
    (stage,) = dry_run(module, torch.zeros(1, 3, 8, 8), strategy, blocks=(), alone=("patches", "layer"))
    sent = {m.size_bytes for m in stage.traffic if m.op is CollectiveOp.ALL_GATHER}
    assert max(sent) == 2 * sum(p.numel() for p in nn.Conv2d(3, 8, 4).parameters())


def test_initial_values_are_not_needed() -> None:
    expander, strategy = _planned("vit", STRATEGIES["a pipeline, tensor parallel"])
    example, module = _on_meta("vit")  # whose initialisation reads what it draws
    lowered = dry_run(module, example.inputs, strategy, blocks=example.blocks, level_sizes=(4,))
    assert [stage.optimizer_bytes > 0 for stage in lowered] == [True, True]
    assert len(compare(strategy, expander.program(strategy), lowered)) == 2


class _Reads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y.sum() if float(y.sum()) > 0 else y.mean()


def test_a_forward_that_reads_values_is_refused_in_words() -> None:
    strategy = Strategy(batch=Batch(global_=1, micro=1), execution=replace(FP32))
    with pytest.raises(UserError, match="does not run on tensors without values"):
        dry_run(_Reads().to("meta"), torch.randn(1, 4), strategy, blocks=())
    assert not dist.is_initialized()


class _ReadsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] if float(gradients[0].sum()) > 0 else -gradients[0]


class _ReadsGradients(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _ReadsBackward.apply(self.layer(x)).sum()  # type: ignore[no-any-return]


def test_a_backward_that_reads_values_is_refused_in_words_with_its_line() -> None:
    strategy = Strategy(batch=Batch(global_=1, micro=1), execution=FP32)
    words = r"own: a dry run's tensors have no values, .*test_dryrun.py:\d+ in backward.*_local_scalar_dense.*torchrun"
    with pytest.raises(UserError, match=words), on_tensors_without_values("own"):
        dry_run(_ReadsGradients().to("meta"), torch.randn(1, 4), strategy, blocks=())


class _Idle(torch.nn.Module):
    """Four linear layers and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
        self.idle = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_parameters_without_gradients_are_lowered_as_any() -> None:
    strategy = Strategy(batch=Batch(global_=4, micro=1), mesh=Mesh(dp_replicate=4), execution=FP32)
    (stage,) = dry_run(_Idle().to("meta"), torch.randn(1, 4), strategy, blocks=())
    assert stage.gradient_bytes == 4 * 5 * (4 * 4 + 4)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("per_stage", [(), (1, 1, 0, 0, 0, 0, 0, 0)], ids=["alike", "two recompute"])
def test_stages_that_are_alike_are_run_once_and_hold_and_send_what_each_would(
    tmp_path: Path, per_stage: tuple[int, ...]
) -> None:
    settings = json.loads(Path("examples/configs/llama-tiny.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 8}))
    strategy = Strategy(
        batch=Batch(global_=SAMPLES, micro=1), mesh=Mesh(pp=4, dp_shard=2, tp=2), shard=Shard(zero=1),
        pipeline=Pipeline(schedule="interleaved-1f1b", virtual_stages=2, stage_blocks=(1,) * 8),
        recompute=Recompute(mode="none", per_stage=per_stage), execution=FP32,
    )  # fmt: skip

    loaded = load_model(f"hf:{tmp_path}", model_args={}, seq_len=32)
    graph = capture(loaded.module, loaded.example_inputs, name=loaded.name)
    whole = completed(Expander(graph, load_cluster("cpu-gloo:1x16")), strategy)
    kinds = {link.path: link.block for link in graph.chain if link.repeated}

    def lowered(*, shared: bool) -> tuple[LoweredStage, ...]:
        loaded = load_model(f"hf:{tmp_path}", model_args={}, seq_len=32)
        return dry_run(
            loaded.module, loaded.example_inputs, whole, blocks=list(kinds), level_sizes=(16,),
            kinds=kinds if shared else None,
        )  # fmt: skip

    ran: list[nn.Module] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dryrun, "lower_module", lambda stage, *a, **k: ran.append(stage) or lower_module(stage, *a, **k)
        )
        once = lowered(shared=True)
    assert len(ran) < 8
    each = lowered(shared=False)
    bare: dict[str, Any] = {"places": {}, "live": {}}
    assert [replace(stage, **bare) for stage in once] == [replace(stage, **bare) for stage in each]
    assert [stage.live["F"].kept for stage in once] == [stage.live["F"].kept for stage in each]
    assert [stage.live["B"].peak for stage in once] == [stage.live["B"].peak for stage in each]
    assert {place.module for place in each[5].places[max(each[5].places, key=lambda m: m.size_bytes)]}
