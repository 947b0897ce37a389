"""Times kernels drawn at random on the accelerator that is here: what the cost model prices, one call each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoparallel.costmodel.graph import OpKind
from autoparallel.costmodel.program import AttentionShape, Kernel
from autoparallel.runtime.lowering.lower import torch_dtype
from autoparallel.runtime.profiling.case import Case, random
from autoparallel.runtime.profiling.timing import Call, measure_s

ATEN = torch.ops.aten
BUDGET_S = 0.02
WIDTHS = (512, 768, 1024, 1280, 1600, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 11008, 14336, 16384, 28672)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
HEADS = ((64, 64), (64, 64), (80, 80), (96, 96), (128, 128), (128, 128), (128, 128), (192, 128), (256, 256))


def product(rng: Random, dtype: str) -> Case:
    """A linear layer's forward, or the product of one of its gradients."""
    m, n, k = rng.choice(TOKENS), rng.choice(WIDTHS), rng.choice(WIDTHS)
    if rng.random() < 0.2:  # sizes that no tile divides
        m, n, k = (max(64, round(size * rng.uniform(0.6, 1.4) / 8) * 8) for size in (m, n, k))
    while 2.0 * m * n * k > (4e12 if dtype == "bf16" else 1e12):
        m, n, k = m // 2, n, k
        if m < 64:
            m, n, k = 4096, 1024, 1024
    side = rng.choice(("forward", "input", "weight"))
    layout = {"forward": (m, n, k), "input": (m, k, n), "weight": (n, k, m)}[side]
    return _product_case(1, *layout, dtype, side)


def batched_product(rng: Random, dtype: str) -> Case:
    """One for each head or expert."""
    batch = rng.choice((8, 16, 32, 64, 128, 256))
    m, n, k = (
        rng.choice((128, 256, 512, 1024, 2048)),
        rng.choice((128, 256, 512, 1024)),
        rng.choice((64, 128, 256, 1024)),
    )
    while 2.0 * batch * m * n * k > 2e12:
        batch //= 2
    return _product_case(batch, m, n, k, dtype, "forward")


def _product_case(batch: int, m: int, n: int, k: int, dtype: str, side: str) -> Case:
    kind = torch_dtype(dtype)
    kernel = Kernel(
        kind=OpKind.GEMM, dtype=dtype, flops=2 * batch * m * n * k, product=(batch, m, n, k),
        bytes_moved=kind.itemsize * batch * (m * k + k * n + m * n),
    )  # fmt: skip

    def make() -> Call:
        if batch > 1:
            a, b = random(batch, m, k, dtype=kind), random(batch, k, n, dtype=kind)
            return lambda: torch.bmm(a, b)
        if side == "forward":
            x, w = random(m, k, dtype=kind), random(n, k, dtype=kind)
            return lambda: torch.mm(x, w.t())
        if side == "input":
            x, w = random(m, k, dtype=kind), random(k, n, dtype=kind)
            return lambda: torch.mm(x, w)
        g, x = random(k, m, dtype=kind), random(k, n, dtype=kind)
        return lambda: torch.mm(g.t(), x)

    return Case(family="matmul", label=side, kernels=(kernel,), make=make)


def eight_bits(rng: Random) -> Case:
    """A product in fp8 with one scale a tensor, casts apart."""
    m, n, k = rng.choice(TOKENS[1:]), rng.choice(WIDTHS[2:]), rng.choice(WIDTHS[2:])
    while 2.0 * m * n * k > 6e12:
        m //= 2
    kernel = Kernel(
        kind=OpKind.GEMM,
        dtype="fp8",
        flops=2 * m * n * k,
        product=(1, m, n, k),
        bytes_moved=m * k + k * n + 2 * m * n,
    )

    def make() -> Call:
        x = random(m, k).to(torch.float8_e4m3fn)
        w = random(n, k).to(torch.float8_e4m3fn)
        one = torch.ones((), device=x.device)
        return lambda: torch._scaled_mm(
            x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return Case(family="matmul", label="fp8, no casts", kernels=(kernel,), make=make)


def grouped(rng: Random) -> Case:
    """Experts' products in one call, as `transformers` and torchtitan run them."""
    experts, m = rng.choice((4, 8, 16, 32, 64)), rng.choice((64, 128, 256, 512, 1024, 2048))
    n, k = rng.choice(WIDTHS[2:12]), rng.choice(WIDTHS[2:12])
    while 2.0 * experts * m * n * k > 4e12:
        experts, m = max(4, experts // 2), max(64, m // 2)
        n = n // 2 if 2.0 * experts * m * n * k > 4e12 else n
    kernel = Kernel(
        kind=OpKind.GROUPED_GEMM, dtype="bf16", flops=2 * experts * m * n * k, product=(experts, m, n, k),
        bytes_moved=2 * experts * (m * k + k * n + m * n),
    )  # fmt: skip

    def make() -> Call:
        x, w = (
            random(experts * m, k, dtype=torch.bfloat16),
            random(experts, n, k, dtype=torch.bfloat16).transpose(1, 2),
        )
        ends = torch.arange(1, experts + 1, device=x.device, dtype=torch.int32) * m
        return lambda: torch._grouped_mm(x, w, offs=ends)

    return Case(family="group_matmul", label="forward", kernels=(kernel,), make=make)


def attention(rng: Random, back: bool, dtype: str) -> Case:
    """scaled_dot_product_attention as torch chooses it."""
    length, (size, value) = rng.choice((256, 512, 1024, 2048, 4096, 8192)), rng.choice(HEADS)
    heads = rng.choice((8, 12, 16, 25, 32, 40))
    kv_heads = heads if rng.random() < 0.5 else next(n for n in (8, 5, 4, 1) if heads % n == 0)
    batch = max(1, rng.choice((4096, 8192, 16384)) // length)
    causal = rng.random() < 0.6
    shape = AttentionShape(
        batch=batch, heads=heads, kv_heads=kv_heads, query_length=length, key_length=length, head_size=size,
        value_size=value, causal=causal, flash=True,
    )  # fmt: skip
    pairs = 2 * batch * heads * length * length
    kind = torch_dtype(dtype)
    kernel = Kernel(
        kind=OpKind.ATTENTION, dtype=dtype, flops=pairs * ((3 * size + 2 * value) if back else (size + value)),
        bytes_moved=kind.itemsize * batch * length * (heads + kv_heads) * (size + value) * (1 + back), attention=shape,
        backward=back,
    )  # fmt: skip

    def make() -> Call:
        q, k, v = (
            random(batch, n, length, d, dtype=kind).requires_grad_()
            for n, d in ((heads, size), (kv_heads, size), (kv_heads, value))
        )

        def attend() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)

        if not back:
            return attend
        y = attend()
        g = torch.randn_like(y)
        return lambda: torch.autograd.grad(y, (q, k, v), g, retain_graph=True)

    return Case(family="sdp_bwd" if back else "sdp_fwd", label="", kernels=(kernel,), make=make)


def passes(rng: Random, kind: str, dtype: str) -> Case:
    """One memory-bound operator over activations, in the dtype of activations."""
    rows, width, of = rng.choice(TOKENS[1:]), rng.choice(WIDTHS[:10]), torch_dtype(dtype)
    size = of.itemsize * rows * width
    moved, run = PASSES[kind]
    kernel = Kernel(kind=KINDS[kind], dtype=dtype, flops=0, bytes_moved=round(size * moved))

    def make() -> Call:
        x, y, w = random(rows, width, dtype=of), random(rows, width, dtype=of), random(width, dtype=of)
        return lambda: run(x, y, w)

    return Case(family=f"memory.{kind}", label=kind, kernels=(kernel,), make=make)


def _norm_backward(x: Tensor, g: Tensor, w: Tensor) -> object:
    mean, inverse = (torch.ones(len(x), 1, device=x.device, dtype=torch.float32) for _ in range(2))
    return ATEN.native_layer_norm_backward(g, x, w.shape, mean, inverse, w, w, [True] * 3)


# Times the size of the tensor that it moves, and what runs.
PASSES: dict[str, tuple[float, Callable[..., object]]] = {
    "add": (3, lambda x, y, _: x + y),
    "mul": (3, lambda x, y, _: x * y),
    "gelu": (2, lambda x, *_: F.gelu(x)),
    "gelu_backward": (3, lambda x, y, _: ATEN.gelu_backward(y, x)),
    "silu": (2, lambda x, *_: F.silu(x)),
    "cast": (3, lambda x, *_: x.to(torch.float32 if x.dtype != torch.float32 else torch.bfloat16)),
    "layer_norm": (2, lambda x, _, w: torch.native_layer_norm(x, w.shape, w, w, 1e-5)),
    "layer_norm_backward": (3, _norm_backward),
    "softmax": (2, lambda x, *_: x.softmax(-1)),
    "sum_rows": (1, lambda x, *_: x.sum(0)),
    "mean_square": (1, lambda x, *_: x.mean(-1)),
    "dropout": (2.5, lambda x, *_: torch.native_dropout(x, 0.1, True)),
    "clone": (2, lambda x, *_: x.clone()),
    "cat": (2, lambda x, *_: torch.cat((x[:, ::2], x[:, 1::2]), 1)),
    "transpose": (2, lambda x, *_: x.t().contiguous()),
}
KINDS: dict[str, OpKind | str] = {
    **dict.fromkeys(("add", "mul", "gelu", "gelu_backward", "silu"), OpKind.ELEMENTWISE),
    "cast": OpKind.COPY, "layer_norm": OpKind.NORM, "layer_norm_backward": OpKind.NORM, "softmax": OpKind.SOFTMAX,
    "sum_rows": OpKind.REDUCTION, "mean_square": OpKind.REDUCTION, "dropout": OpKind.DROPOUT, "clone": OpKind.COPY,
    "cat": OpKind.COPY, "transpose": OpKind.COPY,
}  # fmt: skip


def drawn(seed: int) -> Iterator[Case]:
    """Some two hundred kernels."""
    rng = Random(seed)
    yield from (product(rng, "bf16") for _ in range(48))
    yield from (product(rng, "fp32") for _ in range(10))
    yield from (product(rng, "tf32") for _ in range(10))
    yield from (batched_product(rng, rng.choice(("bf16", "bf16", "fp32"))) for _ in range(14))
    yield from (eight_bits(rng) for _ in range(12))
    yield from (grouped(rng) for _ in range(14))
    for back in (False, True):
        yield from (attention(rng, back, "bf16") for _ in range(20))
        yield from (attention(rng, back, "fp32") for _ in range(3))
    for kind in PASSES:
        yield from (passes(rng, kind, dtype) for dtype in ("bf16", "bf16", "fp32"))


def measure_kernels(seed: int, out: Path) -> None:
    """A line of JSON for each."""
    with out.open("w", encoding="utf-8") as file:
        for case in drawn(seed):
            kernel = case.kernels[0]
            torch.backends.cuda.matmul.allow_tf32 = kernel.dtype == "tf32"
            shape = asdict(kernel.attention) if kernel.attention else {}
            row: dict[str, Any] = {
                "op": case.family, "label": case.label, "dtype": kernel.dtype, "kind": str(kernel.kind), "flops": kernel.flops,
                "bytes": kernel.bytes_moved, "product": kernel.product, "attention": shape, "backward": kernel.backward,
            }  # fmt: skip
            try:
                row["seconds"] = measure_s(case.calls(), budget_s=BUDGET_S)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            torch.cuda.empty_cache()
            file.write(json.dumps(row) + "\n")
            file.flush()
