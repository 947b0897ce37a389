"""What stands in a captured graph where torch has no function of the kind. Only `after` can run."""

from __future__ import annotations

from typing import Any

import torch


def after(written: torch.Tensor, _call: Any) -> torch.Tensor:
    """The tensor `written` as the call left it."""
    return written


def kept(call: Any, position: int) -> torch.Tensor:
    """The tensor that autograd kept at `position` of what it kept for the call: inside of it, and seen by no other."""
    raise NotImplementedError("what autograd keeps of a call is only known to autograd")


def stand_in(path: str, *inputs: torch.Tensor) -> Any:
    """What the module at `path` returns: it runs as one before it does, and was not traced."""
    raise NotImplementedError(f"{path} was not traced")


def run_whole(path: str, *inputs: torch.Tensor) -> Any:
    """What the module at `path` returns, which cannot be traced."""
    raise NotImplementedError(f"{path} was not traced")


def unnamed(name: str, *args: Any, **kwargs: Any) -> Any:
    """A function called `name` that torch has under no public name."""
    raise NotImplementedError(f"{name} has no public name")
