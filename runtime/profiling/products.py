"""Matrix products, convolutions and attention to measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from autoparallel.costmodel.graph import OpKind
from autoparallel.costmodel.program import AttentionShape, Kernel
from autoparallel.runtime.profiling.case import SHORT, Case, random
from autoparallel.runtime.profiling.timing import Call, on_accelerator

Tensors = Callable[[], list[Tensor]]

# (m, n, k): square ones, and the linear layers of small and middle-sized models at short and long batches.
CPU_PRODUCTS = (
    (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (64, 1024, 1024),
    (128, 256, 1024), (512, 384, 1536), (512, 1536, 384), (1024, 256, 688), (1024, 4096, 256), (392, 576, 192),
)  # fmt: skip
ACCELERATOR_PRODUCTS = (
    (256, 256, 256), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192),
    (2048, 4096, 1024), (4096, 1024, 4096), (8192, 12288, 4096), (4096, 28672, 4096), (16384, 4096, 4096),
    (4096, 4096, 14336), (2048, 32000, 4096), (8192, 5120, 5120), (1024, 8192, 2048), (6144, 6144, 6144),
)  # fmt: skip
# Bottlenecks: (samples, channels, width, side). At least 17 samples: with fewer, on one thread, torch leaves small
# images to a slower path of its own, which is not modelled.
CPU_BOTTLENECKS = (
    (24, 128, 32, 16), (24, 256, 64, 8), (32, 256, 64, 14), (24, 512, 128, 4), (24, 1024, 256, 2), (32, 64, 64, 28),
)  # fmt: skip
ACCELERATOR_BOTTLENECKS = ((64, 256, 64, 56), (64, 512, 128, 28), (64, 1024, 256, 14), (64, 2048, 512, 7))
# (batch, heads, key-value heads, length, head size, causal)
CPU_ATTENTION = (
    (4, 8, 8, 128, 32, True), (4, 8, 8, 256, 32, True), (4, 4, 4, 128, 64, False), (2, 8, 8, 512, 64, True),
    (8, 3, 3, 64, 64, False), (4, 6, 6, 128, 64, True), (1, 8, 8, 1024, 64, True), (2, 4, 4, 256, 128, False),
)  # fmt: skip
ACCELERATOR_ATTENTION = (
    (8, 16, 16, 1024, 64, True), (4, 32, 32, 2048, 128, True), (1, 32, 32, 8192, 128, True),
    (2, 32, 8, 4096, 128, True), (8, 16, 16, 2048, 64, False), (2, 16, 16, 4096, 256, True),
    (16, 12, 12, 512, 64, False), (1, 64, 8, 8192, 128, True),
)  # fmt: skip


def product_cases(dtype: torch.dtype) -> Iterator[Case]:
    """A linear layer's forward, and the products of its backward: the same sizes, transposed."""
    for m, n, k in ACCELERATOR_PRODUCTS if on_accelerator() else CPU_PRODUCTS:
        kernel = Kernel(
            kind=OpKind.GEMM, dtype=SHORT[dtype], flops=2 * m * n * k,
            bytes_moved=dtype.itemsize * (m * k + k * n + m * n), product=(1, m, n, k),
        )  # fmt: skip

        def forward(m: int = m, n: int = n, k: int = k) -> Call:
            x, w = random(m, k, dtype=dtype), random(n, k, dtype=dtype)
            return lambda: torch.mm(x, w.t())

        def weight(m: int = m, n: int = n, k: int = k) -> Call:
            x, g = random(k, n, dtype=dtype), random(k, m, dtype=dtype)
            return lambda: torch.mm(g.t(), x)

        for side, make in (("forward", forward), ("weight", weight)):
            label = f"product {m}x{n}x{k} {SHORT[dtype]} {side}"
            yield Case(family=f"gemm.{SHORT[dtype]}", label=label, kernels=(kernel,), make=make)


def convolution_cases(dtype: torch.dtype) -> Iterator[Case]:
    """The convolutions of a ResNet's bottleneck (1x1, 3x3, 1x1), forward and both gradients: one constant prices
    all of them."""
    for samples, channels, width, side in ACCELERATOR_BOTTLENECKS if on_accelerator() else CPU_BOTTLENECKS:
        layers = (
            (channels, width, 1),
            (width, width, 3),
            (width, channels, 1),
        )  # channels in and out, kernel
        kernels = []
        for c_in, c_out, size in layers:
            m, n, k = samples * side * side, c_out, c_in * size * size
            moved = dtype.itemsize * (m * c_in + m * n + n * k)
            kernels += [
                Kernel(
                    kind=OpKind.CONV, dtype=SHORT[dtype], flops=2 * m * n * k, bytes_moved=moved, product=(1, *p)
                )
                for p in ((m, n, k), (m, k, n), (n, k, m))  # forward, input gradient, weight gradient
            ]  # fmt: skip

        def make(
            samples: int = samples, side: int = side, layers: tuple[tuple[int, int, int], ...] = layers
        ) -> Call:
            data = [
                (
                    random(samples, c_in, side, side, dtype=dtype),
                    random(c_out, c_in, size, size, dtype=dtype),
                    random(samples, c_out, side, side, dtype=dtype),
                )
                for c_in, c_out, size in layers
            ]
            return lambda: [_convolve(*tensors) for tensors in data]

        label = f"bottleneck {samples}x{channels}x{side}², {width} wide"
        yield Case(family="conv", label=label, kernels=tuple(kernels), make=make)


def _convolve(x: Tensor, w: Tensor, g: Tensor) -> object:
    pad = [w.shape[-1] // 2] * 2
    backward = torch.ops.aten.convolution_backward
    return F.conv2d(x, w, padding=pad), backward(
        g, x, w, None, [1, 1], pad, [1, 1], False, [0, 0], 1, [True, True, False]
    )


def attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    """scaled_dot_product_attention, forward and backward."""
    for batch, heads, kv_heads, length, size, causal in (
        ACCELERATOR_ATTENTION if on_accelerator() else CPU_ATTENTION
    ):
        shape = AttentionShape(
            batch=batch, heads=heads, kv_heads=kv_heads, query_length=length, key_length=length, head_size=size,
            value_size=size, causal=causal, flash=True,
        )  # fmt: skip
        moved = dtype.itemsize * batch * length * size * (2 * heads + 2 * kv_heads)
        flops = 4 * batch * heads * length * length * size
        kernel = [
            Kernel(
                kind=OpKind.ATTENTION, dtype=SHORT[dtype], flops=flops * (1 + back), bytes_moved=moved * (1 + back),
                attention=shape, backward=bool(back),
            )
            for back in (0, 1)
        ]  # fmt: skip

        shapes = tuple((batch, n, length, size) for n in (heads, kv_heads, kv_heads))

        def inputs(shapes: tuple[tuple[int, ...], ...] = shapes) -> list[Tensor]:
            return [random(*shape, dtype=dtype).requires_grad_() for shape in shapes]

        def forward(inputs: Tensors = inputs, causal: bool = causal) -> Call:
            q, k, v = inputs()
            return lambda: _attend(q, k, v, causal)

        def backward(inputs: Tensors = inputs, causal: bool = causal) -> Call:
            q, k, v = inputs()
            y = _attend(q, k, v, causal)
            g = torch.randn_like(y)
            return lambda: torch.autograd.grad(y, (q, k, v), g, retain_graph=True)

        label = f"attention {batch}x{heads}x{length}x{size}{' causal' if causal else ''}"
        yield Case(family="attention.forward", label=f"{label} forward", kernels=(kernel[0],), make=forward)
        yield Case(
            family="attention.backward", label=f"{label} backward", kernels=(kernel[1],), make=backward
        )


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
