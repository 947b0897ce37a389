"""The model's own code as it is written, where people have it compiled: what a compiler makes of it, it makes again where it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def as_written() -> Iterator[None]:
    """While inside, `torch.compile` compiles nothing, and functions of `torch.jit.script` run as the Python that they were
    made of."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nobody has had anything compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_unscripted())
        yield


@contextmanager
def _unscripted() -> Iterator[None]:
    kind: Any = torch.jit.ScriptFunction
    own = kind.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        return (getattr(function, "_torchdynamo_inline", None) or (lambda *a, **k: own(function, *a, **k)))(
            *args, **kwargs
        )

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = own


def casts() -> bool:
    """Whether the code that runs has `torch.autocast` on, for devices of some kind."""
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda", "xpu")))
