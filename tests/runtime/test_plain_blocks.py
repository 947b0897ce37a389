"""Blocks that a trial shows to run on plain tensors do, and give what DTensors give; the others stay as they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from autoparallel.planner.strategy.types import Batch, Mesh, Recompute, Shard, Strategy, TensorRule
from autoparallel.runtime.start import parallelize
from benchmarks.small_models import llama
from tests.runtime.compare import TOLERANCE, run_strategy
from tests.runtime.harness import Processes
from tests.runtime.models import EXAMPLES, llama_rules, rule
from tests.runtime.shared import no_program

pytestmark = pytest.mark.distributed

WIDTH, SAMPLES = 8, 4


class Half(nn.Module):
    """A sharded product, something in between, and the product that sums the shares."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), between
        nn.init.zeros_(self.down.bias)  # what is zero at first must not hide that it is added twice

    def forward(self, x: Tensor) -> Tensor:
        inner: Any = self.up(x)
        match self.between:
            case "by heads":  # of any number
                inner = inner.view(len(x), -1, 2).transpose(1, 2).relu().transpose(1, 2).reshape(len(x), -1)
            case "whole sizes":
                inner = inner.view(len(x), 2 * WIDTH // 2, 2).relu().view(len(x), 2 * WIDTH)
            case "over the shards":
                inner = inner.softmax(-1)
            case "dropout":
                inner = nn.functional.dropout(inner, 0.5)
        return x + self.down(inner)


class Halves(nn.Module):
    def __init__(self, between: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Half(between), Half(between))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


RULES = (
    rule("blocks.*.up", params={"weight": "shard(0)", "bias": "shard(0)"}, inputs={"input": "replicate"}),
    rule("blocks.*.down", "replicate", params={"weight": "shard(1)"}),
)


class _Seen(TorchFunctionMode):
    """Whether the products of a step got DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.dtensors: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            self.dtensors.append(isinstance(args[0], DTensor) or isinstance(args[1], DTensor))
        return func(*args, **(kwargs or {}))


def strategy_of(rules: Sequence[TensorRule], **parts: Any) -> Strategy:
    return Strategy(
        batch=Batch(global_=SAMPLES, micro=SAMPLES), mesh=Mesh(tp=2), tensor=tuple(rules),
        shard=Shard(sequence_parallel=parts.pop("sequence_parallel", False)), **parts,
    )  # fmt: skip


def steps(rank: int, world_size: int, between: str) -> tuple[bool, list[float], list[float]]:
    """Whether blocks run plain in the second step; the losses of three steps, and of three in one process."""
    torch.manual_seed(0)
    module, alone = Halves(between), Halves(between)
    alone.load_state_dict(module.state_dict())
    x = torch.randn(SAMPLES, WIDTH)
    strategy = strategy_of(RULES)
    blocks = ("blocks.0", "blocks.1")
    model = parallelize(module, None, strategy, blocks=blocks, program=no_program)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    found: list[list[float]] = [[], []]
    for _ in range(3):
        with _Seen() as seen:
            found[0].append(float(model.step({"x": x})))
        loss = alone(x)
        loss.backward()
        found[1].append(float(loss))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return not any(seen.dtensors), found[0], found[1]


@pytest.mark.parametrize(
    ("between", "plain"),
    [
        ("nothing", True),
        ("by heads", True),
        ("whole sizes", False),
        ("over the shards", False),
        ("dropout", False),
    ],
)
def test_a_block_runs_plain_where_its_shares_add_up_to_the_whole(
    gloo: Processes, between: str, plain: bool
) -> None:
    for found, losses, alone in gloo.run(2, steps, between=between):
        assert found is plain
        if between != "dropout":
            assert losses == pytest.approx(alone, rel=1e-5)


def kinds(rank: int, world_size: int, name: str, strategy: Strategy) -> list[bool]:
    """Of each kind of call, whether it runs plain."""
    example = EXAMPLES[name](SAMPLES)
    model = parallelize(example.module, None, strategy, blocks=example.blocks, program=no_program)
    model.step(example.inputs, example.targets, loss_fn=example.loss_fn)
    lowered: Any = model._run.lowered  # type: ignore[union-attr]
    return [plain is not None for plain in lowered.plain.found.values()]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("name", "sequence_parallel", "recompute", "plain"),
    [
        ("llama", False, "none", True),
        ("llama", True, "selective", True),
        ("qwen3", True, "full", True),
        ("mlp", False, "operators", True),
        ("vit", False, "none", False),  # by these rules a gradient is summed where nothing is pinned
    ],
)
def test_transformers_run_plain_and_learn_the_same(
    gloo: Processes, name: str, sequence_parallel: bool, recompute: str, plain: bool
) -> None:
    rules = EXAMPLES[name](SAMPLES).rules(sequence_parallel)
    strategy = strategy_of(rules, sequence_parallel=sequence_parallel, recompute=Recompute(mode=recompute))
    one, other = gloo.run(2, kinds, name=name, strategy=strategy)
    assert one == other, "ranks agree"
    assert any(one) is plain
    found = gloo.run(2, run_strategy, name=name, strategy=strategy, dtype="float64")[0]
    assert max(found.loss, found.gradient) <= TOLERANCE[torch.float64], found


def kinds_in(rank: int, world_size: int, dtype: torch.dtype) -> list[bool]:
    """As `kinds`, of a Llama of 256 features, 256 tokens and eight heads, tensor parallel as all of them are."""
    module, inputs = llama(2)
    module.to(dtype)
    strategy = Strategy(batch=Batch(global_=2, micro=2), mesh=Mesh(tp=2), tensor=tuple(llama_rules(False)))
    blocks = [f"model.layers.{i}" for i in range(4)]
    model = parallelize(module, None, strategy, blocks=blocks, program=no_program)
    model.step(inputs)
    lowered: Any = model._run.lowered  # type: ignore[union-attr]
    return [plain is not None for plain in lowered.plain.found.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_in_blocks_of_some_width_is_not_taken_for_another_answer(
    gloo: Processes, dtype: torch.dtype
) -> None:
    assert gloo.run(2, kinds_in, dtype=dtype) == [[True], [True]]


class Frozen(nn.Module):
    """Features that are not trained, and blocks of which some are in part."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(Half("nothing"), Half("nothing"), Half("nothing"))
        self.features.requires_grad_(False)
        self.blocks[0].up.requires_grad_(False)
        self.blocks[2].down.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.features(x)).square().mean()


def gradients(rank: int, world_size: int) -> tuple[set[bool], dict[str, Tensor], dict[str, Tensor]]:
    """Which blocks run plain; the gradients, and those in one process."""
    torch.manual_seed(0)
    module, alone = Frozen(), Frozen()
    alone.load_state_dict(module.state_dict())
    x = torch.randn(SAMPLES, WIDTH)
    whole = rule("features", "replicate")
    model = parallelize(
        module,
        None,
        strategy_of((whole, *RULES)),
        blocks=[f"blocks.{i}" for i in range(3)],
        program=no_program,
    )
    model.step({"x": x})
    alone(x).backward()
    lowered: Any = model._run.lowered  # type: ignore[union-attr]
    own = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    return {plain is not None for plain in lowered.plain.found.values()}, model.full_gradients(), own


def test_a_trial_serves_blocks_that_freeze_other_parameters(gloo: Processes) -> None:
    """The first block gets features that want no gradient, so that nothing of the trial must hang on that."""
    plain, found, alone = gloo.run(2, gradients)[0]
    assert plain == {True}
    assert found.keys() == alone.keys()
    for name, gradient in alone.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}")
