from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autoparallel.errors import UserError
from autoparallel.planner.strategy.types import Batch, Mesh, Offload, Pipeline, Recompute, Shard, TensorRule
from autoparallel.runtime.lowering.lower import Dtypes
from autoparallel.runtime.start import parallelize
from tests.runtime.compare import build, largest_difference, part, reference_step, strategy_of
from tests.runtime.harness import Processes
from tests.runtime.models import Example, Mlp
from tests.runtime.shared import no_program

pytestmark = pytest.mark.distributed


def _pair(
    name: str, options: dict[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[Any, nn.Module, Example]:
    """The parallel model, the original, and the example with the global batch."""
    strategy = strategy_of(build(name, 1, dtype), **options)
    example = build(name, strategy.batch.global_, dtype)
    original = copy.deepcopy(example.module)
    model = parallelize(example.module, None, strategy, blocks=example.blocks, program=no_program)
    return model, original, example


def _mine(model: Any, example: Example) -> tuple[Any, Any]:
    share = model.strategy.batch.micro * model.strategy.micro_batches
    first = model.data_parallel_rank * share
    return part(example.inputs, first, first + share), part(example.targets, first, first + share)


def _expected(model: Any, original: nn.Module, example: Example) -> dict[str, torch.Tensor]:
    strategy = model.strategy
    pieces = strategy.micro_batches * strategy.mesh.data_parallel
    reference_step(original, example, strategy.batch.micro, pieces)
    return {n: p.grad for n, p in original.named_parameters() if p.grad is not None}


def _steps_without_zeroing(rank: int, world_size: int, options: dict[str, Any]) -> float:
    model, original, example = _pair("mlp", options)
    for _ in range(2):
        model.step(*_mine(model, example), loss_fn=example.loss_fn)
        expected = _expected(model, original, example)
    found = model.full_gradients()
    return largest_difference(found, expected)[0] if rank == 0 else 0.0


@pytest.mark.parametrize(
    "options",
    [
        {"dp_replicate": 2, "micro_batches": 2},
        {"dp_shard": 2, "zero": 1, "micro_batches": 2},
        {"dp_shard": 2, "zero": 3},
        {"tp": 2, "micro_batches": 2},
    ],
)
def test_steps_add_to_gradients_that_are_there(gloo: Processes, options: dict[str, Any]) -> None:
    assert max(gloo.run(2, _steps_without_zeroing, options=options)) < 1e-12


def _call_and_backward(rank: int, world_size: int, options: dict[str, Any]) -> float:
    model, original, example = _pair("llama", options, torch.float32)
    inputs, targets = _mine(model, example)
    output = model(**inputs)
    assert not isinstance(output.logits, torch.distributed.tensor.DTensor)
    example.loss_fn(output, targets).backward()
    expected = _expected(model, original, example)
    found = model.full_gradients()
    return largest_difference(found, expected)[0] if rank == 0 else 0.0


@pytest.mark.parametrize(
    "options", [{"dp_replicate": 2}, {"dp_shard": 2, "zero": 2}, {"tp": 2, "sequence_parallel": True}]
)
def test_the_module_can_be_called_and_trained_without_step(gloo: Processes, options: dict[str, Any]) -> None:
    assert max(gloo.run(2, _call_and_backward, options=options)) < 1e-5


def _interface(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    model, original, example = _pair("llama", options, torch.float32)
    assert isinstance(model, type(original))
    assert list(model.state_dict()) == list(original.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in original.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in original.named_modules()]
    assert inspect.signature(model.forward) == inspect.signature(original.forward)
    assert model.lm_head.weight is model.model.embed_tokens.weight, "tied weights stay tied"
    assert not model.eval().model.layers[0].training
    assert model.train().model.layers[0].training
    state = model.full_state_dict()
    if rank == 0:
        assert list(state) == list(original.state_dict())
        assert all(torch.equal(state[n], value) for n, value in original.state_dict().items())
    else:
        assert state == {}
    model.load_state_dict(model.state_dict())
    twice = {n: 2 * value for n, value in original.state_dict().items()}
    model.load_state_dict(twice)  # a whole state is cut to this rank's share
    original.load_state_dict(twice)
    with torch.no_grad():
        inputs = {"input_ids": example.inputs["input_ids"]}
        torch.testing.assert_close(model(**inputs).logits, original(**inputs).logits, rtol=1e-5, atol=1e-6)
    return {"rank": model.data_parallel_rank, "size": model.data_parallel_size}


@pytest.mark.parametrize(
    ("options", "shares"),
    [({"dp_replicate": 2}, 2), ({"dp_shard": 2, "zero": 3}, 2), ({"tp": 2, "recompute": "full"}, 1)],
)
def test_names_state_and_signature_stay_the_originals(
    gloo: Processes, options: dict[str, Any], shares: int
) -> None:
    found = gloo.run(2, _interface, options=options)
    assert {f["size"] for f in found} == {shares}
    assert {f["rank"] for f in found} == set(range(shares))


def _clip(rank: int, world_size: int, options: dict[str, Any]) -> tuple[float, float, float]:
    model, original, example = _pair("gpt2", options)
    model.step(*_mine(model, example), loss_fn=example.loss_fn)
    _expected(model, original, example)
    norm = model.clip_grad_norm_(0.1)
    expected = nn.utils.clip_grad_norm_(original.parameters(), 0.1)
    found = model.full_gradients()
    clipped = {n: p.grad for n, p in original.named_parameters()}
    difference = largest_difference(found, clipped)[0] if rank == 0 else 0.0
    return norm.item(), expected.item(), difference


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "options",
    [
        {"dp_replicate": 2, "dp_shard": 2, "zero": 2},
        {"dp_shard": 2, "tp": 2, "zero": 3, "sequence_parallel": True},
        {"dp_replicate": 2, "tp": 2},
    ],
)
def test_clipping_takes_the_norm_over_every_axis(gloo: Processes, options: dict[str, Any]) -> None:
    for norm, expected, difference in gloo.run(4, _clip, options=options):
        assert norm == pytest.approx(expected, rel=1e-10)
        assert difference < 1e-10


def _adamw(rank: int, world_size: int, options: dict[str, Any]) -> float:
    model, original, example = _pair("mlp", options)
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2)) for m in (model, original)]
    for _ in range(3):
        for _, optimizer in pairs:
            optimizer.zero_grad()
        model.step(*_mine(model, example), loss_fn=example.loss_fn)
        _expected(model, original, example)
        for _, optimizer in pairs:
            optimizer.step()
    state = model.full_state_dict()
    wanted = original.state_dict()
    return max((state[n] - wanted[n]).abs().max().item() for n in wanted) if rank == 0 else 0.0


def test_adamw_on_shards_ends_at_the_parameters_of_one_process(gloo: Processes) -> None:
    options = {"dp_shard": 2, "tp": 2, "zero": 2, "micro_batches": 2}
    assert max(gloo.run(4, _adamw, options=options)) < 1e-9


def _low_precision(rank: int, world_size: int, options: dict[str, Any]) -> tuple[float, str, str]:
    """bf16 arithmetic with float32 parameters and gradients, against float32 in one process."""
    strategy = strategy_of(build("mlp", 1, torch.float32), **options)
    example = build("mlp", strategy.batch.global_, torch.float32)
    original = copy.deepcopy(example.module)
    dtypes = Dtypes(compute=torch.bfloat16, param=torch.float32, grad=torch.float32)
    model = parallelize(
        example.module, None, strategy, blocks=example.blocks, program=no_program, dtypes=dtypes
    )
    model.step(*_mine(model, example), loss_fn=example.loss_fn)
    expected = _expected(model, original, example)
    gradients = model.full_gradients()
    parameter = next(iter(model.parameters()))
    difference = largest_difference(gradients, expected)[0] if rank == 0 else 0.0
    return difference, str(parameter.dtype), str(parameter.grad.dtype)


@pytest.mark.parametrize("options", [{"dp_replicate": 2}, {"dp_shard": 2, "zero": 3}])
def test_compute_in_bf16_keeps_float32_parameters_and_gradients(
    gloo: Processes, options: dict[str, Any]
) -> None:
    for difference, parameter, gradient in gloo.run(2, _low_precision, options=options):
        assert difference < 0.2  # bf16 has eight bits, and the scalars' gradients cancel
        assert (parameter, gradient) == ("torch.float32", "torch.float32")


def _wide_gradients(rank: int, world_size: int) -> float:
    """bf16 parameters whose gradients over many micro-batches are accumulated and reduced in float32."""
    options = {"dp_replicate": 2, "micro": 1, "micro_batches": 64}
    strategy = strategy_of(build("mlp", 1, torch.float32), **options)
    example = build("mlp", strategy.batch.global_, torch.bfloat16)
    original = copy.deepcopy(example.module).to(torch.float32)
    wide = replace(example, inputs=example.inputs.float())
    dtypes = Dtypes(compute=torch.bfloat16, param=torch.bfloat16, grad=torch.float32)
    model = parallelize(
        example.module, None, strategy, blocks=example.blocks, program=no_program, dtypes=dtypes
    )
    model.step(*_mine(model, example), loss_fn=example.loss_fn)
    expected = _expected(model, original, wide)
    gradients = {n: g.float() for n, g in model.full_gradients().items()}
    return largest_difference(gradients, expected)[0] if rank == 0 else 0.0


def test_gradients_of_bf16_parameters_can_be_accumulated_in_float32(gloo: Processes) -> None:
    assert max(gloo.run(2, _wide_gradients)) < 0.05


class _Stepper(Mlp):
    def step(self) -> None: ...


MLP_RULE = TensorRule(module="blocks.*.up", params=(("weight", "shard(0)"),), outputs=("shard(-1)",))
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "world size": ({"mesh": Mesh(dp_replicate=2)}, "needs 2 processes but 1 are running"),
    "context parallelism": ({"mesh": Mesh(cp=1, ep=2)}, "mesh.ep = 2"),
    "batch": ({"batch": Batch(global_=3, micro=2)}, "batch.global = 3"),
    "another model": ({"pipeline": Pipeline(stage_blocks=(7,))}, "the model has 3"),
    "recompute": ({"recompute": Recompute(mode="some")}, "recompute.mode"),
    "offload": ({"offload": Offload(optimizer=1.5)}, "offload"),
}


@pytest.mark.parametrize(("change", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_a_strategy_that_does_not_fit_is_refused_and_changes_nothing(
    change: dict[str, Any], message: str
) -> None:
    example = build("mlp", 2, torch.float32)
    strategy = replace(strategy_of(example), **change)
    before = dict(example.module.named_parameters())
    with pytest.raises(UserError, match=message):
        parallelize(example.module, None, strategy, blocks=example.blocks, program=no_program)
    assert type(example.module) is Mlp
    assert all(p is before[n] for n, p in example.module.named_parameters())


def test_a_module_with_members_of_the_same_names_is_refused() -> None:
    example = build("mlp", 2, torch.float32)
    with pytest.raises(UserError, match="already has step"):
        parallelize(_Stepper(), None, strategy_of(example), blocks=example.blocks, program=no_program)


def _refused_rules(rank: int, world_size: int, rules: tuple[TensorRule, ...]) -> str:
    example = build("mlp", 2, torch.float32)
    strategy = replace(strategy_of(example, tp=2), tensor=rules)
    with pytest.raises(UserError) as caught:
        parallelize(example.module, None, strategy, blocks=example.blocks, program=no_program)
    assert all(type(p) is nn.Parameter for p in example.module.parameters())
    return str(caught.value)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (replace(MLP_RULE, module="layers.*.up"), "matches no module"),
        (replace(MLP_RULE, params=(("kernel", "shard(0)"),)), "no parameter kernel"),
        (replace(MLP_RULE, params=(("weight", "split(0)"),)), 'unknown layout "split(0)"'),
        (replace(MLP_RULE, params=(("weight", "shard(2)"),)), "no dim 2"),
        (replace(MLP_RULE, inputs=(("hidden", "replicate"),)), "no argument hidden"),
        (replace(MLP_RULE, module="head", params=(("weight", "shard(1)"), ("bias", "partial"))), "partial"),
    ],
)
def test_tensor_rules_that_do_not_fit_are_refused(gloo: Processes, rule: TensorRule, message: str) -> None:
    for found in gloo.run(2, _refused_rules, rules=(rule,)):
        assert message in found


def test_inputs_of_another_size_than_the_rank_share_are_refused() -> None:
    example = build("mlp", 5, torch.float32)
    strategy = strategy_of(example, micro=2, micro_batches=2)
    model = parallelize(example.module, None, strategy, blocks=example.blocks, program=no_program)
    with pytest.raises(UserError, match=r"5 samples.*share of the global batch is 4"):
        model.step(example.inputs, example.targets, loss_fn=example.loss_fn)
    with pytest.raises(UserError, match="pass loss_fn"):
        model.step(example.inputs[:4])


def test_zero_without_sharding_is_the_same_at_every_level() -> None:
    example = build("mlp", 2, torch.float32)
    losses = []
    for zero in range(4):
        strategy = replace(strategy_of(example), shard=Shard(zero=zero))
        module = copy.deepcopy(example.module)
        model = parallelize(module, None, strategy, blocks=example.blocks, program=no_program)
        losses.append(model.step(example.inputs, example.targets, loss_fn=example.loss_fn).item())
    assert len(set(losses)) == 1


class _Sometimes(Mlp):
    """Leaves its last block out where a sample says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[: 2 if x[0, 0] > 0 else 3]:
            x = block(x)
        return self.head(x)


def _conditional(rank: int, world_size: int, used_by: tuple[int, ...]) -> bool:
    torch.manual_seed(0)
    module = _Sometimes()
    strategy = strategy_of(build("mlp", 1, torch.float32), dp_replicate=2, micro=1)
    model = parallelize(
        module, None, strategy, blocks=["blocks.0", "blocks.1", "blocks.2"], program=no_program
    )
    x = torch.ones(1, 16) * (-1 if rank in used_by else 1)
    model.step(x, torch.tensor([1]), loss_fn=nn.functional.cross_entropy)
    return all(p.grad is not None for p in model.blocks[2].parameters())


@pytest.mark.parametrize("used_by", [(), (1,), (0, 1)])
def test_a_parameter_has_a_gradient_where_some_replica_used_it(
    gloo: Processes, used_by: tuple[int, ...]
) -> None:
    assert gloo.run(2, _conditional, used_by=used_by) == [bool(used_by)] * 2


def _dropout(rank: int, world_size: int) -> torch.Tensor:
    torch.manual_seed(rank)
    example = build("mlp", 2, torch.float32)
    module = nn.Sequential(example.module, nn.Dropout(0.5))
    rules = tuple(replace(r, module=f"0.{r.module}") for r in example.rules(False))
    strategy = replace(strategy_of(example, tp=2), tensor=rules)
    blocks = [f"0.{path}" for path in example.blocks]
    model = parallelize(module, None, strategy, blocks=blocks, program=no_program)
    return model(torch.ones(2, 16)).detach()


def test_tensor_parallel_peers_drop_the_same_activations(gloo: Processes) -> None:
    first, second = gloo.run(2, _dropout)
    assert torch.equal(first == 0, second == 0)
    assert (first == 0).any()
