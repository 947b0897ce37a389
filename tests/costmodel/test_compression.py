from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.costmodel.compression import coding_s, is_lossy, parse_method, residual_bytes, wire_bytes
from autoparallel.errors import UserError
from autoparallel.profiles import load_device

METHODS = ("none", "fp16", "bf16", "fp8", "int8", "int4", "int2", "sign", "topk:0.01", "powersgd:4")


@given(st.sampled_from(METHODS), st.integers(0, 1 << 36), st.sampled_from([2, 4]))
def test_the_wire_never_carries_more_than_the_tensor(method: str, size: int, item: int) -> None:
    assert 0 <= wire_bytes(method, size, item) <= size


def test_wire_bytes_follow_the_definition_of_each_method() -> None:
    numbers = 1 << 20
    assert wire_bytes("none", 4 * numbers, 4) == 4 * numbers
    assert wire_bytes("bf16", 4 * numbers, 4) == 2 * numbers
    assert wire_bytes("bf16", 2 * numbers, 2) == 2 * numbers  # already 16 bits
    assert wire_bytes("int8", 4 * numbers, 4) == numbers * (1 + 16 / 128 / 8)
    assert wire_bytes("sign", 4 * numbers, 4) == numbers * (1 + 16 / 128) / 8
    assert wire_bytes("topk:0.01", 4 * numbers, 4) == pytest.approx(numbers * 0.01 * 8)
    assert wire_bytes("powersgd:4", 4 * numbers, 4) == 2 * 4 * 1024 * 4


def test_coding_costs_nothing_without_compression_and_grows_with_the_tensor() -> None:
    device = load_device("a100-sxm-80gb")
    assert coding_s("none", 1 << 30, 4, device) == 0.0
    for method in METHODS[1:]:
        assert 0 < coding_s(method, 1 << 20, 4, device) < coding_s(method, 1 << 30, 4, device)


def test_only_none_keeps_every_number() -> None:
    assert [method for method in METHODS if not is_lossy(method)] == ["none"]


@pytest.mark.parametrize(
    "text", ["int3", "topk", "topk:0", "topk:2", "topk:x", "powersgd:1.5", "powersgd", "bf16:2"]
)
def test_a_method_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="compression"):
        parse_method(text)


@pytest.mark.parametrize(
    ("method", "kept"),
    [("none", 0), ("bf16", 0), ("int8", 0), ("sign", 64), ("topk:0.01", 64), ("powersgd:4", 64)],
)
def test_biased_methods_keep_what_they_left_out(method: str, kept: int) -> None:
    assert residual_bytes(method, 64) == kept
