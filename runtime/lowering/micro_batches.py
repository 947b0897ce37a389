"""A rank's share of the batch cut into micro-batches, and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from autoparallel.errors import UserError
from autoparallel.planner.capture.losses import named_loss, scalar_losses


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tensor, a tuple or a dict of keyword arguments as positional and keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


Shared = frozenset[tuple[str, int]]  # places in the inputs, and the sizes of dim 0 there


def shared_by_samples(example_inputs: Any) -> Shared:
    """Where the example inputs hold tensors that all samples share: dim 0 is not as large as that of the first tensor."""
    leaves = [
        (keystr(path), leaf.shape[0])
        for path, leaf in tree_flatten_with_path(example_inputs)[0]
        if isinstance(leaf, Tensor) and leaf.dim()
    ]
    return frozenset((place, size) for place, size in leaves if size != leaves[0][1])


@dataclass(frozen=True, slots=True)
class Sequences:
    """Where inputs have sequences of `tokens` tokens: places, and dims there; nowhere where their length is not fixed."""

    tokens: int = 0
    dims: frozenset[tuple[str, int]] = frozenset()

    def check(self, inputs: Any) -> None:
        """Raises UserError for sequences of another length."""
        for path, leaf in tree_flatten_with_path(inputs)[0] if self.dims else ():
            for dim in range(1, leaf.dim() if isinstance(leaf, Tensor) else 0):
                if (keystr(path), dim) in self.dims and leaf.shape[dim] != self.tokens:
                    raise UserError(
                        f"inputs{keystr(path)} has sequences of {leaf.shape[dim]} tokens (shape {tuple(leaf.shape)}), but this phase "
                        f"of the strategy has batch.seq_len = {self.tokens}: give data of that length, or change the strategy"
                    )


def sequences_of(example_inputs: Any, tokens: int) -> Sequences:
    """Where example inputs have sequences of so many tokens (0: of any length)."""
    found = {
        (keystr(path), dim)
        for path, leaf in tree_flatten_with_path(example_inputs)[0]
        if tokens and isinstance(leaf, Tensor)
        for dim in range(1, leaf.dim())
        if leaf.shape[dim] == tokens
    }
    return Sequences(tokens, frozenset(found))


def split(batch: Any, *, micro: int, count: int, what: str, shared: Shared = frozenset()) -> list[Any]:
    """`batch` (a nest of tensors with samples along dim 0) as `count` micro-batches of `micro` samples.

    Tensors of one sample (masks, positions that all samples share) and those at `shared` places go to every
    micro-batch whole. Raises UserError for any other size than `micro * count`.
    """
    share = micro * count
    leaves, _ = tree_flatten_with_path(batch)
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor) or not leaf.dim() or (keystr(path), leaf.shape[0]) in shared:
            continue
        if leaf.shape[0] not in (1, share):
            raise UserError(
                f"{what}{keystr(path)} has {leaf.shape[0]} samples (shape {tuple(leaf.shape)}), but this rank's "
                f"share of the global batch is {share}: {count} micro-batches of {micro}; give that many, or "
                "plan for another batch.global or batch.micro"
            )

    def part(index: int) -> Any:
        def cut(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0 or tensor.shape[0] != share:
                return tensor
            return tensor[index * micro : (index + 1) * micro]

        return tree_map_only(Tensor, cut, batch)

    return [part(index) for index in range(count)]


def to_device(batch: Any, device: torch.device) -> Any:
    """Every tensor of a nest on `device`."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def loss_of(output: Any) -> Tensor:
    """The loss in a module's output: the output itself, its `.loss`, its item "loss", or the one number in it that needs a
    gradient. UserError where there is none, or where several could be it."""
    loss, others = named_loss(output), []
    if loss is None:
        others = scalar_losses(output)
        loss = others[0] if len(others) == 1 else None
    if loss is not None:
        return loss.reshape(())
    shown = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    if others:
        shown += f" with {len(others)} numbers that need gradients, any of which could be it"
    raise UserError(
        f"step() without loss_fn needs a model whose output is a scalar loss, has `.loss` or an item 'loss', or holds one number "
        f"that needs a gradient; it returned {shown}: pass loss_fn, or labels among the inputs"
    )


def scalar(value: Any) -> Tensor:
    """What a `loss_fn` returned, as a scalar; UserError for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.reshape(())
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise UserError(f"loss_fn returned {shown}: return one number, such as the mean over the micro-batch")
