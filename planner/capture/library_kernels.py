"""Kernels of other libraries that a model's code calls where they are installed, and writes out in torch where they are not: priced is
the kernel, as whoever trains such a model installs it.

Known is the selective scan of mamba_ssm (Gu, Dao, "Mamba", arXiv:2312.00752), which transformers' Mamba, FalconMamba and Jamba call:
one kernel each way, which reads what it is given and writes what it returns, keeps its arguments, and states once in 2,048 steps.
Source: mamba_ssm 2.2, ops/selective_scan_interface.py (SelectiveScanFn) and csrc/selective_scan.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoparallel.planner.capture.recurrent import CELLS

SCAN = "selective_scan_fn"
_CHUNK = 2048  # steps between states that the scan keeps
_LOOKED_UP = "func_name"  # what transformers calls a kernel by, in the function that looks for it


class SelectiveScan(torch.autograd.Function):
    """What the scan returns and keeps. Shapes alone."""

    @staticmethod
    def forward(ctx: Any, gated: bool, *given: Tensor) -> Tensor:
        rows, states = given[0], given[2]
        out = torch.empty_like(rows)
        chunks = -(-rows.shape[-1] // _CHUNK)
        kept = rows.new_empty((*rows.shape[:2], chunks, 2 * states.shape[-1]), dtype=torch.float32)
        ctx.save_for_backward(*given, kept, *((out,) if gated else ()))  # before the gate
        ctx.given = len(given)
        return torch.empty_like(out) if gated else out

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors[: ctx.given]
        wanted = zip(given, ctx.needs_input_grad[1:], strict=True)
        return (None, *(torch.empty_like(t) if needed else None for t, needed in wanted))


def selective_scan_fn(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,  # noqa: N803  as there
    delta_bias: Tensor | None = None, **rest: Any,
) -> Any:  # fmt: skip
    """Same signature as mamba_ssm's: `u`, `delta`, `z` of (samples, width, steps), `A` (width, states), `B`, `C` (samples, states, steps)."""
    given = [t for t in (u, delta, A, B, C, D, z, delta_bias) if t is not None]
    out = SelectiveScan.apply(z is not None, *given)
    if rest.get("return_last_state"):
        return out, u.new_empty((u.shape[0], u.shape[1], A.shape[1]))
    return out


KERNELS: Mapping[str, Callable[..., Any]] = {SCAN: selective_scan_fn}
ONE_CALL = frozenset({*CELLS, *KERNELS})  # functions that run all steps


def looked_up(function: object) -> str:
    """The name by which transformers looks for a kernel to run instead of this function; "" for all others."""
    if not isinstance(function, FunctionType) or _LOOKED_UP not in function.__code__.co_freevars:
        return ""
    return str(
        dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))[
            _LOOKED_UP
        ].cell_contents
    )


@contextmanager
def library_kernels(module: nn.Module) -> Iterator[None]:
    """While inside, what the code of the module's classes looks for among KERNELS is found: modes over torch's functions see one call."""
    found: list[tuple[dict[str, Any], str, Any]] = []
    for place in dict.fromkeys(type(part).__module__ for part in module.modules()):
        names = vars(sys.modules[place]) if place in sys.modules else {}
        found += [(names, key, own) for key, own in names.items() if looked_up(own) in KERNELS]
    try:
        for names, key, own in found:
            names[key] = _told(KERNELS[looked_up(own)], own)
        yield
    finally:
        for names, key, own in found:
            names[key] = own


def _told(kernel: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, as modes over torch's functions are told of it; the model's own code where there are none."""

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        if not torch.overrides.has_torch_function(tensors) or any(isinstance(t, DTensor) for t in tensors):
            return own(*args, **kwargs)
        return torch.overrides.handle_torch_function(kernel, tensors, *args, **kwargs)

    return call
