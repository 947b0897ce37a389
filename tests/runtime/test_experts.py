"""Expert parallelism: tokens travel to the ranks that hold their experts, and nothing else changes."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from autoparallel.errors import UserError
from autoparallel.planner.expand.axes import mesh_axes
from autoparallel.planner.strategy.types import Batch, Mesh, Strategy
from autoparallel.runtime.experts.parallel import can_share, check_experts
from autoparallel.runtime.lowering.lower import Dtypes
from autoparallel.runtime.ranks.accelerator import CPU
from autoparallel.runtime.ranks.places import expert_ranks
from autoparallel.runtime.start import parallelize
from autoparallel.runtime.tensor.questions import local
from tests.runtime.compare import TOLERANCE, build, compare, part, strategy_of
from tests.runtime.expert_models import EXPERT_EXAMPLES, LoopedExperts, routed
from tests.runtime.harness import Processes
from tests.runtime.pipelines import run_pipeline
from tests.runtime.shared import no_program

DTYPES = {"mixtral": "float32", "routed": "float64"}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "zero 1": ("routed", 2, {"dp_shard": 2, "ep": 2, "zero": 1, "micro_batches": 2}),
    "zero 3, full recomputation": ("routed", 2, {"dp_shard": 2, "ep": 2, "zero": 3, "recompute": "full"}),
    "shares of the tokens, experts whole": ("mixtral", 2, {"cp": 2}),
    "the same experts on two ranks": ("routed", 4, {"dp_shard": 4, "ep": 2, "zero": 2, "micro_batches": 2}),
    "over tp, replicated": ("routed", 4, {"dp_replicate": 2, "tp": 2, "ep": 2}),
    "over dp_shard, tp outermost": (
        "routed", 4, {
            "dp_shard": 2, "tp": 2, "ep": 4, "zero": 3, "order": ("tp", "dp_shard", "pp", "cp", "dp_replicate"),
        },
    ),
    "over cp and dp_shard": ("mixtral", 4, {"cp": 2, "dp_shard": 2, "ep": 4, "zero": 2, "recompute": "operators"}),
}  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_experts_on_several_ranks_give_the_gradients_of_one_process(gloo: Processes, case: str) -> None:
    name, ranks, options = CASES[case]
    found = gloo.run(ranks, compare, name=name, options=options, dtype=DTYPES[name])[0]
    limit = TOLERANCE[getattr(torch, DTYPES[name])]
    assert max(found.loss, found.gradient) <= limit, found


@pytest.mark.distributed
def test_a_split_backward_with_experts_gives_state_gradients_and_norm_of_one_process(gloo: Processes) -> None:
    pipeline = {"schedule": "zb1p", "stage_blocks": (1, 1)}
    options = {"pp": 2, "tp": 2, "ep": 2, "micro_batches": 2}
    arguments = {"name": "mixtral", "pipeline": pipeline, "options": options, "dtype": "float32", "layers": 2}
    found = gloo.run(4, run_pipeline, **arguments)[0]
    assert max(found.loss, found.gradient, found.norm, found.state) <= TOLERANCE[torch.float32], found
    assert not found.missing


def _lopsided(rank: int, world_size: int) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """A step in which no token chooses an expert of rank 1, beside one process; and the norm's difference."""
    example = build("routed", 4, torch.float64)
    for block in example.module.blocks:
        with torch.no_grad():
            block.router.bias[:2] += 100.0
    reference = build("routed", 4, torch.float64).module
    reference.load_state_dict(example.module.state_dict())
    strategy = strategy_of(example, dp_shard=2, ep=2, zero=3)
    model = parallelize(
        example.module, None, strategy, blocks=example.blocks, program=no_program, experts=example.experts
    )
    first = model.data_parallel_rank * 2
    inputs, targets = (part(batch, first, first + 2) for batch in (example.inputs, example.targets))
    model.step(inputs, targets, loss_fn=example.loss_fn)
    example.loss_fn(reference(example.inputs), example.targets).backward()
    wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    norm = model.clip_grad_norm_(0.01)
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    return float((norm - wanted).abs() / wanted), model.full_gradients(), gradients


@pytest.mark.distributed
def test_a_rank_whose_experts_nobody_chooses_takes_part_all_the_same(gloo: Processes) -> None:
    norm, gradients, wanted = gloo.run(2, _lopsided)[0]
    assert norm <= 1e-10
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, wanted[name], rtol=1e-10, atol=1e-14), name


def _cast_alone(
    rank: int, world_size: int, zero: int, mesh: dict[str, int]
) -> tuple[float, set[tuple[torch.dtype, int]]]:
    """Three micro-batches of experts that are cast, which this rank holds alone: how far gradients are from those of one process,
    and the dtypes and places in memory in which a layer found a parameter."""
    example = build("routed", 12, torch.float64)
    reference = build("routed", 12, torch.float64).module
    strategy = strategy_of(example, zero=zero, micro_batches=3, **mesh)
    model = parallelize(
        example.module, None, strategy, blocks=example.blocks, program=no_program, experts=example.experts,
        dtypes=Dtypes(compute=torch.float32, param=torch.float64, grad=torch.float64),
    )  # fmt: skip
    share = strategy.batch.micro * 3
    first = model.data_parallel_rank * share
    inputs, targets = (part(batch, first, first + share) for batch in (example.inputs, example.targets))
    seen: set[tuple[torch.dtype, int]] = set()
    layer = model.get_submodule(example.experts[0].path)
    layer.register_forward_pre_hook(
        lambda module, _: seen.add((module.up.dtype, local(module.up).data_ptr()))
    )
    model.step(inputs, targets, loss_fn=example.loss_fn)
    batch = slice(0, strategy.batch.global_)
    example.loss_fn(reference(example.inputs[batch]), example.targets[batch]).backward()
    found = model.full_gradients()
    pairs = [(found[name], p.grad) for name, p in reference.named_parameters()] if rank == 0 else []
    return max((float((a - b).norm() / b.norm()) for a, b in pairs), default=0.0), seen


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("zero", "mesh"),
    [
        (0, {"tp": 2, "ep": 2}),
        (1, {"dp_shard": 2, "ep": 2}),
        (2, {"dp_shard": 2, "ep": 2}),
        (3, {"dp_shard": 2, "ep": 2}),
    ],
)
def test_experts_of_one_rank_alone_are_cast_once_and_give_the_gradients_of_one_process(
    gloo: Processes, zero: int, mesh: dict[str, int]
) -> None:
    difference, seen = gloo.run(2, _cast_alone, zero=zero, mesh=mesh)[0]
    assert difference <= 1e-4
    assert {dtype for dtype, _ in seen} == {torch.float32}
    assert zero == 3 or len(seen) == 1, seen


def _filled(rank: int, world_size: int, file: str | None) -> list[dict[str, Tensor]]:
    """The whole state of a model on the meta device: read from a file and loaded twice as large, or initialised."""
    with torch.device("meta"):
        example = EXPERT_EXAMPLES["mixtral"](1)
    strategy = strategy_of(example, dp_shard=2, ep=2, zero=3)
    model = parallelize(
        example.module, None, strategy, blocks=example.blocks, program=no_program, weights=file,
        experts=example.experts,
    )  # fmt: skip
    held = model.get_parameter("model.layers.0.mlp.experts.down_proj")
    assert held.to_local().numel() * world_size == held.numel()
    states = [model.full_state_dict()]
    if file is not None:
        model.load_state_dict({name: 2 * tensor for name, tensor in load_file(file).items()}, strict=False)
        states.append(model.full_state_dict())
    return states


@pytest.mark.distributed
def test_shares_of_experts_are_read_initialised_and_loaded(gloo: Processes, tmp_path: Path) -> None:
    torch.manual_seed(4)
    module = EXPERT_EXAMPLES["mixtral"](1).module
    state = {n: t.contiguous() for n, t in module.state_dict().items() if n != "lm_head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    read, doubled = gloo.run(2, _filled, file=str(tmp_path / "model.safetensors"))[0]
    (initial,) = gloo.run(2, _filled, file=None)[0]
    for name, tensor in state.items():
        assert torch.equal(read[name], tensor), name
        assert torch.equal(doubled[name], 2 * tensor), name
        assert float(initial[name].std()) == pytest.approx(float(tensor.std()), rel=0.2), name
    experts = initial["model.layers.1.mlp.experts.down_proj"]
    assert len({float(expert.sum()) for expert in experts}) == 4, "no expert is another one's copy"


@pytest.mark.parametrize("order", permutations(("dp_shard", "cp", "tp")))
@pytest.mark.parametrize("ep", [2, 4, 8])
def test_ranks_that_share_experts_are_those_that_are_priced(order: tuple[str, ...], ep: int) -> None:
    sizes = Mesh(pp=2, dp_shard=2, cp=2, tp=4, ep=ep, order=("pp", "dp_replicate", *order))
    ranks = expert_ranks(sizes)
    assert ranks.shape == (2, 1, 16 // ep, ep)
    strategy = Strategy(batch=Batch(global_=2, micro=1), mesh=sizes)
    for dim, name in ((2, "expert_shard"), (3, "ep")):
        assert bool((np.diff(ranks, axis=dim) > 0).all()), "process groups count their ranks upwards"
        reached = {0}
        for axis in (axis for axis in mesh_axes(strategy) if axis.name == name):
            reached = {rank + axis.stride * n for rank in reached for n in range(axis.size)}
        first = np.moveaxis(ranks[0, 0], dim - 2, 0)[:, 0]
        assert set(first.tolist()) == reached, ranks


class Residual(LoopedExperts):
    """Adds the token itself, which then counts once for every choice that is sent elsewhere."""

    def forward(self, x: Tensor, by: Tensor, chosen: Tensor) -> Tensor:
        return x + super().forward(x, by, chosen)


class Softened(LoopedExperts):
    """Not in proportion to the weights."""

    def forward(self, x: Tensor, by: Tensor, chosen: Tensor) -> Tensor:
        return super().forward(x, by.softmax(dim=-1), chosen)


class Shifted(LoopedExperts):
    """Reads how many experts there are from somewhere that is not an attribute."""

    def forward(self, x: Tensor, by: Tensor, chosen: Tensor) -> Tensor:
        return super().forward(x, by, chosen + 8 - len(self.up))


@pytest.mark.parametrize("kind", [Residual, Softened, Shifted])
def test_experts_that_do_not_run_apart_are_refused_with_the_remedy(kind: type[nn.Module]) -> None:
    example = routed(2)
    example.module.blocks[1].experts = kind(8, 8)
    assert not can_share(example.module, example.experts, CPU)
    with pytest.raises(
        UserError, match=rf"mesh.ep = 2: blocks.1.experts \({kind.__name__}\).*set mesh.ep to 1"
    ):
        check_experts(example.module, Mesh(dp_shard=2, ep=2), example.experts, CPU)


@pytest.mark.parametrize("name", EXPERT_EXAMPLES)
def test_experts_that_run_apart_are_known_by_a_trial_without_their_values(name: str) -> None:
    with torch.device("meta"):
        example = EXPERT_EXAMPLES[name](1)
    found = check_experts(example.module, Mesh(dp_shard=2, ep=2), example.experts, CPU)
    assert [sharing.layer for sharing in found] == list(example.experts)
    count = "count" if name == "routed" else "num_experts"
    assert {sharing.counts for sharing in found} == {(("", count),)}, "not the width, which is as large"


def test_a_model_without_known_layers_of_experts_is_refused() -> None:
    example = routed(2)
    with pytest.raises(UserError, match=r"mesh.ep = 2: the model has no layer of experts; set mesh.ep to 1"):
        check_experts(example.module, Mesh(dp_shard=2, ep=2), (), CPU)
    with pytest.raises(UserError, match=r"mesh.ep = 3 does not divide the 8 experts of blocks.0.experts"):
        check_experts(example.module, Mesh(dp_shard=3, ep=3), example.experts, CPU)
