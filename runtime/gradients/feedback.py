"""What the reductions of one buffer remember from step to step: error feedback, and what follows from it.

A biased method leaves out of what it sends what a codec makes too small. It is kept, and added to what is sent the next
time: in the long run everything arrives (Karimireddy et al., 2019). Both ends do so: a rank for its own gradients, and
the rank that sends on the mean of a part for that mean (DoubleSqueeze, Tang et al., 2019).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.costmodel.compression import Method, parse_method
from autoparallel.runtime.gradients.codecs import Codec, codec_of
from autoparallel.runtime.torch_private import is_fake

# Of a ratio that follows the residual: it doubles while the residual's norm is above the first multiple of the gradients'
# norm, and halves while it is below the second. Kind: choice.
RESIDUAL_HIGH, RESIDUAL_LOW = 4.0, 2.0


@dataclass(slots=True, kw_only=True, eq=False)
class Memory:
    """The state of one buffer's reductions, of its own on every rank; `across` is that of the outer level of two."""

    residuals: dict[str, Tensor] = field(default_factory=dict)  # by phase, as large as what is sent in it
    factor: Tensor | None = None  # PowerSGD's, of the last step
    ratio: float = 0.0  # top-k's, where it follows the residual
    norms: tuple[Tensor, dist.Work | None] | None = None  # squares, of the residual and of the gradients
    _across: Memory | None = None

    @property
    def across(self) -> Memory:
        if self._across is None:
            self._across = Memory()
        return self._across

    def tensors(self) -> list[Tensor]:
        """All residuals, the outer level's included."""
        own = list(self.residuals.values())
        return own + (self._across.tensors() if self._across is not None else [])


def corrected(numbers: Tensor, memory: Memory, phase: str) -> Tensor:
    """`numbers` and what was left out of them the last time; anew where they are of another shape (a unit whose
    parameters did not all get a gradient)."""
    before = memory.residuals.get(phase)
    return numbers if before is None or before.shape != numbers.shape else numbers + before


def keep(memory: Memory, phase: str, wanted: Tensor, sent: Tensor) -> None:
    """Remember what of `wanted` is not in `sent`. A number that is none is not carried on: one overflow would stay."""
    memory.residuals[phase] = torch.nan_to_num_(wanted - sent, nan=0.0, posinf=0.0, neginf=0.0)


def encoded(rows: Tensor, codec: Codec, memory: Memory, phase: str) -> Tensor:
    """Messages of `rows`, one each, with error feedback where the codec is biased."""
    if not codec.biased:
        return codec.encode(rows)
    wanted = corrected(rows, memory, phase)
    messages = codec.encode(wanted)
    keep(memory, phase, wanted, codec.decode(messages, rows.shape[1], rows.dtype))
    return messages


def current_codec(text: str, rows: Tensor, memory: Memory) -> Codec | None:
    """The codec for rows of an exchange; None where they travel as they are: no method, or one that would not make less
    of so few numbers. The same on every rank, for rows of the same shape."""
    method = parse_method(text)
    ratio = _ratio(method, memory) if method.name == "topk" and method.least < method.amount else None
    codec = codec_of(text, rows.element_size(), ratio)
    least = codec_of(text, rows.element_size())
    if codec is None or least is None or least.size(rows.shape[1]) >= rows.shape[1] * rows.element_size():
        return None
    return codec


def follow_residual(text: str, rows: Tensor, group: dist.ProcessGroup, memory: Memory) -> None:
    """Start to tell the group how large residuals and gradients are, where top-k's ratio follows them."""
    method = parse_method(text)
    if method.name != "topk" or method.least == method.amount or is_fake(rows):
        return
    squares = torch.stack([t.float().square().sum() for t in (memory.residuals["scatter"], rows)])
    memory.norms = squares, dist.all_reduce(squares, group=group, async_op=True)


def _ratio(method: Method, memory: Memory) -> float:
    """The ratio of this step, by what the ranks said of the last."""
    if not memory.ratio:
        memory.ratio = method.least
    if memory.norms is not None:
        squares, work = memory.norms
        if work is not None:
            work.wait()
        residual, gradients = squares.sqrt().tolist()
        memory.norms = None
        if residual > RESIDUAL_HIGH * gradients:
            memory.ratio = min(method.amount, 2 * memory.ratio)
        elif residual < RESIDUAL_LOW * gradients:
            memory.ratio = max(method.least, memory.ratio / 2)
    return memory.ratio
