"""State where the strategy wants it: the same numbers, the bytes that are priced, and two pieces at once at most."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autoparallel.costmodel.kernels import HOST_COPY
from autoparallel.errors import UserError
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.load import keyword_inputs
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.strategy.types import Batch, Execution, Offload, Pipeline, Strategy
from autoparallel.profiles import load_cluster
from autoparallel.runtime.memory import optimizer as under_test
from autoparallel.runtime.memory.host_copies import HostCopies
from autoparallel.runtime.memory.optimizer import Optimizers, ParallelOptimizer, hosted
from autoparallel.runtime.start import parallelize
from tests.runtime.models import EXAMPLES
from tests.runtime.shared import no_program

CPU = torch.device("cpu")
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adamw, amsgrad, one by one": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "foreach": False}),
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "sgd with momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


class Apart(HostCopies):
    """A host beside the device: what has come is another tensor, and what has left is no longer there."""

    most_bytes = held_bytes = 0

    def copied_out(self, held: Tensor, into: Tensor | None = None) -> Tensor:
        copy = super().copied_out(held, into)
        Apart.held_bytes -= held.nbytes if into is not None else 0
        held.fill_(torch.nan)
        return copy

    def copied_back(self, copy: Tensor) -> tuple[Tensor, torch.Event | None]:
        Apart.held_bytes += copy.nbytes
        Apart.most_bytes = max(Apart.most_bytes, Apart.held_bytes)
        there = super().copied_back(copy)[0].clone()
        copy.fill_(torch.nan)
        return there, None


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "HostCopies", Apart)
    Apart.most_bytes = Apart.held_bytes = 0


def _strategy(share: float, *, masters: bool = False) -> Strategy:
    execution = Execution(dtype="fp32", param_dtype="fp32", master_weights=masters, kernels="eager")
    return Strategy(batch=Batch(global_=2, micro=2), offload=Offload(optimizer=share), execution=execution)


def _weights(dtype: torch.dtype, sizes: tuple[int, ...] = (5, 1, 40, 7, 7)) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(3, size, generator=generator).to(dtype)) for size in sizes]
    return [*made, nn.Parameter(torch.ones((), dtype=dtype))]


def _made(parameters: list[nn.Parameter], kind: str, strategy: Strategy) -> ParallelOptimizer:
    named = [(str(n), p) for n, p in enumerate(parameters)]
    optimizers = Optimizers(strategy=strategy, device=CPU, named=lambda: named)
    groups = [{"params": parameters[:2], "lr": 0.03}, {"params": parameters[2:]}]
    return optimizers.make(KINDS[kind][0], groups, KINDS[kind][1])


def _give_gradients(parameters: list[nn.Parameter], step: int, without: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for index, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if index == without else gradient.to(parameter.dtype)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)), share=st.floats(0.0, 1.0) | st.just(1.0),
    piece=st.integers(1, 400), without=st.integers(-1, 5), masters=st.booleans(), resumed=st.booleans(),
)  # fmt: skip
def test_updates_are_those_of_the_class_itself(
    kind: str, share: float, piece: int, without: int, masters: bool, resumed: bool
) -> None:
    """Whatever share is away, however it is cut. With masters: those of float32 parameters that see the same gradients."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(under_test, "HostCopies", Apart)
        patched.setattr(under_test, "PIECE_BYTES", piece)
        dtype = torch.bfloat16 if masters else torch.float32
        strategy = _strategy(share, masters=masters)
        parameters, wanted = _weights(dtype), [nn.Parameter(p.float()) for p in _weights(dtype)]
        optimizer = _made(parameters, kind, strategy)
        groups = [{"params": wanted[:2], "lr": 0.03}, {"params": wanted[2:]}]
        own = KINDS[kind][0](groups, **KINDS[kind][1])
        for step in range(3):
            _give_gradients(parameters, step, without)
            for parameter, same in zip(parameters, wanted, strict=True):
                same.grad = None if parameter.grad is None else parameter.grad.float()
            if resumed and step == 1:
                kept = copy.deepcopy(optimizer.state_dict())
                optimizer = _made(parameters, kind, strategy)
                optimizer.load_state_dict(kept)
            optimizer.step()
            own.step()
        for parameter, same in zip(parameters, wanted, strict=True):
            assert torch.equal(parameter, same.to(dtype)), (parameter, same)


def test_two_pieces_are_on_the_device_at_once(apart: None, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = _weights(torch.float32, sizes=(0, *(8,) * 10))  # a rank may hold nothing of a small one
    optimizer = _made(parameters, "adamw", _strategy(1.0))
    piece = parameters[1].nbytes
    monkeypatch.setattr(under_test, "PIECE_BYTES", piece)
    for step in range(2):
        _give_gradients(parameters, step, without=-1)
        optimizer.step()
    assert Apart.most_bytes == 2 * (2 * piece), "two moments each of two pieces"
    assert Apart.held_bytes == 0


@given(sizes=st.lists(st.integers(0, 50), min_size=1), share=st.floats(0.0, 1.0))
def test_what_is_away_is_within_its_share_and_nothing_more_fits(sizes: list[int], share: float) -> None:
    parameters = [nn.Parameter(torch.empty(size)) for size in sizes]
    away = hosted(parameters, share)
    room = share * sum(sizes) - sum(p.numel() for p in away)
    assert room >= 0
    assert all(p.numel() > room for p in parameters if p not in away and p.numel())


def test_hooks_and_schedules_see_one_step() -> None:
    parameters = _weights(torch.float32)
    optimizer, calls = _made(parameters, "adamw", _strategy(0.5)), []
    torch.optim.AdamW(_weights(torch.float32))  # torch puts its hooks around the class's own step
    optimizer.register_step_post_hook(lambda *_: calls.append("stepped"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    _give_gradients(parameters, 0, without=-1)
    assert optimizer.step(lambda: 3.0) == 3.0
    schedule.step()
    assert calls == ["stepped"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.015, 0.005]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_moves_is_what_is_priced(name: str, masters: bool) -> None:
    example = EXAMPLES[name](2)
    graph = capture(example.module, keyword_inputs(example.module, example.inputs), name=name)
    dtype = "bf16" if masters else "fp32"
    strategy = replace(
        _strategy(1.0), pipeline=Pipeline(stage_blocks=(len(example.blocks),)),
        execution=Execution(dtype=dtype, param_dtype=dtype, master_weights=masters, kernels="eager"),
    )  # fmt: skip
    (stage,) = Expander(graph, load_cluster("cpu-gloo:1x1")).program(strategy).stages
    example.module.to(torch.bfloat16 if masters else torch.float32)
    model: Any = parallelize(example.module, None, strategy, blocks=example.blocks, program=no_program)
    optimizer = model.optimizer(torch.optim.AdamW)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    count = model._run.optimizers.count
    priced = sum(step.bytes_moved for step in stage.optimizer if step.kind == HOST_COPY)
    assert (count.returned_bytes, count.moved_bytes) == (priced, 2 * priced), (
        "nothing is there before the first"
    )
    held = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    assert sum(t.nbytes for t in held) == stage.host_bytes
    assert stage.optimizer_bytes == 0


def test_a_rank_without_parameters_has_an_optimizer_like_the_others() -> None:
    """Its pipeline stage may do nothing but flatten; the learning rate is scheduled on every rank alike."""
    optimizers = Optimizers(strategy=_strategy(0.5), device=CPU, named=list)
    for parameters in (None, iter(())):
        optimizer = optimizers.make(torch.optim.AdamW, parameters, {"lr": 0.1})
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.zero_grad()
        optimizer.step()
        schedule.step()
        assert schedule.get_last_lr() == [0.05]
        optimizer.load_state_dict(optimizer.state_dict())


def test_what_is_no_class_of_an_optimizer_is_refused() -> None:
    parameters = _weights(torch.float32)
    optimizers = Optimizers(strategy=_strategy(0.0), device=CPU, named=list)
    wrong: Any = torch.optim.AdamW(parameters)
    with pytest.raises(UserError, match="takes the class of an optimizer, such as"):
        optimizers.make(wrong, None, {})
