"""The inputs of a dry run, and the loss of what comes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from autoparallel.planner.capture.losses import scalar_losses
from autoparallel.planner.capture.trees import plain, tensors
from autoparallel.runtime.tensor.questions import to_plain


def one_micro_batch(example_inputs: Any, micro: int, casts: Mapping[torch.dtype, torch.dtype]) -> Any:
    """The inputs with `micro` samples, without values, on the meta device, cast as the parameters were."""
    samples = next(
        leaf.shape[0] for leaf in tree_leaves(example_inputs) if isinstance(leaf, Tensor) and leaf.dim()
    )

    def sized(leaf: Tensor) -> Tensor:
        shape = (micro, *leaf.shape[1:]) if leaf.dim() and leaf.shape[0] == samples else leaf.shape
        return torch.empty(shape, dtype=casts.get(leaf.dtype, leaf.dtype), device="meta")

    return tree_map_only(Tensor, sized, example_inputs)


def on_cpu(inputs: Any) -> Any:
    """The inputs of zeros, on the CPU."""
    return tree_map_only(Tensor, lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype), inputs)


def loss_of(output: Any) -> Tensor:
    """The output's loss, or the sum of its losses, as capture sees them; a stand-in where it has none: the sum of the means of
    its floating-point tensors."""
    if losses := scalar_losses(output):
        return sum((to_plain(loss).reshape(()) for loss in losses[1:]), to_plain(losses[0]).reshape(()))  # type: ignore[no-any-return]
    leaves = [leaf for leaf in tensors(plain(output)) if leaf.is_floating_point()]
    return torch.stack([to_plain(leaf).float().mean() for leaf in leaves]).sum()
