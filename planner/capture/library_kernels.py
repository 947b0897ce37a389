"""Kernels of other libraries that a model's code calls where they are installed, and writes out in torch where they are not: priced is
the kernel (`scans.py`, `delta_rules.py`), as whoever trains such a model installs it.

Found are the functions for which transformers looks in such a library: state-space models' in mamba_ssm and causal_conv1d, delta rules'
in flash-linear-attention.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoparallel.planner.capture.delta_rules import chunk_gated_delta_rule, chunk_kda
from autoparallel.planner.capture.one_call import OneCall, Work
from autoparallel.planner.capture.recurrent import CELLS, shape_of
from autoparallel.planner.capture.scans import (
    causal_conv1d_fn,
    mamba_chunk_scan_combined,
    mamba_inner_fn,
    mamba_split_conv1d_scan_combined,
    selective_scan_fn,
)
from autoparallel.planner.capture.trees import mapped, tensors

# The library that has each, and what a call of it does.
_KNOWN: Mapping[str, tuple[str, Callable[..., Work]]] = {
    "selective_scan_fn": ("mamba_ssm", selective_scan_fn),
    "mamba_inner_fn": ("mamba_ssm", mamba_inner_fn),
    "causal_conv1d_fn": ("causal_conv1d", causal_conv1d_fn),
    "mamba_chunk_scan_combined": ("mamba_ssm", mamba_chunk_scan_combined),
    "mamba_split_conv1d_scan_combined": ("mamba_ssm", mamba_split_conv1d_scan_combined),
    "chunk_gated_delta_rule": ("flash-linear-attention", chunk_gated_delta_rule),
    "chunk_kda": ("flash-linear-attention", chunk_kda),
}
PACKAGES: Mapping[str, str] = {name: package for name, (package, _) in _KNOWN.items()}
WORKS: Mapping[str, Callable[..., Work]] = {name: work for name, (_, work) in _KNOWN.items()}
_CHANNELS_FIRST = frozenset({"selective_scan_fn", "causal_conv1d_fn"})
_PAIRS = frozenset({"chunk_gated_delta_rule", "chunk_kda"})  # which return a last state, or None, as well
_LOOKED_UP = "func_name"  # what transformers calls a kernel by, in the function that looks for it


def _kernel(name: str) -> Callable[..., Any]:
    """The function of that name whose call is the library's kernels."""

    def kernel(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        given = signature(WORKS[name]).bind(*args, **kwargs).arguments
        given.pop("rest", None)
        made: tuple[Tensor, ...] = OneCall.apply(WORKS[name](*args, **kwargs), *tensors(given))
        return made

    kernel.__name__ = kernel.__qualname__ = name
    return kernel


KERNELS: Mapping[str, Callable[..., Any]] = {name: _kernel(name) for name in _KNOWN}
_CALLS: dict[object, str] = {kernel: name for name, kernel in KERNELS.items()}
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


def is_library_call(function: object) -> bool:
    """Whether a mode over torch's functions is told of a call that such a kernel runs, as a whole."""
    return function in _CALLS or bool(looked_up(function))


def sequence_dim(function: object, args: Sequence[Any]) -> int | None:
    """The dim of its first result that is the sequence, of a function that goes over the sequence in one call; None for others."""
    if shape_of(getattr(function, "__name__", ""), args) is not None:
        return 1 if args[-1] else 0  # batch_first
    name = _CALLS.get(function) or looked_up(function)
    return (2 if name in _CHANNELS_FIRST else 1) if name else None


# The names of a module of code, one of them, the function there.
Place = tuple[dict[str, Any], str, Callable[..., Any]]


def lookups(module: nn.Module) -> tuple[Place, ...]:
    """Where the code of the module's classes looks for such kernels."""
    found: list[Place] = []
    for place in dict.fromkeys(type(part).__module__ for part in module.modules()):
        names = vars(sys.modules[place]) if place in sys.modules else {}
        found += [(names, key, own) for key, own in names.items() if looked_up(own) in KERNELS]
    return tuple(found)


def library_kernels(module: nn.Module) -> AbstractContextManager[None]:
    """While inside, what the code of the module's classes looks for among KERNELS is found: modes over torch's functions see one call."""
    return _instead(lookups(module), _priced)


def called_whole(places: Sequence[Place]) -> AbstractContextManager[None]:
    """While inside, modes over torch's functions see one call of these functions where tensors are in parts: kernels know of none."""
    return _instead(places, _whole)


@contextmanager
def _instead(
    places: Sequence[Place], made: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    # Of several around each other the first has its way.
    taken = [place for place in places if place[0][place[1]] is place[2]]
    try:
        for names, key, own in taken:
            names[key] = made(own)
        yield
    finally:
        for names, key, own in taken:
            names[key] = own


def _priced(own: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, as modes over torch's functions are told of it; the model's own code where there are none."""
    name = looked_up(own)

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.overrides.has_torch_function(tensors((args, kwargs))):
            return own(*args, **kwargs)
        if name in _PAIRS:  # which copy what does not lie in order
            args, kwargs = mapped(_in_order, (args, kwargs))
        given = tensors((args, kwargs))
        made = torch.overrides.handle_torch_function(KERNELS[name], given, *args, **kwargs)
        if len(made) > 1:
            return made
        return (made[0], None) if name in _PAIRS else made[0]

    return call


def _whole(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = tensors((args, kwargs))
        if not any(isinstance(t, DTensor) for t in given) or not torch.overrides.has_torch_function(given):
            return own(*args, **kwargs)
        return torch.overrides.handle_torch_function(own, given, *args, **kwargs)

    return call


def _in_order(given: Any) -> Any:
    return given.contiguous() if isinstance(given, Tensor) else given
