"""Recomputation: repeated blocks, parts of them, or only their attention core, run again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autoparallel.errors import UserError
from autoparallel.planner.capture.kernels import named_kind
from autoparallel.planner.expand.local_memory import PRODUCTS

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
MODES = ("none", "selective", "full", "operators")
_SUMS = frozenset({"reduce_scatter_tensor", "all_reduce"})
_ATTENTION = "_scaled_dot_product_"


class _RecomputeAttention(TorchFunctionMode):
    """Runs every `scaled_dot_product_attention` as a checkpoint: only query, key and value are kept.

    Nothing else changes, so that what autograd keeps never grows (a policy that saves every other operator's
    output would keep more than no recomputation does).
    """

    def __init__(self, attention: str) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention and torch.is_grad_enabled():
            return _checkpoint(func, _same_attention(self._attention), *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attention_kernel(attention: str) -> AbstractContextManager[None]:
    """Inside, attention runs as `execution.attention` says."""
    return sdpa_kernel(SDPBackend.MATH) if attention == "unfused" else nullcontext()


def _checkpoint(forward: Callable[..., Any], contexts: Contexts | None, *args: Any, **kwargs: Any) -> Any:
    """Run `forward` now and again in the backward pass, each in one of the `contexts`."""
    if contexts is not None:
        kwargs = {**kwargs, "context_fn": contexts}
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _same_attention(attention: str) -> Contexts | None:
    """The second run takes the first one's attention kernel: torch's checkpoint keeps autocast and random numbers,
    but not that."""
    return functools.partial(_first_and_again, attention) if attention == "unfused" else None


def _first_and_again(attention: str) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), attention_kernel(attention)


def recompute_blocks(
    module: nn.Module, blocks: Sequence[str], *, mode: str, full: int = 0, attention: str = "flash"
) -> None:
    """Make the blocks at these paths recompute: the first `full` of them wholly, the others by `mode`.

    `attention` is `execution.attention`. In place, by an instance-level `forward`: names, hooks and class stay.
    """
    if mode not in MODES:
        raise UserError(f'recompute.mode = "{mode}": choose one of {", ".join(MODES)}')
    for position, path in enumerate(blocks):
        block = module.get_submodule(path)
        own = "full" if position < full else mode
        if own == "full":
            block.forward = _recomputed(block.forward, _same_attention(attention))
        elif own == "operators":
            block.forward = _recomputed(block.forward, _keeping_products)
        elif own == "selective":
            block.forward = _attention_recomputed(block.forward, attention)


def _recomputed(forward: Callable[..., Any], contexts: Contexts | None) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return _checkpoint(forward, contexts, *args, **kwargs)

    return run


def _attention_recomputed(forward: Callable[..., Any], attention: str) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _RecomputeAttention(attention):
            return forward(*args, **kwargs)

    return run


def _policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    """Keep the results of matrix products, of attention and of sums over ranks; run all else again."""
    name = operator.name().partition("::")[2].partition(".")[0]
    kept = named_kind(name) in PRODUCTS or name in _SUMS or name.startswith(_ATTENTION)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_keeping_products: Contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
