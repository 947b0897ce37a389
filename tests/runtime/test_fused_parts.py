"""Fused projections under tensor parallelism: heads sharded part by part, layouts as the user knows them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoparallel.planner.strategy.types import TensorRule
from autoparallel.runtime.lowering.lower import Dtypes
from autoparallel.runtime.start import parallelize
from autoparallel.runtime.tensor.questions import local
from autoparallel.runtime.torch_private import knows_parts
from tests.runtime.compare import TOLERANCE, compare, largest_difference, part, reference_step, strategy_of
from tests.runtime.harness import Processes
from tests.runtime.models import EXAMPLES, Example, rule
from tests.runtime.shared import no_program

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not knows_parts(), reason="torch 2.12 or newer"),
]

WIDTH, HEADS = 16, 4


class FusedAttention(nn.Module):
    """Query, key and value by one `Linear`, told apart by a view (as in timm), by `chunk`, or by slices (as in Phi-3)."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.qkv, self.proj, self.by = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), by

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        made = self.qkv(x)
        if self.by == "view":
            parts = made.view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            parts = tuple(
                p.view(batch, length, HEADS, -1).transpose(1, 2)
                for p in (
                    made.chunk(3, dim=-1)
                    if self.by == "chunk"
                    else (made[..., :WIDTH], made[..., WIDTH : 2 * WIDTH], made[:, :, 2 * WIDTH :])
                )
            )
        y = F.scaled_dot_product_attention(*parts)
        return x + self.proj(y.transpose(1, 2).reshape(batch, length, -1))


def fused(batch: int, by: str = "chunk") -> Example:
    return Example(
        module=nn.Sequential(*(FusedAttention(by) for _ in range(2))),
        blocks=("0", "1"),
        inputs=(torch.randn(batch, 6, WIDTH),),
        targets=torch.randn(batch, 6, WIDTH),
        loss_fn=F.mse_loss,
        rules=lambda _: fused_rules(),
    )


def fused_rules() -> list[TensorRule]:
    parts = {"weight": "shard(0, strided 3)", "bias": "shard(0, strided 3)"}
    return [
        rule("*.qkv", params=parts, inputs={"input": "replicate"}),
        rule("*.proj", "replicate", params={"weight": "shard(1)"}),
    ]


EXAMPLES["fused"] = fused
EXAMPLES["fused_by_view"] = lambda batch: fused(batch, "view")
EXAMPLES["fused_by_slice"] = lambda batch: fused(batch, "slice")

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (2, {"tp": 2, "micro_batches": 2}),
    "full recomputation": (2, {"tp": 2, "recompute": "full"}),
    "zero 3": (4, {"tp": 2, "dp_shard": 2, "zero": 3, "recompute": "selective"}),
    "zero 1": (4, {"tp": 2, "dp_shard": 2, "zero": 1, "micro_batches": 2}),
}


def _compare(rank: int, world_size: int, name: str, options: dict[str, Any]) -> Any:
    """`compare`, where this file's models are known."""
    return compare(rank, world_size, name, options, "float64")


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("ranks", "options"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", ["fused", "fused_by_view", "fused_by_slice"])
def test_fused_projections_give_the_gradients_of_one(
    gloo: Processes, name: str, ranks: int, options: dict[str, Any]
) -> None:
    found = gloo.run(ranks, _compare, name=name, options=options)[0]
    assert max(found.loss, found.gradient) <= TOLERANCE[torch.float64], found


def _in_low_precision(rank: int, world_size: int, options: dict[str, Any]) -> tuple[float, str]:
    """bf16 arithmetic over float32 parameters, against float32 in one process."""
    strategy = strategy_of(fused(1), **options)
    torch.manual_seed(7)
    example = fused(strategy.batch.global_)
    original = copy.deepcopy(example.module)
    dtypes = Dtypes(compute=torch.bfloat16, param=torch.float32, grad=torch.float32)
    model = parallelize(
        example.module, None, strategy, blocks=example.blocks, program=no_program, dtypes=dtypes
    )
    share = strategy.batch.micro * strategy.micro_batches
    first = model.data_parallel_rank * share
    mine, wanted = (
        part(tensors, first, first + share) for tensors in (example.inputs, example.targets.bfloat16())
    )
    model.step(mine, wanted, loss_fn=example.loss_fn)
    pieces = strategy.micro_batches * strategy.mesh.data_parallel
    reference_step(original, example, strategy.batch.micro, pieces)
    expected = {n: p.grad for n, p in original.named_parameters() if p.grad is not None}
    found = {n: g.float() for n, g in model.full_gradients().items()}
    return largest_difference(found, expected) if rank == 0 else (0.0, "")


@pytest.mark.parametrize("sizes", [{}, {"dp_replicate": 2}, {"dp_shard": 2, "zero": 3}], ids=str)
def test_a_fused_bias_which_no_unit_shards_is_computed_in_bf16_with_the_rest(
    gloo: Processes, sizes: dict[str, int]
) -> None:
    ranks = 4 if sizes else 2
    difference, name = gloo.run(ranks, _in_low_precision, options={"tp": 2, "micro_batches": 2, **sizes})[0]
    assert difference < 0.03, name  # bf16 has eight bits


def _saved_and_held(rank: int, world_size: int, shards: int, folder: Path) -> tuple[bool, int, bool]:
    torch.manual_seed(3)
    example = fused(2)
    before = {n: t.clone() for n, t in example.module.state_dict().items()}
    strategy = strategy_of(example, tp=2, dp_shard=shards, zero=3)
    model = parallelize(example.module, None, strategy, blocks=example.blocks, program=no_program)
    full = model.full_state_dict()
    same = all(torch.equal(full[n], before[n]) for n in full)
    dcp.save({"model": model}, checkpoint_id=folder)
    kept = {"model": {n: torch.zeros_like(t) for n, t in before.items()}}
    dcp.load(kept, checkpoint_id=folder, no_dist=True)
    same &= all(torch.equal(kept["model"][n], before[n]) for n in before)
    doubled = {n: 2 * t for n, t in before.items()}
    model.load_state_dict(doubled)
    dcp.save({"model": model}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dcp.load({"model": model}, checkpoint_id=folder)
    again = model.full_state_dict()
    loaded = all(torch.equal(again[n], doubled[n]) for n in again)
    return same, local(model.get_parameter("0.qkv.weight")).numel(), loaded


@pytest.mark.parametrize("shards", [1, 2])
def test_the_state_of_a_fused_projection_has_the_original_layout(
    gloo: Processes, shards: int, tmp_path: Path
) -> None:
    for same, held, loaded in gloo.run(2 * shards, _saved_and_held, shards=shards, folder=tmp_path):
        assert same
        assert loaded
        assert held == 3 * WIDTH * WIDTH // (2 * shards), "a rank holds its share only"


def _initialised(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    found = []
    for sizes in ({"tp": 2, "dp_shard": 2}, {"dp_replicate": 4}):
        torch.manual_seed(5)
        with torch.device("meta"):
            example = fused(2)
        strategy = strategy_of(example, zero=3, **sizes)
        model = parallelize(example.module, None, strategy, blocks=example.blocks, program=no_program)
        found.append(model.full_state_dict())
    return found


def test_parts_made_from_meta_tensors_hold_what_any_other_strategy_holds(gloo: Processes) -> None:
    sharded, whole = gloo.run(4, _initialised)[0]
    assert sharded.keys() == whole.keys()
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)


def _loaded(rank: int, world_size: int, path: Path) -> dict[str, Tensor]:
    with torch.device("meta"):
        example = fused(2)
    strategy = strategy_of(example, zero=3, tp=2, dp_shard=2)
    model = parallelize(
        example.module, None, strategy, blocks=example.blocks, program=no_program, weights=path
    )
    return model.full_state_dict()


def test_each_rank_reads_its_piece_of_each_part(gloo: Processes, tmp_path: Path) -> None:
    wanted = fused(1).module.state_dict()
    save_file(wanted, tmp_path / "model.safetensors")
    found = gloo.run(4, _loaded, path=tmp_path)[0]
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def _heads_stay_apart(rank: int, world_size: int) -> list[int]:
    example = fused(2)
    model = parallelize(
        example.module, None, strategy_of(example, tp=2), blocks=example.blocks, program=no_program
    )
    seen: list[int] = []
    before = F.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.extend((a.to_local() if isinstance(a, DTensor) else a).shape[1] for a in args)
        return before(*args, **kwargs)

    model.step(
        example.inputs, example.targets, loss_fn=example.loss_fn
    )  # with trials: see runtime.plain_blocks
    F.scaled_dot_product_attention = spy
    try:
        model.step(example.inputs, example.targets, loss_fn=example.loss_fn)
    finally:
        F.scaled_dot_product_attention = before
    return seen


def test_attention_sees_this_rank_s_heads(gloo: Processes) -> None:
    for seen in gloo.run(2, _heads_stay_apart):
        assert set(seen) == {HEADS // 2}, seen
