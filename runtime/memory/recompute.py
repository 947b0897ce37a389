"""Recomputation: repeated blocks, parts of them, or only their attention core, run again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autoparallel.errors import UserError
from autoparallel.planner.capture.again import Ours
from autoparallel.planner.capture.heads import MULTI_HEAD
from autoparallel.planner.capture.kernels import named_kind
from autoparallel.planner.capture.opened import multi_head
from autoparallel.planner.capture.values import storage_key
from autoparallel.planner.expand.local_memory import PRODUCTS
from autoparallel.runtime.memory.written_buffers import Contexts, MadeAnew, WrittenBuffers
from autoparallel.runtime.own_checkpoints import is_inside
from autoparallel.runtime.torch_private import looked_up_alone, run_again

MODES = ("none", "selective", "full", "operators")
_SUMS = frozenset({"reduce_scatter_tensor", "all_reduce"})
# By way of `scaled_dot_product_attention`, and as a causal bias that starts elsewhere calls the kernels.
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_forward", "_efficient_attention_forward")


class _RecomputeAttention(TorchFunctionMode):
    """Runs every `scaled_dot_product_attention` as a checkpoint: only query, key and value are kept.

    Nothing else changes, so that what autograd keeps never grows (a policy that saves every other operator's
    output would keep more than no recomputation does).
    """

    def __init__(self, attention: str) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_inside():  # of a checkpoint of the model's own code, which runs it again
            return func(*args, **(kwargs or {}))
        if func is torch.nn.functional.scaled_dot_product_attention and torch.is_grad_enabled():
            return _checkpoint(func, _same_attention(self._attention), *args, **(kwargs or {}))
        if (
            func is MULTI_HEAD and not torch.compiler.is_compiling()
        ):  # which does not see through a mode in there
            with self:
                return multi_head(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attention_kernel(attention: str) -> AbstractContextManager[None]:
    """Inside, attention runs as `execution.attention` says."""
    return sdpa_kernel(SDPBackend.MATH) if attention == "unfused" else nullcontext()


def _checkpoint(forward: Callable[..., Any], contexts: Contexts | None, *args: Any, **kwargs: Any) -> Any:
    """Run `forward` now and again in the backward pass, each in one of the `contexts`."""
    if contexts is not None:
        kwargs = {**kwargs, "context_fn": contexts}
    return checkpoint(Ours(forward), *args, use_reentrant=False, **kwargs)


def _same_attention(attention: str) -> Contexts | None:
    """The second run takes the first one's attention kernel: torch's checkpoint keeps autocast and random numbers,
    but not that."""
    return functools.partial(_first_and_again, attention) if attention == "unfused" else None


def _first_and_again(attention: str) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), MadeAnew(functools.partial(attention_kernel, attention))


def recompute_blocks(
    module: nn.Module, blocks: Sequence[str], *, mode: str, full: int = 0, attention: str = "flash",
    always: Collection[str] = (),
) -> None:  # fmt: skip
    """Make the blocks at these paths recompute: the first `full` of them, and those of `always`, wholly, the others by `mode`.

    `attention` is `execution.attention`. In place, by an instance-level `forward`: names, hooks and class stay.
    """
    if mode not in MODES:
        raise UserError(f'recompute.mode = "{mode}": choose one of {", ".join(MODES)}')
    assert len(set(blocks)) == len(blocks), (
        "a checkpoint in a checkpoint of the same attention has wrong gradients"
    )
    for position, path in enumerate(blocks):
        block = module.get_submodule(path)
        own = "full" if position < full or path in always else mode
        if own == "full":
            block.forward = _recomputed(path, block, _same_attention(attention))
        elif own == "operators":
            block.forward = _recomputed(path, block, functools.partial(_keeping_products, path))
        elif own == "selective":
            block.forward = _attention_recomputed(block.forward, attention)


def _recomputed(path: str, block: nn.Module, contexts: Contexts | None) -> Callable[..., Any]:
    first, forward = True, block.forward
    if next(block.buffers(), None) is not None:
        contexts = WrittenBuffers(path, block).contexts(contexts)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        if not torch.is_grad_enabled() or is_inside():
            return forward(*args, **kwargs)
        before = _remembered((args, kwargs)) if first else None
        output = _checkpoint(forward, contexts, *args, **kwargs)
        if before and before != _remembered((args, kwargs)):
            raise UserError(
                f"{path} is to be recomputed, but changes what it is called with, which a second run would change again: "
                'if that is a cache of keys and values, set use_cache = False in the config; else recompute.mode = "none"'
            )
        first = False
        return output

    return run


def _remembered(values: Any) -> dict[str, tuple[int, ...]]:
    """The tensors in the attributes of objects that are no tensors, by class and place."""
    objects = [
        v for v in tree_leaves(values) if hasattr(v, "__dict__") and not isinstance(v, Tensor | nn.Module)
    ]
    return {f"{type(o).__name__} {i}": tuple(_held(o, depth=3)) for i, o in enumerate(objects)}


def _held(value: Any, depth: int) -> Iterator[int]:
    """Identities of the tensors in an object, its attributes and theirs."""
    if isinstance(value, Tensor):
        yield id(value)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _held(item, depth)
    elif depth and hasattr(value, "__dict__") and not callable(value):
        for item in vars(value).values():
            yield from _held(item, depth - 1)


def _attention_recomputed(forward: Callable[..., Any], attention: str) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _RecomputeAttention(attention):
            return forward(*args, **kwargs)

    return run


class _Products:
    """Keeps the results of matrix products, of attention and of sums over ranks, but for those that something is
    written into: a second run would start from that. (torch looks at the tensors that it knows, not at a rank's parts.)"""

    def __init__(self, path: str) -> None:
        self._path = path
        self._kept: set[int] = set()
        self._changed: set[int] = set()

    def policy(self, context: Any, operator: Any, *args: Any, **_: Any) -> CheckpointPolicy:
        """Which results are kept."""
        kept = is_kept(operator)
        if not context.is_recompute:
            if kept:
                self._kept |= _storages(getattr(context, "op_output", None))  # torch 2.13 says what it is
            if operator._schema.is_mutable:
                named = zip(args, operator._schema.arguments, strict=False)
                written = [
                    arg for arg, own in named if own.alias_info is not None and own.alias_info.is_write
                ]
                self._changed |= self._kept & _storages(written)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    @contextmanager
    def watched(self, first: AbstractContextManager[Any]) -> Iterator[None]:
        """The context of the first run, with a look at its end."""
        with first:
            yield
        if self._changed and not run_again(first, lambda tensor: bool(self._changed & _storages(tensor))):
            raise UserError(
                f'recompute.mode = "operators": {self._path} writes into the result of a matrix product, which is kept; '
                'choose "full", "selective" or "none"'
            )


def is_kept(operator: Any) -> bool:
    """Whether the results of an operator are kept where operators are recomputed."""
    name = operator.name().partition("::")[2].partition(".")[0]
    return named_kind(name) in PRODUCTS or name in _SUMS or name.startswith(_ATTENTION)


def _storages(values: Any) -> set[int]:
    """What holds the tensors among the values, or this rank's parts of them."""
    found = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    with torch.no_grad():
        return {storage_key(t.to_local() if isinstance(t, DTensor) else t) for t in found}


def _keeping_products(path: str) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    products = _Products(path)
    first, again = create_selective_checkpoint_contexts(products.policy)
    return products.watched(first), looked_up_alone(again, is_kept)
