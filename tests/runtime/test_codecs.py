"""Laws of the methods that compress gradients: how large a message is, and how far what is decoded may be off."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoparallel.costmodel.compression import GROUP, WEIGHTS, parse_method, wire_bytes
from autoparallel.runtime.gradients.codecs import codec_of
from autoparallel.runtime.gradients.feedback import Memory, current_codec, encoded

ROUNDING = {"fp16": 2**-11, "bf16": 2**-8}
STEPS = {"int8": 2 / 254, "int4": 2 / 14, "int2": 2 / 3}  # between levels, of the largest number of a group
METHODS = (*ROUNDING, "fp8", *STEPS, "sign", "topk:0.03", "topk:0.5")

seeds = st.integers(0, 1 << 20)
numbers = st.integers(1, 700)


def drawn(seed: int, size: int) -> Tensor:
    """Numbers of very unlike sizes, two rows."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(2, size, generator=source)
    return values * torch.logspace(-4, 4, size) * (torch.rand(2, size, generator=source) > 0.2)


def decoded(method: str, rows: Tensor) -> Tensor:
    codec = codec_of(method, rows.element_size())
    assert codec is not None
    return codec.decode(codec.encode(rows), rows.shape[1], rows.dtype)


@given(st.sampled_from(METHODS), seeds, numbers, st.sampled_from([torch.float32, torch.float64]))
def test_a_message_has_the_bytes_that_are_priced(
    method: str, seed: int, size: int, dtype: torch.dtype
) -> None:
    rows = drawn(seed, size).to(dtype)
    codec = codec_of(method, rows.element_size())
    assert codec is not None
    messages = codec.encode(rows)
    assert messages.shape == (2, codec.size(size))
    assert messages.dtype == torch.uint8
    priced = wire_bytes(method, rows.nbytes // 2, rows.element_size())
    one = (
        3 if parse_method(method).name != "topk" else rows.element_size() + 4
    )  # a scale and a byte, or a number kept
    assert priced == rows.nbytes // 2 or abs(codec.size(size) - priced) <= one


@given(st.sampled_from(METHODS), seeds, numbers)
def test_what_is_lost_is_less_than_what_was_sent(method: str, seed: int, size: int) -> None:
    """The contraction that error feedback rests on, with the factor of each method; unbiased ones err by a step."""
    rows = drawn(seed, size)
    found = decoded(method, rows)
    lost, whole = (found - rows).double(), rows.double()
    kind = parse_method(method)
    if kind.name == "topk":
        kept = max(1, round(size * kind.amount))
        assert ((lost**2).sum(1) <= (1 - kept / size) * (whole**2).sum(1) * (1 + 1e-6)).all()
    elif kind.name == "sign":
        assert ((lost**2).sum(1) <= (1 - 1 / GROUP + 0.01) * (whole**2).sum(1) + 1e-12).all()
    elif kind.name in ROUNDING:
        smallest = 2**-24 if kind.name == "fp16" else 1e-38
        limit = (whole.abs() * ROUNDING[kind.name]).clamp(min=smallest)
        assert ((lost.abs() <= limit) | (whole.abs() > 65504)).all()
    else:
        padded = torch.nn.functional.pad(whole, (0, -size % GROUP)).view(2, -1, GROUP)
        most = padded.abs().amax(2, keepdim=True).expand_as(padded).reshape(2, -1)[:, :size] * (1 + 2**-6)
        step = (
            STEPS[kind.name] * most
            if kind.name in STEPS
            else (whole.abs() / 8).clamp(min=2**-9 / 448) + most / 2**8
        )
        assert (lost.abs() <= step * (1 + 1e-5)).all()


@given(st.sampled_from([m for m in WEIGHTS if m != "none"]), seeds, numbers)
def test_rounding_to_nearest_is_the_same_again_and_errs_by_half_a_step(
    method: str, seed: int, size: int
) -> None:
    rows = drawn(seed, size).clamp(-6e4, 6e4)
    codec = codec_of(method, 4, nearest=True)
    assert codec is not None
    once, again = (codec.decode(codec.encode(rows), size, rows.dtype) for _ in range(2))
    assert torch.equal(once, again)
    assert codec.size(size) == codec_of(method, 4).size(size)  # type: ignore[union-attr]
    if method in STEPS:
        padded = torch.nn.functional.pad(rows, (0, -size % GROUP)).view(2, -1, GROUP)
        most = padded.abs().amax(2, keepdim=True).expand_as(padded).reshape(2, -1)[:, :size] * (1 + 2**-6)
        assert ((once - rows).abs() <= STEPS[method] / 2 * most * (1 + 1e-4)).all()


@pytest.mark.parametrize("method", ["fp8", *STEPS])
def test_rounding_is_on_average_exact(method: str) -> None:
    row = torch.randn(1, 200, generator=torch.Generator().manual_seed(3))
    draws = decoded(method, row.expand(4000, -1))
    off = (draws.double().mean(0) - row[0]).abs()
    spread = draws.double().std(0) / 4000**0.5
    assert (off <= 6 * spread + 1e-3 * row[0].abs()).all()


@given(st.sampled_from(METHODS), st.sampled_from([float("nan"), float("inf")]))
def test_a_number_that_is_none_shows(method: str, bad: float) -> None:
    rows = torch.ones(2, 300)
    rows[0, 7] = bad
    found = decoded(method, rows)
    assert not found[0].isfinite().all()
    assert found[1].isfinite().all()
    memory = Memory()
    codec = codec_of(method, 4)
    assert codec is not None
    encoded(rows, codec, memory, "scatter")
    assert all(part.isfinite().all() for part in memory.tensors()), "it is not carried on"


def test_few_numbers_travel_as_they_are() -> None:
    """Where a message would be no smaller."""
    assert current_codec("topk:0.9", torch.ones(2, 100), Memory()) is None
    assert current_codec("int8", torch.ones(2, 1), Memory()) is not None
    assert current_codec("sign", torch.ones(2, 1, dtype=torch.bfloat16), Memory()) is None


def _trained(method: str, *, feedback: bool) -> float:
    """Loss of a quadratic after 200 steps whose gradients are encoded and decoded. Those of one half of the weights are
    small, those of the other are noisy: seldom far up, mostly a little down, on average right."""
    noise, memory, weights = torch.Generator().manual_seed(0), Memory(), torch.ones(1, 128)
    for _ in range(200):
        drawn = torch.where(torch.rand(1, 64, generator=noise) < 0.2, 4.0, -1.0)
        gradient = weights + torch.nn.functional.pad(drawn, (0, 64))
        codec = codec_of(method, 4)
        assert codec is not None
        memory = memory if feedback else Memory()
        messages = encoded(gradient, codec, memory, "scatter")
        weights = weights - 0.02 * codec.decode(messages, 128, torch.float32)
    return weights.square().mean().item()


@pytest.mark.parametrize("method", ["sign", "topk:0.05"])
def test_what_error_feedback_is_for(method: str) -> None:
    """Two hundred steps of gradient descent: without it a biased method stops well above the optimum."""
    with_it, without = (_trained(method, feedback=feedback) for feedback in (True, False))
    assert with_it < without / 3
