"""`execution.kernels`: the user's modules as they are, or their repeated blocks through `torch.compile`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import nn


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile finds what it makes code with: a C++ compiler, or Triton beside an accelerator."""
    if device.type != "cpu":
        return find_spec("triton") is not None
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


def compile_blocks(module: nn.Module, blocks: Sequence[str]) -> None:
    """Compile the forward (and with it the backward) of each block, in place: names, hooks and class stay.

    Hooks of sharded data parallelism run around the compiled code, recomputation inside of it.
    """
    for path in blocks:
        block = module.get_submodule(path)
        block.forward = torch.compile(block.forward)
