from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel.runtime.gradients.split_backward import backward_input, backward_input_recomputed


class _Kernels(TorchDispatchMode):
    """Counts matrix products and the kernels of normalisation and activation."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in ("mm", "bmm", "gelu_backward"):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class _Shared(nn.Module):
    """A weight that is used twice, one after the other, and a branch that does not read the input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.one(self.one(x).tanh() * self.other.exp())


def _stage(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "shared":
        return _Shared().double()
    if name == "attention":
        return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True).double()
    layers = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 6))
    return layers.double()


def _whole(stage: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    stage(x).square().sum().backward()
    assert x.grad is not None
    found = {name: p.grad.clone() for name, p in stage.named_parameters() if p.grad is not None}
    given = x.grad.clone()
    stage.zero_grad()
    x.grad = None
    return found, given


@pytest.mark.parametrize("name", ["layers", "shared", "attention"])
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("told", [False, True])
def test_the_halves_give_the_gradients_of_the_whole(name: str, recomputed: bool, told: bool) -> None:
    stage, x = _stage(name), torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    wanted, wanted_input = _whole(stage, x)
    for _ in range(2):  # micro-batches add up
        loss = stage(x).square().sum()
        if recomputed:
            (found,), rest = backward_input_recomputed(
                [get_gradient_edge(loss)], [None], [x], list(stage.parameters())
            )
        else:
            (found,), rest = backward_input([get_gradient_edge(loss)], [None], [x])
        assert found is not None
        torch.testing.assert_close(found, wanted_input)
        assert x.grad is None
        rest.run((lambda _: None) if told else None)
    for key, parameter in stage.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * wanted[key])


@pytest.mark.parametrize("name", ["layers", "shared", "attention"])
def test_weights_are_told_of_when_they_have_all_of_their_gradients(name: str) -> None:
    stage, x = _stage(name), torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    wanted, _ = _whole(stage, x)
    names = {parameter: key for key, parameter in stage.named_parameters()}
    _, rest = backward_input([get_gradient_edge(stage(x).square().sum())], [None], [x])
    told: dict[str, int] = {}

    def complete(weight: Any) -> None:
        torch.testing.assert_close(weight.grad, wanted[names[weight]])
        told[names[weight]] = sum(p.grad is not None for p in names)

    rest.run(complete)
    assert told.keys() == wanted.keys(), "each once"
    at_once = name == "shared"  # a pass of its own
    assert (min(told.values()) == len(names)) == at_once, "while others are still to come"


def test_no_product_is_computed_twice() -> None:
    stage, x = _stage("layers"), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    with _Kernels() as whole:
        stage(x).square().sum().backward()
    loss = stage(x).square().sum()
    with _Kernels() as first:
        _, rest = backward_input([get_gradient_edge(loss)], [None], [x])
    with _Kernels() as second:
        rest.run()
    assert first.found["mm"] == second.found["mm"] == 2, "one product each way for each layer"
    assert first.found + second.found == whole.found


def test_hooks_of_a_parameter_fire_once_a_micro_batch() -> None:
    stage, x = _stage("shared"), torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    fired: Counter[str] = Counter()
    for name, parameter in stage.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([name]))
    _, rest = backward_input([get_gradient_edge(stage(x).sum())], [None], [x])
    assert not fired
    rest.run()
    assert fired == {"one.weight": 1, "one.bias": 1, "other": 1}


def test_a_first_stage_does_all_its_work_in_the_second_half() -> None:
    stage = _stage("layers")
    found, rest = backward_input(
        [get_gradient_edge(stage(torch.randn(2, 6, dtype=torch.float64)).sum())], [None], []
    )
    assert found == []
    rest.run()
    assert all(p.grad is not None for p in stage.parameters())
