"""Values that a trace has or takes for granted, and code that looks at them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoparallel.planner.capture import capture
from benchmarks.coverage.eager import graph_saved_bytes
from tests.capture.measured import counted_flops, eager_saved_bytes, show_saved


class _Guarded(nn.Module):
    def __init__(self, guard: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.guard, self.linear = guard, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y.clamp(max=0.0) if self.guard(y) else y


@pytest.mark.parametrize(
    "guard",
    [lambda y: y.isinf().any(), lambda y: torch.isnan(y).any(), lambda y: ~torch.isfinite(y).all(), lambda y: (y != y).any()],
    ids=["infinite", "not a number", "not finite", "unlike itself"],
)  # fmt: skip
def test_a_guard_against_infinities_finds_none(guard: Callable[[Tensor], Tensor]) -> None:
    graph = capture(_Guarded(guard), torch.randn(2, 4), name="x")
    assert not graph.warnings
    assert "aten.clamp" not in {op.target for block in graph.blocks for op in block.operators}


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, known: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        y[known < 2] = 0.0
        return y[known > 0]


def test_a_mask_of_known_values_picks_as_many_as_it_has() -> None:
    graph = capture(_Masked(), (torch.randn(2, 4, 4), torch.arange(4).expand(2, 4).clone()), name="x")
    assert not graph.warnings
    (last,) = [op for block in graph.blocks for op in block.operators if op.target.endswith("getitem")]
    assert [size.at(2) for size in last.outputs[0].shape] == [2 * 3, 4]


class _LongMasked(nn.Module):
    """Looks at a mask that is expanded over the square of its sequence, and at images that are all black; asks torch for a
    quotient of sizes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        length = x.shape[1]
        square = 1.0 - mask.float()[:, None, None, :].expand(-1, 2, length, length)
        if (square.masked_fill(square.bool(), -1.0)[:, 0, 0] < 0).flatten().any().item():
            raise AssertionError("nothing is masked")
        x = x[(x == 0.0).sum(dim=(1, 2)) != length * 4]
        for _ in range(2):
            x = x.view(x.shape[0], torch.div(length, 4, rounding_mode="trunc"), 16).view(
                x.shape[0], length, 4
            )
        y: Tensor = self.linear(x)
        return y


def test_masks_over_the_square_of_a_long_sequence_and_samples_that_are_not_empty_are_known() -> None:
    length = 4096
    graph = capture(
        _LongMasked(), (torch.randn(2, length, 4), torch.ones(2, length, dtype=torch.int64)), name="x"
    )
    assert not graph.warnings
    (linear,) = [op for block in graph.blocks for op in block.operators if op.target.endswith("linear")]
    assert [size.at(3) for size in linear.outputs[0].shape] == [3, length, 4]


class _Recognised(nn.Module):
    zero_infinity = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        scores = F.log_softmax(self.linear(x), dim=-1).transpose(0, 1)
        lengths = torch.full((len(x),), x.shape[1])
        ends = torch.full((len(x),), targets.shape[1])
        return F.ctc_loss(scores, targets, lengths, ends, zero_infinity=self.zero_infinity)


def test_a_loss_over_alignments_keeps_what_torch_keeps() -> None:
    module, inputs = _Recognised(), (torch.randn(2, 6, 4), torch.ones(2, 3, dtype=torch.int64))
    graph = capture(module, inputs, name="x")
    assert not graph.warnings
    (loss,) = [op for block in graph.blocks for op in block.operators if op.target == "aten.ctc_loss"]
    assert loss.outputs[0].shape == ()
    kept = {tuple(size.at(2) for size in saved.spec.shape) for saved in loss.saved}
    scores = torch.randn(6, 2, 5).log_softmax(-1)
    *_, prefixes = torch._ctc_loss(scores, inputs[1], [6, 6], [3, 3])
    assert tuple(prefixes.shape) in kept


class _Settled(nn.Module):
    """Its first call puts other attention in place of what it has, as some models do for short sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Numbered(i) for i in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.settle()
            x = layer(x)
        return x


class _Numbered(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner, self.seed = nn.Linear(4, 4), seed

    def settle(self) -> None:
        vars(self).pop("seed", None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x))


def test_layers_that_change_while_they_run_are_traced_all_the_same() -> None:
    graph = capture(_Settled(), torch.randn(2, 4), name="x")
    assert not graph.warnings
    assert len(graph.repeated_positions) == 5


class _Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.forward(x).tanh()
        return x


def test_layers_whose_forward_is_called_past_the_module_all_count() -> None:
    graph = capture(_Direct(), torch.randn(2, 4), name="x")
    assert graph.model_flops(2) == (3 * 5 - 1) * 2 * 2 * 4 * 4  # the first layer's input needs no gradient


class _Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.unused = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.used:
            x = layer(x)
        return x


def test_layers_that_are_never_called_do_not_stop_the_others_from_being_traced() -> None:
    module = _Idle()
    graph = capture(module, torch.randn(2, 4), name="x")
    assert graph.parameter_count == sum(p.numel() for p in module.parameters())
    assert [warning for warning in graph.warnings if "unused" in warning]


class _Choosing(nn.Module):
    """Attends where the values say so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)[:, None]
        return F.scaled_dot_product_attention(y, y, y)[:, 0] if bool((y < 9.0).all()) else x


def test_the_attention_of_what_cannot_be_traced_counts() -> None:
    graph = capture(_Choosing(), torch.randn(2, 6, 8), name="x")
    assert graph.warnings
    assert graph.model_flops(2) == 2 * (2 * 2 * 6 * 8 * 8) + 3 * 2 * (2 * 2 * 6 * 6 * 8)


class _Attending(nn.Module):
    """Attention of a mask of flags, which every call makes numbers of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        flags = mask[:, None, None, :] & mask[:, None, :, None]
        for layer in (self.first, self.second):
            heads = layer(x).unflatten(-1, (2, 4)).transpose(1, 2)
            x = (
                F.scaled_dot_product_attention(heads, heads, heads, attn_mask=flags)
                .transpose(1, 2)
                .flatten(2)
            )
        return x


class _Heard(nn.Module):
    """As recognisers of speech: convolutions whose input autograd is made to follow, and a loss over alignments."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv1d(1, 4, 3), nn.Linear(4, 5)

    def forward(self, sound: Tensor, targets: Tensor) -> Tensor:
        sound = sound[:, None]
        sound.requires_grad = True
        return self.linear(self.conv(sound).transpose(1, 2)).sum() + 0 * targets.sum()


def test_attention_keeps_the_numbers_of_a_mask_of_flags() -> None:
    module, inputs = _Attending(), {"x": torch.randn(2, 6, 8), "mask": torch.ones(2, 6, dtype=torch.bool)}
    graph = capture(module, inputs, name="x")
    assert graph_saved_bytes(graph, 2) == eager_saved_bytes(module, inputs), show_saved(graph)


def test_the_gradient_of_an_input_that_autograd_is_made_to_follow_counts() -> None:
    module, inputs = _Heard(), {"sound": torch.randn(2, 30), "targets": torch.ones(2, 3)}
    assert capture(module, inputs, name="x").model_flops(2) == counted_flops(module, inputs)


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_a_loss_over_alignments_keeps_its_targets_and_which_losses_are_infinite(zero_infinity: bool) -> None:
    class Twice(_Recognised):
        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            self.zero_infinity = zero_infinity
            return super().forward(x, targets * 2)

    inputs = {"x": torch.randn(2, 6, 4), "targets": torch.ones(2, 3, dtype=torch.int64)}
    graph = capture(Twice(), inputs, name="x")
    assert graph_saved_bytes(graph, 2) == eager_saved_bytes(Twice(), inputs), show_saved(graph)


class _Unread(nn.Module):
    """Attention that follows parameters, but hands no gradient on: what it gives is rounded (a tokenizer of sound)."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.trained = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer, rounds in ((self.codes, True), (self.trained, False)):
            heads = layer(x).unflatten(-1, (2, 4)).transpose(1, 2)
            x = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
            x = (x > 0).float() if rounds else x
        return x


def test_attention_that_no_gradient_reaches_has_no_backward_pass() -> None:
    module, inputs = _Unread(), {"x": torch.randn(2, 6, 8)}
    assert capture(module, inputs, name="x").model_flops(2) == counted_flops(module, inputs)
