"""The one file of the runtime that touches torch's private names. Its test says which torch it holds for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

TORCH_VERSIONS = ("2.11", "2.12", "2.13")  # what the names below were read from; tests/runtime checks them


@contextmanager
def exporting_seen_as(exporting: bool) -> Iterator[None]:
    """What `torch.compiler.is_exporting()` answers to the code that is being traced.

    Model libraries build an explicit causal mask under export and leave it to the attention kernel in eager
    mode. The glue of a stage runs eagerly, so it is traced as it would run eagerly.
    """
    before = torch.compiler._is_exporting_flag
    torch.compiler._is_exporting_flag = exporting
    try:
        yield
    finally:
        torch.compiler._is_exporting_flag = before


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once when the backward pass that is running ends (only from within one)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
