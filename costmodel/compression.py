"""Gradient compression: bytes on the wire and the passes over memory that encoding and decoding take.

A method is named as in the strategy file: none, fp16, bf16, fp8, int8, int4, int2, sign, topk:RATIO,
topk:LEAST-MOST (a ratio that follows what error feedback has to carry, priced at the most), powersgd:RANK. Kind of
every figure: formula, from the definition of the method; `runtime/gradients/codecs.py` sends these bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from autoparallel.errors import UserError
from autoparallel.profiles.hardware import Device

BITS = {"fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4, "int2": 2, "sign": 1}
GROUP = 128  # numbers that share one 16-bit scale, methods of 8 bits and less
_SCALE_BITS = 16
_INDEX_BITS = 32  # of a number that top-k keeps
_LOSSLESS = ("none", "")
WEIGHTS = ("none", "fp16", "bf16", "fp8", "int8", "int4")  # what ZeRO-3's gathers of parameters may travel as
_BIASED = ("sign", "topk", "powersgd")
_SUMMABLE = ("none", "fp16", "bf16", "powersgd")  # a reduction may add the encoded numbers as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A parsed method; `amount` is top-k's ratio (the most that it may be) or PowerSGD's rank, `least` the ratio that
    top-k starts from and falls to."""

    name: str
    amount: float = 0.0
    least: float = 0.0

    @property
    def summable(self) -> bool:
        """Encoded gradients can be added, so that reduce-scatter keeps its volume."""
        return self.name in _SUMMABLE

    @property
    def biased(self) -> bool:
        """What is decoded is not on average what was encoded, so that error feedback must carry the rest."""
        return self.name in _BIASED


def method_at(compression: Sequence[str], level: int) -> str:
    """The method of `grad_sync.compression` at a network level: none where it says nothing of it."""
    return (compression[level] if level < len(compression) else "") or "none"


def parse_method(text: str) -> Method:
    """The method that a strategy file names; UserError where there is none of that name."""
    name, colon, amount = text.partition(":")
    if name in ("topk", "powersgd"):
        return _with_amount(name, amount)
    if (name in BITS or name in _LOSSLESS) and not colon:
        return Method(name=name or "none")
    known = ", ".join(("none", *BITS, "topk:RATIO", "powersgd:RANK"))
    raise UserError(f"unknown compression `{text}`; one of {known}")


def _with_amount(name: str, amount: str) -> Method:
    least, _, most = amount.partition("-") if name == "topk" else (amount, "", "")
    try:
        low, high = float(least), float(most or least)
    except ValueError:
        low = high = -1.0
    if name == "topk" and not 0.0 < low <= high <= 1.0:
        raise UserError(
            f"compression `topk:{amount}` needs a ratio above 0, at most 1: `topk:0.01`, or the least and the most of one that "
            "follows the residual: `topk:0.001-0.05`"
        )
    if name == "powersgd" and not (high >= 1.0 and high == int(high)):
        raise UserError(f"compression `powersgd:{amount}` needs a whole rank: `powersgd:4`")
    return Method(name=name, amount=high, least=low)


def highest_rank(numbers: int) -> int:
    """The highest rank of PowerSGD that makes so many numbers fewer: rank * (rows + columns) < numbers; 0 where none does."""
    return max(0, (numbers - 1) // sum(matrix_shape(numbers)))


def matrix_shape(numbers: int) -> tuple[int, int]:
    """Rows and columns of the matrix that PowerSGD lays so many numbers out in, as square as it can be."""
    rows = max(1, ceil(numbers**0.5))
    return rows, max(1, ceil(numbers / rows))


def parse_weights(text: str) -> Method:
    """The method of `grad_sync.weights`; UserError where parameters cannot travel so."""
    if text not in WEIGHTS:
        raise UserError(f"grad_sync.weights = `{text}`; one of {', '.join(WEIGHTS)}")
    return Method(name=text)


def is_lossy(text: str) -> bool:
    """Whether the method changes numbers, so that the user must allow it."""
    return parse_method(text).name != "none"


def residual_bytes(text: str, size_bytes: int, ranks: int = 1) -> int:
    """State of error feedback for gradients of `size_bytes`: what a biased method left out of the last step.

    Every rank keeps that of its own gradients, and of the mean that it sends on, a share of `ranks`. Rounding to either
    side errs to either side and keeps none; sign, top-k and low rank leave out what is small.
    """
    method = parse_method(text)
    if not method.biased:
        return 0
    return size_bytes + (size_bytes // ranks if ranks > 1 and not method.summable else 0)


def wire_bytes(text: str, size_bytes: float, item_bytes: int) -> float:
    """Bytes that stand for `size_bytes` of `item_bytes` numbers; never more than uncompressed.

    PowerSGD of n numbers as a square matrix: two factors of rank columns, 2 rank sqrt(n) numbers.
    """
    method = parse_method(text)
    numbers = size_bytes / item_bytes
    if method.name == "none" or not size_bytes:
        return size_bytes
    if method.name == "topk":
        coded = numbers * method.amount * (item_bytes + _INDEX_BITS / 8)
    elif method.name == "powersgd":
        coded = 2 * method.amount * numbers**0.5 * item_bytes
    else:
        bits = BITS[method.name]
        coded = numbers * (bits + (_SCALE_BITS / GROUP if bits <= 8 else 0.0)) / 8
    return min(size_bytes, coded)


def coding_s(text: str, size_bytes: float, item_bytes: int, device: Device) -> float:
    """Seconds to encode and decode once, as memory passes: read, write coded, read coded, write.

    Methods with error feedback (all below 16 bits) also read and write the residual; top-k selects in two
    further passes; PowerSGD multiplies by its factors, two passes over the gradient and two for the result. All of it
    `compress.METHOD` times: 1 for fused kernels, what calibration measures for the runtime's own.
    """
    method = parse_method(text)
    if method.name == "none" or not size_bytes:
        return 0.0
    coded = wire_bytes(text, size_bytes, item_bytes)
    passes = {"fp16": 2.0, "bf16": 2.0, "topk": 6.0, "powersgd": 6.0}.get(method.name, 4.0)
    moved = passes * size_bytes + 2.0 * coded
    bandwidth = device.hbm_bytes_per_s * device.constants["memory.efficiency.compress"]
    each = device.constants[f"compress.{method.name}"]
    return each * (2 * device.constants["kernel.start_s"] + moved / bandwidth)


def gathering_s(text: str, size_bytes: float, item_bytes: int, ranks: int, device: Device) -> float:
    """Seconds of coding around a gather of `size_bytes`: every rank encodes its share, and decodes all of it.

        (size + coded) * (1 + 1 / ranks)    bytes moved

    `compress.METHOD` times, as `coding_s`.
    """
    method = parse_method(text)
    if method.name == "none" or not size_bytes:
        return 0.0
    moved = (size_bytes + wire_bytes(text, size_bytes, item_bytes)) * (1.0 + 1.0 / ranks)
    bandwidth = device.hbm_bytes_per_s * device.constants["memory.efficiency.compress"]
    each = device.constants[f"compress.{method.name}"]
    return each * (2 * device.constants["kernel.start_s"] + moved / bandwidth)
