"""Peak memory and messages of strategies whose mechanisms were once priced otherwise: what is lowered, and what is predicted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.dryrun import DryRun, dry_run_of
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.load import LoadedModel, load_model
from autoparallel.planner.strategy.types import (
    Batch,
    Execution,
    GradSync,
    Mesh,
    Offload,
    Pipeline,
    Recompute,
    Shard,
    Strategy,
)
from autoparallel.profiles import load_cluster

pytestmark = pytest.mark.long

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
BF16 = Execution(
    dtype="bf16", param_dtype="bf16", grad_dtype="bf16", master_weights=False, kernels="eager", fsdp2=True,
    dtensor=True,
)  # fmt: skip
MIXTRAL = {
    "hidden_size": 256,
    "intermediate_size": 2048,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _loaded(name: str, config: str, seq_len: int) -> LoadedModel:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config)
        return load_model(f"hf:{folder}", model_args={}, seq_len=seq_len)


@cache
def _graph(name: str, config: str, seq_len: int, dtype: str) -> ModelGraph:
    loaded = _loaded(name, config, seq_len)
    return capture(loaded.module, loaded.example_inputs, name=name, dtype=dtype)


def dry_run(name: str, sizes: Mapping[str, object], strategy: Strategy, *, seq_len: int = 32) -> DryRun:
    """One of the models of `examples/configs` in other sizes, lowered by a strategy."""
    settings: dict[str, Any] = {**json.loads((CONFIGS / f"{name}.json").read_text()), **sizes}
    dtype = "bfloat16" if strategy.execution.dtype == "bf16" else "float32"
    of = (name, json.dumps(settings, sort_keys=True), seq_len)
    loaded, graph = _loaded(*of), _graph(*of, dtype)
    cluster = load_cluster(f"h100-sxm:1x{strategy.mesh.devices}")
    return dry_run_of(loaded.module, loaded.example_inputs, graph, cluster, strategy)


def assert_as_predicted(found: DryRun, *, rel: float = 0.01) -> None:
    for rank in found.ranks:
        assert rank.peak is not None
        assert rank.peak.bytes == pytest.approx(rank.predicted_peak_bytes, rel=rel), rank
    assert found.findings == (), [one.text for one in found.findings]


@pytest.mark.parametrize("ep", [1, 2])
def test_gradients_of_experts_pass_one_by_one_and_of_shared_ones_together(ep: int) -> None:
    """The gradient of a view of a parameter is the parameter's; a rank that shares experts hands them out before their layer runs."""
    strategy = Strategy(
        batch=Batch(global_=8, micro=2), mesh=Mesh(dp_replicate=2, tp=ep, ep=ep), execution=BF16,
        pipeline=Pipeline(stage_blocks=(2,)),
    )  # fmt: skip
    assert_as_predicted(dry_run("mixtral-8x7b", {**MIXTRAL, "num_hidden_layers": 2}, strategy))


def _sharded(mesh: Mesh, zero: int, micro_batches: int, execution: Execution = BF16, **more: Any) -> Strategy:
    share = mesh.dp_replicate * mesh.dp_shard
    pipeline = Pipeline(
        schedule="1f1b" if mesh.pp > 1 else "none", stage_blocks=(2,) if mesh.pp == 1 else (0, 2)
    )
    return Strategy(
        batch=Batch(global_=2 * share * micro_batches, micro=2), mesh=mesh, shard=Shard(zero=zero), execution=execution,
        pipeline=pipeline, **more,
    )  # fmt: skip


SUMMED = replace(BF16, grad_dtype="fp32")
CAST = replace(SUMMED, param_dtype="fp32")
LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HALVES = Pipeline(schedule="1f1b", stage_blocks=(1, 1))
UNITS = {
    "modules beside the blocks, each when it is through": ("llama-3.1-8b", _sharded(Mesh(dp_shard=2, pp=2), 3, 1)),
    "shares beside what is summed over replicas": ("llama-3.1-8b", _sharded(Mesh(dp_shard=2, dp_replicate=2), 3, 1)),
    "tied tensors, in the end": ("gpt2", _sharded(Mesh(dp_shard=2), 3, 1)),
    "tied tensors whose gradients are summed up in another dtype": ("gpt2", _sharded(Mesh(dp_shard=4), 1, 1, SUMMED)),
    "tied tensors of the last stage, when it is over": ("gpt2", replace(_sharded(Mesh(dp_shard=2, pp=2), 3, 1), pipeline=HALVES)),

    "parameters beside what they came in": ("bert-base", _sharded(Mesh(dp_shard=2, dp_replicate=2), 1, 1)),
    "gradients that are added at once": ("llama-3.1-8b", _sharded(Mesh(dp_shard=2), 1, 3)),
    "two micro-batches, of which the first has no gradients and the last lets parameters go": ("llama-3.1-8b", _sharded(Mesh(dp_shard=2), 2, 2)),
    "two micro-batches, of which the first finds sums that share its reduction's dtype": ("llama-3.1-8b", _sharded(Mesh(dp_shard=4), 2, 2, SUMMED)),
    "copies in the dtype of compute": ("llama-3.1-8b", _sharded(Mesh(dp_replicate=2), 0, 3, CAST)),
    "copies that go in the last micro-batch, when gradients of the first are there": ("llama-3.1-8b", _sharded(Mesh(pp=2), 0, 2, CAST)),
    "copies that stay, beside gradients that are there": ("llama-3.1-8b", _sharded(Mesh(pp=2), 0, 4, CAST)),
    "experts inside a block of which products are kept": ("mixtral-8x7b", _sharded(Mesh(dp_shard=4, ep=2), 3, 1, recompute=Recompute(mode="operators"))),
    "experts of one rank alone, cast for a step": ("mixtral-8x7b", _sharded(Mesh(dp_shard=2, ep=2), 1, 4, CAST)),
    "experts of one rank alone, cast for a pass": ("mixtral-8x7b", _sharded(Mesh(dp_shard=2, ep=2), 3, 3, CAST)),
    "experts of one rank alone, over tp": ("mixtral-8x7b", _sharded(Mesh(tp=2, ep=2), 0, 4, CAST)),
    "experts inside a block": ("mixtral-8x7b", _sharded(Mesh(dp_shard=4, ep=2), 3, 1, recompute=Recompute(mode="full"))),
}  # fmt: skip


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("name", "strategy"), UNITS.values(), ids=UNITS.keys())
def test_units_of_fsdp2_hold_what_is_predicted(name: str, strategy: Strategy) -> None:
    sizes = {
        "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 8192},
        "bert-base": {"num_hidden_layers": 2, "vocab_size": 512},
        "mixtral-8x7b": {**MIXTRAL, "num_hidden_layers": 3},
        "llama-3.1-8b": {**LLAMA, "vocab_size": 8192},
    }[name]
    if name == "mixtral-8x7b":
        strategy = replace(strategy, pipeline=Pipeline(stage_blocks=(3,)))
    found = dry_run(name, sizes, strategy)
    assert_as_predicted(found, rel=0.025)


def _split(
    mesh: Mesh, zero: int, schedule: str, execution: Execution, blocks: tuple[int, ...], **more: Any
) -> Strategy:
    """Eight micro-batches; V-shaped schedules have two stages a rank."""
    pipeline = Pipeline(schedule=schedule, virtual_stages=len(blocks) // mesh.pp, stage_blocks=blocks)
    return replace(_sharded(mesh, zero, 8, execution), pipeline=pipeline, **more)


HALVES_OF_BACKWARDS = {
    "gradients of weights, one after the other": ("llama-3.1-8b", _split(Mesh(pp=2), 0, "zb1p", BF16, (1, 2))),
    "units, each reduced when it has all of its gradients": ("llama-3.1-8b", _split(Mesh(pp=2, dp_shard=2), 2, "zbv", SUMMED, (0, 1, 1, 1))),
    "units that are cast": ("llama-3.1-8b", _split(Mesh(pp=2), 0, "zb1p", CAST, (1, 2))),
    "units that are cast, some backwards whole": ("llama-3.1-8b", _split(Mesh(pp=2), 0, "dualpipev", CAST, (0, 1, 1, 1))),
    "tensors in shares, nothing freed before the second half": ("llama-3.1-8b", _split(Mesh(pp=2, tp=2), 0, "zb1p", BF16, (1, 2))),
    "attention that runs again, of whose weights nothing is": ("llama-3.1-8b", _split(Mesh(pp=2, tp=2), 0, "zb1p", BF16, (1, 2), recompute=Recompute(mode="selective"))),
    "rows of a sequence, keys gone after first halves": ("llama-3.1-8b", _split(Mesh(pp=2, cp=2), 1, "zb1p", CAST, (1, 2))),
    "experts": ("mixtral-8x7b", _split(Mesh(pp=2), 0, "zbv", BF16, (0, 1, 1, 1))),
    "units that are gathered again for second halves": ("mixtral-8x7b", _split(Mesh(pp=2, dp_shard=2), 3, "zbv", BF16, (0, 1, 1, 1))),
    "first halves, beside which nothing is reduced, and units with norms": ("llama-3.1-8b", _split(Mesh(pp=2, dp_shard=2), 3, "zb1p", BF16, (1, 2))),
    "gradients copied in second halves, the first stage's a whole pass": ("llama-3.1-8b", _split(Mesh(pp=2, cp=2, tp=2), 3, "zb1p", BF16, (1, 2))),
    "whole gradients, reduced when the step ends": ("llama-3.1-8b", _split(Mesh(pp=2, dp_shard=2), 1, "zb1p", SUMMED, (1, 2), recompute=Recompute(mode="full"))),
    "whole gradients, whose shares replicas sum up": ("llama-3.1-8b", _split(Mesh(pp=2, dp_shard=2, dp_replicate=2), 1, "zb1p", CAST, (1, 2), recompute=Recompute(mode="full"))),
}  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("name", "strategy"), HALVES_OF_BACKWARDS.values(), ids=HALVES_OF_BACKWARDS.keys())
def test_backwards_in_two_halves_hold_and_send_what_is_predicted(name: str, strategy: Strategy) -> None:
    sizes = MIXTRAL if name == "mixtral-8x7b" else {**LLAMA, "vocab_size": 8192}
    found = dry_run(name, {**sizes, "num_hidden_layers": 3}, strategy)
    assert_as_predicted(found, rel=0.03)


def test_units_that_second_halves_need_nothing_of_are_not_gathered_for_them() -> None:
    strategy = _split(Mesh(pp=2, dp_shard=4), 3, "zbv", BF16, (1, 1, 1, 1))
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 256}
    assert_as_predicted(dry_run("gpt2", sizes, strategy, seq_len=128), rel=0.03)


class _Encoder(nn.Module):
    """Torch's own encoder layers, whose attention reads its weights itself, linear layers between (`shared`), and one behind them."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.between = nn.Linear(64, 64) if shared else nn.Identity()
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return self.head(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("shared", [False, True])
def test_what_cannot_be_put_off_stays_whole_until_second_halves(*, shared: bool) -> None:
    """Of the first stage, which received nothing that wants a gradient, all of it; of the others, and gradients that arrived: those
    of layers that could put theirs off by themselves, too."""
    inputs = (torch.zeros(2, 64, 64, device="meta"),)
    with torch.device("meta"):
        model = _Encoder(shared=shared)
    graph = capture(model, inputs, name="encoder", dtype="bfloat16")
    strategy = _split(Mesh(pp=3), 0, "zb1p", BF16, (1, 1, 1))
    found = dry_run_of(model, inputs, graph, load_cluster("h100-sxm:1x3"), strategy)
    assert_as_predicted(found, rel=0.025)


def test_what_a_stage_was_handed_stays_and_what_it_hands_on_does_not() -> None:
    """Of a second stage that holds all micro-batches at once; a first one with embeddings alone is priced as if it kept positions."""
    strategy = replace(
        _sharded(Mesh(pp=2), 0, 8), pipeline=Pipeline(schedule="gpipe", stage_blocks=(0, 2)), batch=Batch(global_=32, micro=4),
    )  # fmt: skip
    found = dry_run("llama-3.1-8b", {**LLAMA, "vocab_size": 512}, strategy, seq_len=256)
    first, second = found.ranks
    assert first.peak is not None
    assert second.peak is not None
    assert first.peak.bytes <= first.predicted_peak_bytes
    assert second.peak.bytes == pytest.approx(second.predicted_peak_bytes, rel=0.01)


def test_state_on_the_host_is_that_of_whole_tensors() -> None:
    """An embedding alone on its rank is more than half of what there is."""
    strategy = replace(
        _sharded(Mesh(pp=2), 0, 4), pipeline=Pipeline(schedule="1f1b", stage_blocks=(0, 2)), offload=Offload(optimizer=0.5),
    )  # fmt: skip
    found = dry_run("llama-3.1-8b", {**LLAMA, "vocab_size": 8192}, strategy)
    assert_as_predicted(found, rel=0.03)
    first, _ = found.ranks
    state = first.held_bytes["optimizer"]
    assert state.lowered == pytest.approx(state.predicted, rel=1e-3)
    assert state.predicted > 0


def test_logits_that_tp_gathers_along_their_last_dim_are_copied_whole() -> None:
    strategy = Strategy(
        batch=Batch(global_=16, micro=8), mesh=Mesh(tp=4), execution=BF16, shard=Shard(sequence_parallel=True),
        pipeline=Pipeline(stage_blocks=(2,)),
    )  # fmt: skip
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "head_dim": 16,
        "vocab_size": 8192,
    }
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "layer_types": ["full_attention"] * 2}
    assert_as_predicted(dry_run("gemma-2-9b", sizes, strategy), rel=0.03)


def test_unfused_attention_keeps_its_operands_in_32_bits() -> None:
    unfused = replace(BF16, attention="unfused")
    strategy = Strategy(
        batch=Batch(global_=8, micro=4), mesh=Mesh(), execution=unfused, pipeline=Pipeline(stage_blocks=(3,))
    )
    sizes = {**LLAMA, "num_hidden_layers": 3, "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256}
    assert_as_predicted(dry_run("llama-3.1-8b", sizes, strategy, seq_len=16), rel=0.03)


def test_relative_positions_are_not_cut_as_tokens_are() -> None:
    """Under cp every rank looks all of them up, and takes its queries' rows: nothing is sent for them."""
    sizes = {
        "num_layers": 2,
        "num_decoder_layers": 2,
        "d_model": 64,
        "d_ff": 128,
        "num_heads": 4,
        "d_kv": 16,
        "vocab_size": 512,
    }
    strategy = Strategy(
        batch=Batch(global_=4, micro=2), mesh=Mesh(cp=2), execution=BF16, pipeline=Pipeline(stage_blocks=(4,))
    )
    (rank,) = dry_run("t5-base", sizes, strategy).ranks
    assert rank.sent_bytes["cp"].lowered == pytest.approx(rank.sent_bytes["cp"].predicted, rel=1e-3)


WHOLE_KEYS = {
    "a value that is a view of a product, and grouped heads": ("llama-3.1-8b", Mesh(cp=2, tp=2), Recompute()),
    "attention runs again": ("llama-3.1-8b", Mesh(cp=4), Recompute(mode="selective")),
    "keys are gathered again": ("llama-3.1-8b", Mesh(cp=4), Recompute(mode="operators")),
    "queries, keys and values that one product makes": ("gpt2", Mesh(cp=4), Recompute()),
}  # fmt: skip


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("name", "mesh", "recompute"), WHOLE_KEYS.values(), ids=WHOLE_KEYS.keys())
def test_attention_of_shares_keeps_whole_keys_and_values_and_no_mask(
    name: str, mesh: Mesh, recompute: Recompute
) -> None:
    execution = replace(BF16, dropout=0.1) if name == "gpt2" else BF16
    strategy = Strategy(
        batch=Batch(global_=2, micro=1), mesh=mesh, execution=execution, recompute=recompute,
        pipeline=Pipeline(stage_blocks=(2,)),
    )  # fmt: skip
    sizes = {
        "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256},
        "llama-3.1-8b": {**LLAMA, "num_hidden_layers": 2, "vocab_size": 256, "head_dim": 16},
    }[name]
    assert_as_predicted(dry_run(name, sizes, strategy, seq_len=1024), rel=0.015)


SERVED = {
    "beside the last passes": ("llama-3.1-8b", Mesh(dp_replicate=2), Pipeline(stage_blocks=(4,)), CAST),
    "stage after stage": (
        "llama-3.1-8b", Mesh(pp=2, dp_replicate=2), Pipeline(schedule="interleaved-1f1b", virtual_stages=2, stage_blocks=(1, 1, 1, 1)), BF16,
    ),
    "in second halves": ("llama-3.1-8b", Mesh(pp=2, dp_replicate=2), Pipeline(schedule="zb1p", stage_blocks=(2, 2)), CAST),
    "experts apart": ("mixtral-8x7b", Mesh(dp_replicate=2, tp=2, ep=2), Pipeline(stage_blocks=(4,)), BF16),
}  # fmt: skip


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("name", "mesh", "pipeline", "execution"), SERVED.values(), ids=SERVED.keys())
def test_what_reductions_by_way_of_servers_receive_stands_beside_gradients(
    name: str, mesh: Mesh, pipeline: Pipeline, execution: Execution
) -> None:
    strategy = Strategy(
        batch=Batch(global_=16, micro=2), mesh=mesh, execution=execution, pipeline=pipeline,
        grad_sync=GradSync(algorithm="parameter-server", bucket_mib=0.25),
    )  # fmt: skip
    sizes = MIXTRAL if name == "mixtral-8x7b" else {**LLAMA, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048}  # fmt: skip
    assert_as_predicted(dry_run(name, {**sizes, "num_hidden_layers": 4}, strategy), rel=0.03)


def test_a_second_half_that_runs_all_of_a_stage_again_sends_it_again() -> None:
    strategy = _split(Mesh(pp=2, tp=2), 0, "zb1p", CAST, (1, 1), recompute=Recompute(mode="full"))
    for rank in dry_run("llama-3.1-8b", {**LLAMA, "num_hidden_layers": 2}, strategy).ranks:
        assert rank.sent_bytes["tp"].lowered == rank.sent_bytes["tp"].predicted


def test_a_rank_adds_up_its_copies_of_a_tied_gradient_before_it_sends_it() -> None:
    """T5's table is on both stages of the first rank, and on one of the second."""
    sizes = {
        "num_layers": 2,
        "num_decoder_layers": 2,
        "d_model": 64,
        "num_heads": 4,
        "d_kv": 16,
        "d_ff": 128,
        "vocab_size": 8192,
    }
    strategy = _split(Mesh(pp=2), 0, "zbv", BF16, (1, 1, 1, 1))
    for rank in dry_run("t5-base", sizes, strategy).ranks:
        assert rank.sent_bytes["pp"].lowered == pytest.approx(rank.sent_bytes["pp"].predicted, rel=0.1), rank


def test_the_last_reduction_of_a_micro_batch_is_over_before_the_next_pass() -> None:
    """As it is priced: nothing that was reduced waits in memory beside other passes."""
    pipeline = Pipeline(schedule="gpipe", stage_blocks=(0, 2))
    strategy = replace(
        _sharded(Mesh(pp=2, cp=2), 3, 2, CAST), pipeline=pipeline, batch=Batch(global_=4, micro=2)
    )
    assert_as_predicted(dry_run("qwen2-7b", {**LLAMA, "vocab_size": 8192}, strategy), rel=0.03)


def test_parts_of_norms_gradients_that_are_cast_are_summed_in_every_micro_batch() -> None:
    strategy = Strategy(
        batch=Batch(global_=12, micro=2), mesh=Mesh(tp=2), execution=CAST, shard=Shard(sequence_parallel=True),
        pipeline=Pipeline(stage_blocks=(2,)),
    )  # fmt: skip
    (rank,) = dry_run("llama-3.1-8b", {**LLAMA, "vocab_size": 512}, strategy).ranks
    assert rank.sent_bytes["tp"].lowered == rank.sent_bytes["tp"].predicted


def test_parts_of_norms_gradients_are_summed_over_tp_whenever_gradients_are_reduced() -> None:
    strategy = Strategy(
        batch=Batch(global_=12, micro=2), mesh=Mesh(dp_shard=2, tp=2), execution=BF16,
        shard=Shard(zero=2, sequence_parallel=True), pipeline=Pipeline(stage_blocks=(2,)),
    )  # fmt: skip
    (rank,) = dry_run("llama-3.1-8b", {**LLAMA, "vocab_size": 512}, strategy).ranks
    assert rank.sent_bytes["tp"].lowered == rank.sent_bytes["tp"].predicted
