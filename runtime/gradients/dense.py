"""Embeddings whose gradients are sparse: ranks that add, divide or send gradients do so with dense ones."""

from __future__ import annotations

import warnings

from torch import nn


def make_dense(module: nn.Module) -> None:
    """Let the embeddings of `module` have dense gradients, of the same values. A warning tells of those that had sparse ones, as
    torch's optimizers for these refuse dense ones."""
    found = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    ]
    for name in found:
        module.get_submodule(name).sparse = False  # type: ignore[assignment]
    if found:
        others = f" and {len(found) - 1} others" if len(found) > 1 else ""
        warnings.warn(
            f"{found[0]}{others} (sparse=True): gradients of several ranks are dense; give its weights an optimizer for such (not "
            'SparseAdam), or keep its rows elsewhere ([[embedding]] tier = "sharded"), where only those that are looked up are updated',
            stacklevel=2,
        )
