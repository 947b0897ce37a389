"""`execution.kernels`: the user's modules as they are, or their repeated blocks through `torch.compile`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def compile_blocks(module: nn.Module, blocks: Sequence[str]) -> None:
    """Compile the forward (and with it the backward) of each block, in place: names, hooks and class stay.

    Hooks of sharded data parallelism run around the compiled code, recomputation inside of it.
    """
    for path in blocks:
        block = module.get_submodule(path)
        block.forward = torch.compile(block.forward)
