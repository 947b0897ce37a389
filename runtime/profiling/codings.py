"""What encoding and decoding gradients takes, method by method: the runtime's own codecs, with error feedback."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from autoparallel.costmodel.program import Kernel
from autoparallel.runtime.gradients.codecs import codec_of
from autoparallel.runtime.gradients.feedback import Memory, encoded
from autoparallel.runtime.profiling.case import Case, random
from autoparallel.runtime.profiling.timing import Call, on_accelerator

METHODS = ("fp16", "bf16", "fp8", "int8", "int4", "int2", "sign", "topk:0.01")
RANK = 4  # of PowerSGD
ROWS = 4  # ranks that each get a message
SIDE = {False: 1024, True: 4096}  # numbers of a row, by rows of a square


def coding_cases() -> Iterator[Case]:
    """One for each method, of as many bytes as a bucket has; the label is what `fit_device` reads."""
    side = SIDE[on_accelerator()]
    size = 4 * side * side
    kernels = (Kernel(kind="compress", dtype="fp32", flops=0, bytes_moved=4 * size),)
    for method in METHODS:
        make = partial(_coding, method, side)
        yield Case(family="coding", label=f"{method} of {size}", kernels=kernels, make=make)
    yield Case(
        family="coding", label=f"powersgd:{RANK} of {size}", kernels=kernels, make=partial(_factors, side)
    )


def _coding(method: str, side: int) -> Call:
    rows, memory, codec = random(ROWS, side * side // ROWS), Memory(), codec_of(method, 4)
    assert codec is not None

    def run() -> None:
        codec.decode(encoded(rows, codec, memory, "scatter"), rows.shape[1], rows.dtype)

    return run


def _factors(side: int) -> Call:
    matrix, factor = random(side, side), random(side, RANK)

    def run() -> None:
        basis = torch.linalg.qr(matrix @ factor).Q
        torch.sub(matrix, basis @ (matrix.T @ basis).T)

    return run
