"""Kernels whose time is that of the bytes they move, and optimizer steps, to measure.

One constant prices a whole kind of kernels, so what belongs together in a step is measured together: forward and
backward of a normalisation, or the element-wise operators that models use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from autoparallel.costmodel.graph import OpKind
from autoparallel.costmodel.kernels import PER_TENSOR
from autoparallel.costmodel.program import Kernel
from autoparallel.runtime.profiling.case import Case, random
from autoparallel.runtime.profiling.timing import Call, device_name, on_accelerator

# Rows of 256 to 1,024 numbers, as activations of small models (a CPU) and of large ones (an accelerator) are.
ROWS = {False: ((256, 192), (512, 384), (1024, 256), (1024, 1024), (4096, 512)),
        True: ((4096, 1024), (4096, 4096), (8192, 4096), (8192, 8192), (16384, 8192))}  # fmt: skip
VOCABULARY = {
    False: ((512, 4096), (512, 8192), (1024, 4096)),
    True: ((4096, 32000), (8192, 50304), (4096, 128256)),
}
IMAGES = {
    False: ((24, 32, 16), (24, 128, 8), (32, 64, 16), (24, 256, 4)),
    True: ((64, 64, 56), (64, 256, 28), (64, 512, 14)),
}
# Parameters of a tensor, and tensors of an optimizer step.
STEPS = {
    False: ((256, 64), (65_536, 24), (262_144, 12), (1_048_576, 6)),
    True: ((1024, 64), (1 << 20, 32), (1 << 24, 12)),
}
COPY_BYTES = {False: 64 << 20, True: 1 << 30}
ADAMW_BYTES = 28  # fp32: reads gradient, reads and writes parameter and two states
FP32 = 4
ATEN = torch.ops.aten

Tensors = Callable[[], tuple[Tensor, ...]]
Operation = Callable[..., object]
Part = tuple[float, Operation]  # times that it moves the size of a tensor, operator

# Residual additions, gates, and activations both ways.
ELEMENTWISE: tuple[Part, ...] = (
    (3, torch.add),
    (3, torch.add),
    (3, torch.mul),
    (3, torch.mul),
    (3, torch.mul),
    (2, lambda x, _: F.gelu(x)),
    (3, ATEN.gelu_backward),
    (2, lambda x, _: F.silu(x)),
    (3, ATEN.silu_backward),
    (2, lambda x, _: torch.relu(x)),
    (3, lambda x, g: ATEN.threshold_backward(g, x, 0)),
)
REDUCTIONS: tuple[Part, ...] = ((1, lambda x: x.sum(0)), (1, lambda x: x.mean(-1)))
COPIES: tuple[Part, ...] = ((2, torch.clone), (2, lambda x: torch.cat((x[:, ::2], x[:, 1::2]), 1)))
CAST: tuple[Part, ...] = ((3, lambda x: x.bfloat16().float()),)


def _whole(kind: OpKind | str, label: str, moved: tuple[int, ...], tensors: Tensors, run: Operation) -> Case:
    """One call that runs a kernel of each of the sizes `moved` (bytes)."""
    kernels = tuple(Kernel(kind=kind, dtype="fp32", flops=0, bytes_moved=size) for size in moved)

    def make() -> Call:
        data = tensors()
        return lambda: run(*data)

    return Case(family=f"memory.{kind}", label=f"{kind} {label}", kernels=kernels, make=make)


def _mixture(kind: OpKind | str, label: str, size: int, tensors: Tensors, parts: tuple[Part, ...]) -> Case:
    """Several operators in turn over tensors of `size` bytes."""

    def run(*data: Tensor) -> list[object]:
        return [operation(*data) for _, operation in parts]

    return _whole(kind, label, tuple(round(size * share) for share, _ in parts), tensors, run)


def copy_case() -> Case:
    """A copy far larger than any cache: the memory's bandwidth."""
    size = COPY_BYTES[on_accelerator()]
    kernel = Kernel(kind=OpKind.COPY, dtype="fp32", flops=0, bytes_moved=2 * size)

    def make() -> Call:
        source, target = random(size // FP32), random(size // FP32)
        return lambda: target.copy_(source)

    return Case(family="bandwidth", label=f"copy of {size >> 20} MiB", kernels=(kernel,), make=make)


def row_cases() -> Iterator[Case]:
    """Element-wise operators, normalisation, softmax, dropout, reduction and copies over activations."""
    for rows, width in ROWS[on_accelerator()]:
        n = rows * width
        size, label = FP32 * n, f"{rows}x{width}"

        def two(rows: int = rows, width: int = width) -> tuple[Tensor, ...]:
            return random(rows, width), random(rows, width)

        def one(rows: int = rows, width: int = width) -> tuple[Tensor, ...]:
            return (random(rows, width),)

        def normed(rows: int = rows, width: int = width) -> tuple[Tensor, ...]:
            return random(rows, width), random(width), random(rows, width)

        yield _mixture(OpKind.ELEMENTWISE, label, size, two, ELEMENTWISE)
        yield _mixture(OpKind.REDUCTION, label, size, one, REDUCTIONS)
        yield _mixture(OpKind.COPY, label, size, one, COPIES)
        yield _mixture("compress", label, size, one, CAST)
        yield _whole(OpKind.NORM, label, (2 * size, 3 * size), normed, _layer_norm)
        yield _whole(OpKind.SOFTMAX, label, (2 * size, 3 * size), two, _softmax)
        yield _whole(OpKind.DROPOUT, label, (2 * size + n,) * 2, two, _dropout)


def vocabulary_cases() -> Iterator[Case]:
    """Cross-entropy and embedding, forward and backward."""
    for rows, words in VOCABULARY[on_accelerator()]:
        size, label, width = FP32 * rows * words, f"{rows}x{words}", 256

        def logits(rows: int = rows, words: int = words) -> tuple[Tensor, ...]:
            return random(rows, words), torch.arange(rows, device=device_name()) % words

        def looked_up(rows: int = rows, words: int = words, width: int = width) -> tuple[Tensor, ...]:
            ids = torch.randint(words, (rows,), device=device_name())
            return random(words, width), ids, random(rows, width)

        taken, table = FP32 * rows * width, FP32 * words * width
        yield _whole(OpKind.CROSS_ENTROPY, label, (2 * size, 2 * size, 3 * size), logits, _cross_entropy)
        yield _whole(OpKind.EMBEDDING, label, (2 * taken, taken + table), looked_up, _embedding)


def image_cases() -> Iterator[Case]:
    """Batch normalisation and pooling, forward and backward."""
    for samples, channels, side in IMAGES[on_accelerator()]:
        size = FP32 * samples * channels * side * side

        def images(s: int = samples, c: int = channels, d: int = side) -> tuple[Tensor, ...]:
            return random(s, c, d, d), random(c), random(s, c, d, d)

        label = f"{samples}x{channels}x{side}²"
        moved = (
            size + 3 * size // 4,
            2 * size + size // 2,
        )  # a quarter comes out, with indices twice its size
        yield _whole(OpKind.POOL, label, moved, images, _pool)
        yield _whole(OpKind.BATCH_NORM, label, (2 * size, 3 * size), images, _batch_norm)


def optimizer_cases() -> Iterator[Case]:
    """AdamW steps over few and many tensors, as `torch.optim.AdamW` runs by default, with gradients in memory
    that is new in every step, as the backward pass leaves them."""
    for size, tensors in STEPS[on_accelerator()]:
        kernels = (
            Kernel(kind="optimizer", dtype="fp32", flops=0, bytes_moved=ADAMW_BYTES * size * tensors),
            Kernel(kind=PER_TENSOR, dtype="fp32", flops=0, bytes_moved=0, count=tensors),
            Kernel(kind=OpKind.COPY, dtype="fp32", flops=0, bytes_moved=FP32 * size, count=tensors),
        )

        def make(size: int = size, tensors: int = tensors) -> Call:
            parameters = [torch.nn.Parameter(random(size)) for _ in range(tensors)]
            optimizer = torch.optim.AdamW(parameters, lr=1e-4)

            def run() -> None:
                optimizer.zero_grad()
                for p in parameters:
                    p.grad = torch.ones_like(p)
                optimizer.step()

            return run

        yield Case(family="optimizer", label=f"AdamW {tensors} tensors of {size}", kernels=kernels, make=make)


def _layer_norm(x: Tensor, w: Tensor, g: Tensor) -> object:
    y, mean, inverse = torch.native_layer_norm(x, w.shape, w, w, 1e-5)
    return y, ATEN.native_layer_norm_backward(g, x, w.shape, mean, inverse, w, w, [True] * 3)


def _batch_norm(x: Tensor, w: Tensor, g: Tensor) -> object:
    y, mean, inverse = torch.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5)
    return y, ATEN.native_batch_norm_backward(g, x, w, None, None, mean, inverse, True, 1e-5, [True] * 3)


def _pool(x: Tensor, *_: Tensor) -> object:
    y, indices = ATEN.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    return y, ATEN.max_pool2d_with_indices_backward(y, x, [3, 3], [2, 2], [1, 1], [1, 1], False, indices)


def _softmax(x: Tensor, g: Tensor) -> object:
    y = x.softmax(-1)
    return y, ATEN._softmax_backward_data(g, y, -1, torch.float32)


def _dropout(x: Tensor, g: Tensor) -> object:
    y, mask = torch.native_dropout(x, 0.1, True)
    return y, mask, ATEN.native_dropout_backward(g, mask, 1.1)


def _embedding(w: Tensor, ids: Tensor, g: Tensor) -> object:
    return F.embedding(ids, w), ATEN.embedding_dense_backward(g, ids, len(w), -1, False)


def _cross_entropy(x: Tensor, target: Tensor) -> object:
    y = x.log_softmax(-1)
    _, weight = ATEN.nll_loss_forward(y, target, None, 1, -100)
    grad = ATEN.nll_loss_backward(torch.ones((), device=x.device), y, target, None, 1, -100, weight)
    return y, ATEN._log_softmax_backward_data(grad, y, 1, torch.float32)
