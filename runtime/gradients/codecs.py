"""What compression methods make of numbers: bytes, and numbers again.

A codec encodes rows of numbers, one message a row, of the bytes that `costmodel.compression.wire_bytes` prices:

    fp16, bf16           the numbers in 16 bits, rounded to nearest
    fp8, int8, int4      one 16-bit scale per 128 numbers, the largest of them; stochastic rounding, so that what is decoded
    int2                 is on average what was encoded (int2: -1, -1/3, 1/3, 1)
    sign                 one 16-bit scale per 128 numbers, their mean size, and the signs
    topk                 the numbers of largest size, each with its 32-bit place in the row

Sources: QSGD (Alistarh et al., 2017) for stochastic rounding, EF-signSGD (Karimireddy et al., 2019) for scaled signs,
Deep Gradient Compression (Lin et al., 2018) for top-k. PowerSGD is no codec: see `reductions.LowRank`. A number that is
none (NaN, infinity) makes at least itself, and at most its group, come out as none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.costmodel.compression import BITS, GROUP, parse_method
from autoparallel.runtime.torch_private import is_fake

_FP8_MOST, _FP8_MANTISSA, _FP8_LEAST_EXPONENT = 448.0, 3, -6  # of float8_e4m3fn
_SEED = 0x5EED
_generators: dict[torch.device, torch.Generator] = {}


class Codec(ABC):
    """Turns rows of numbers into rows of bytes and back."""

    biased = False

    @abstractmethod
    def size(self, numbers: int) -> int:
        """Bytes of the message that stands for so many numbers."""

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Bytes [rows, size(numbers)] of floating-point [rows, numbers]."""

    @abstractmethod
    def decode(self, messages: Tensor, numbers: int, dtype: torch.dtype) -> Tensor:
        """[rows, numbers] in `dtype` of bytes [rows, size(numbers)]."""


def codec_of(
    text: str, item_bytes: int, ratio: float | None = None, *, nearest: bool = False
) -> Codec | None:
    """The codec of a method, for numbers of `item_bytes`; None for those that have none (none, powersgd). `ratio` is
    top-k's, where it is not fixed; `nearest` rounds alike on every rank and at every time, not stochastically. Raises UserError for an unknown method."""
    method = parse_method(text)
    if method.name in ("none", "powersgd"):
        return None
    if method.name == "topk":
        return TopK(ratio or method.amount, item_bytes)
    if method.name in _NARROW:
        return _NARROW[method.name]
    return (_NEAREST if nearest else _SCALED)[method.name]


class Narrow(Codec):
    """The numbers in another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def size(self, numbers: int) -> int:
        return numbers * self._dtype.itemsize

    def encode(self, rows: Tensor) -> Tensor:
        return rows.to(self._dtype).contiguous().view(torch.uint8)

    def decode(self, messages: Tensor, numbers: int, dtype: torch.dtype) -> Tensor:
        del numbers
        return _viewed(messages, self._dtype).to(dtype)


class Scaled(Codec):
    """Groups of numbers with a scale each, and a few bits a number."""

    def __init__(self, bits: int, *, nearest: bool = False) -> None:
        self._bits, self._nearest = bits, nearest

    def size(self, numbers: int) -> int:
        return 2 * ceil(numbers / GROUP) + ceil(numbers * self._bits / 8)

    def encode(self, rows: Tensor) -> Tensor:
        numbers = rows.shape[1]
        groups = ceil(numbers / GROUP)
        padded = _padded(rows.to(torch.float32), groups * GROUP)
        grouped = padded.view(len(rows), groups, GROUP)
        scales = _rounded_up(self._scale(grouped, numbers))
        codes = self._codes(grouped, scales.to(torch.float32).unsqueeze(-1)).view(len(rows), -1)
        return torch.cat([scales.view(torch.uint8), _packed(codes[:, :numbers], self._bits)], dim=1)

    def decode(self, messages: Tensor, numbers: int, dtype: torch.dtype) -> Tensor:
        groups = ceil(numbers / GROUP)
        scales = _viewed(messages[:, : 2 * groups], torch.bfloat16).to(torch.float32)
        codes = _padded(_unpacked(messages[:, 2 * groups :], self._bits, numbers), groups * GROUP)
        values = self._values(codes.view(len(messages), groups, GROUP), scales.unsqueeze(-1))
        return values.view(len(messages), -1)[:, :numbers].to(dtype)

    def _scale(self, grouped: Tensor, numbers: int) -> Tensor:
        """[rows, groups] of [rows, groups, GROUP], zeros behind the first `numbers` of a row."""
        del numbers
        found: Tensor = torch.linalg.vector_norm(grouped, ord=float("inf"), dim=-1)
        return found

    def _codes(self, grouped: Tensor, scales: Tensor) -> Tensor:
        """uint8 below 2^bits."""
        half = (self._levels() - 1) / 2
        places = (
            self._shift(grouped).addcmul_(grouped, torch.where(scales > 0, half / scales, 0.0)).add_(half)
        )
        return places.clamp_(max=2 * half).to(torch.uint8)  # which cuts what is behind the point off

    def _shift(self, like: Tensor) -> Tensor:
        """What is added before the rest behind the point is cut off."""
        return torch.full_like(like, 0.5) if self._nearest else _noise(like)

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """float32 of codes [rows, groups, GROUP] and scales [rows, groups, 1]."""
        values: Tensor = codes * (scales * (2 / (self._levels() - 1)))
        return values.sub_(scales)

    def _levels(self) -> int:
        """Values that are told apart, evenly from -1 to 1; an odd number where 0 can be one of them without loss."""
        return 4 if self._bits == 2 else (1 << self._bits) - 1


class Signs(Scaled):
    """Which side of 0 a number is on, times the mean size of its group."""

    biased = True

    def __init__(self) -> None:
        super().__init__(1)

    def _scale(self, grouped: Tensor, numbers: int) -> Tensor:
        counts = torch.full((grouped.shape[1],), GROUP, device=grouped.device)
        if numbers % GROUP:
            counts[-1] = numbers % GROUP
        found: Tensor = torch.linalg.vector_norm(grouped, ord=1, dim=-1) / counts
        return found

    def _codes(self, grouped: Tensor, scales: Tensor) -> Tensor:
        del scales
        return (grouped >= 0).to(torch.uint8)

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        values: Tensor = codes * (2 * scales)
        return values.sub_(scales)


class Float8(Scaled):
    """float8_e4m3fn of numbers whose group's largest becomes the largest that it has."""

    def __init__(self, *, nearest: bool = False) -> None:
        super().__init__(8, nearest=nearest)

    def _codes(self, grouped: Tensor, scales: Tensor) -> Tensor:
        values = torch.where(scales > 0, grouped / scales, torch.zeros_like(grouped)) * _FP8_MOST
        exponents = torch.frexp(values).exponent - 1
        steps = torch.ldexp(torch.ones_like(values), exponents.clamp(min=_FP8_LEAST_EXPONENT) - _FP8_MANTISSA)
        rounded = (values / steps + self._shift(values)).floor_() * steps
        return rounded.clamp_(-_FP8_MOST, _FP8_MOST).to(torch.float8_e4m3fn).view(torch.uint8)

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        return _viewed(codes, torch.float8_e4m3fn).to(torch.float32).mul_(scales / _FP8_MOST)


class TopK(Codec):
    """The share `ratio` of the numbers, those of largest size, and where they stand."""

    biased = True

    def __init__(self, ratio: float, item_bytes: int) -> None:
        self._ratio, self._item = ratio, item_bytes

    def _kept(self, numbers: int) -> int:
        return min(numbers, max(1, round(numbers * self._ratio)))

    def size(self, numbers: int) -> int:
        return self._kept(numbers) * (self._item + 4)

    def encode(self, rows: Tensor) -> Tensor:
        kept = self._kept(rows.shape[1])
        places = rows.abs().topk(kept, dim=1, sorted=False).indices
        values = rows.gather(1, places).contiguous()
        return torch.cat([values.view(torch.uint8), places.to(torch.int32).view(torch.uint8)], dim=1)

    def decode(self, messages: Tensor, numbers: int, dtype: torch.dtype) -> Tensor:
        split = self._kept(numbers) * self._item
        values = _viewed(messages[:, :split], dtype)
        places = _viewed(messages[:, split:], torch.int32).to(torch.int64)
        found = torch.zeros(len(messages), numbers, dtype=dtype, device=messages.device)
        return found.scatter_(1, places, values)


_NARROW = {"fp16": Narrow(torch.float16), "bf16": Narrow(torch.bfloat16)}
_SCALED = {
    "fp8": Float8(), "int8": Scaled(BITS["int8"]), "int4": Scaled(BITS["int4"]), "int2": Scaled(BITS["int2"]),
    "sign": Signs(),
}  # fmt: skip
_NEAREST = {
    "fp8": Float8(nearest=True), "int8": Scaled(BITS["int8"], nearest=True), "int4": Scaled(BITS["int4"], nearest=True),
}  # fmt: skip


def _padded(rows: Tensor, numbers: int) -> Tensor:
    """Zeros behind each row up to so many numbers."""
    missing = numbers - rows.shape[1]
    return torch.nn.functional.pad(rows, (0, missing)) if missing else rows.contiguous()


def _viewed(messages: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers of `dtype`, copied to where these may begin."""
    found = torch.empty(messages.shape, dtype=torch.uint8, device=messages.device)
    return found.copy_(messages).view(dtype)


def _rounded_up(scales: Tensor) -> Tensor:
    """bfloat16, nowhere below what was given: no number of a group is larger than its scale."""
    near = scales.to(torch.bfloat16)
    return torch.where(near.to(torch.float32) < scales, near * (1 + 2**-7), near)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Bytes of codes below 2^bits, the first in the lowest bits."""
    if bits == 8:
        return codes
    each = 8 // bits
    rows, numbers = codes.shape
    held = torch.nn.functional.pad(codes, (0, -numbers % each)).view(rows, -1, each)
    found = held[:, :, 0].clone()
    for position in range(1, each):
        found |= held[:, :, position] << (position * bits)
    return found


def _unpacked(packed: Tensor, bits: int, numbers: int) -> Tensor:
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    parts = [(packed >> shift) & mask for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(start_dim=1)[:, :numbers]


def _noise(like: Tensor) -> Tensor:
    """Uniform in [0, 1), of every rank its own, and not from the generators that the model draws from."""
    if is_fake(like):
        return torch.zeros_like(like)
    generator = _generators.get(like.device)
    if generator is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        generator = _generators[like.device] = torch.Generator(like.device).manual_seed(_SEED + rank)
    return torch.rand(like.shape, generator=generator, device=like.device)
