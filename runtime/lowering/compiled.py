"""`execution.kernels`: the user's modules as they are, or their repeated blocks through `torch.compile`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from autoparallel.errors import UserError
from autoparallel.planner.strategy.types import Strategy


def check_kernels(strategy: Strategy) -> None:
    """Refuse kernels that the runtime does not run; say so where it runs others than were priced."""
    kernels = strategy.execution.kernels
    for axis in ("tp", "cp"):
        if kernels == "compiled" and getattr(strategy.mesh, axis) > 1:
            raise UserError(
                f'execution.kernels = "compiled" with mesh.{axis} > 1: the runtime does not compile blocks that '
                'compute on shards yet; write "eager"'
            )
    if kernels == "fused":
        warnings.warn(
            'execution.kernels = "fused" is what was priced; the module runs with the kernels that it has. Write '
            '"eager" or "compiled" for a prediction of what runs',
            stacklevel=2,
        )


def compile_blocks(module: nn.Module, blocks: Sequence[str]) -> None:
    """Compile the forward (and with it the backward) of each block, in place: names, hooks and class stay.

    Hooks of sharded data parallelism run around the compiled code, recomputation inside of it.
    """
    for path in blocks:
        block = module.get_submodule(path)
        block.forward = torch.compile(block.forward)
