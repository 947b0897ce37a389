"""Activations kept on the host: copied out after a block's forward pass, and back when its backward pass needs them.

`offload.activations` is a share of what autograd keeps of each repeated block, in bytes; it is how the planner
prices it. What is kept is told storage by storage (several operators keep the same one, or views of it), in the
order in which the forward pass keeps them: one moves as long as what has moved stays within the share. Parameters,
which are there anyway, stay where they are. Until its forward pass ends, what a block keeps is on the device, so
that copies run beside its kernels, from a stream of their own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from autoparallel.errors import UserError
from autoparallel.planner.strategy.types import Offload
from autoparallel.runtime.memory.host_copies import HostCopies, ImaginedCopies, OffloadCount
from autoparallel.runtime.tensor.questions import local
from autoparallel.runtime.torch_private import laid_out, layout_of, storage_key


def check_offload(offload: Offload) -> None:
    """Refuse what is no share. Raises UserError."""
    for name, share in (("optimizer", offload.optimizer), ("activations", offload.activations)):
        if not 0.0 <= share <= 1.0:
            raise UserError(f"offload.{name} = {share}: a share, from 0 to 1")


def offload_blocks(
    module: nn.Module, blocks: Sequence[str], share: float, device: torch.device, *, imagined: bool = False
) -> OffloadCount:
    """Keep `share` of what the blocks at these paths keep for the backward pass on the host, in place.

    By an instance-level `forward`, around recomputation if there is any (of which the inputs are kept). `imagined`: in a
    dry run.
    """
    count = OffloadCount()
    if share > 0.0:
        kind = ImaginedCopies if imagined else HostCopies
        host, latest = kind(device, count), dict[int, _Keeping]()
        for position, path in enumerate(blocks):
            block = module.get_submodule(path)
            block.forward = _offloaded(block, position, share, host, latest)
    return count


def _offloaded(
    block: nn.Module, position: int, share: float, host: HostCopies, latest: dict[int, _Keeping]
) -> Callable[..., Any]:
    forward = block.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        keeping = _Keeping(block, share, host, before=latest.get(position - 1))
        keeping.leave(tree_leaves((args, kwargs)))
        with saved_tensors_hooks(keeping.pack, _unpack):
            output = forward(*args, **kwargs)
        keeping.finish()
        latest[position] = keeping
        return output

    return run


class _Storage:
    """A storage on the host, and on the device again until all that was kept of it has been used."""

    def __init__(self, host: HostCopies, held: Tensor) -> None:
        self.host, self._copy = host, host.copied_out(held)
        self._there: tuple[Tensor, torch.Event | None] | None = None
        self.uses = 0

    def fetch(self) -> None:
        """Start to bring it back."""
        if self._there is None:
            self._there = self.host.copied_back(self._copy)

    def use(self) -> Tensor:
        """The bytes on the device."""
        self.fetch()
        assert self._there is not None
        held = self.host.arrived(*self._there)
        self.uses -= 1
        if self.uses <= 0:
            self._there = None
        return held


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Moved:
    """A tensor whose storage is on the host."""

    storage: _Storage
    keeping: _Keeping
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    layout: Any  # of a DTensor; None for a plain tensor


class _Keeping:
    """What one forward pass of a block keeps.

    Storages stay alive until it ends, so that none is mistaken for another one at the same address.
    """

    def __init__(self, block: nn.Module, share: float, host: HostCopies, before: _Keeping | None) -> None:
        self._block, self._share, self._host = block, share, host
        self._before = weakref.ref(before) if before is not None else None
        self._alive: list[Tensor] = []
        self._known: dict[int, _Storage | None] = {}
        self._moved: list[weakref.ref[_Storage]] = []
        self._seen_bytes = self._moved_bytes = 0

    def leave(self, inputs: Iterable[Any]) -> None:
        """Masks and tables of positions are every block's: they stay where they are."""
        shared = [t for t in inputs if isinstance(t, Tensor) and not t.requires_grad]
        self._alive += shared
        self._known |= dict.fromkeys((storage_key(local(tensor)) for tensor in shared), None)

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in place of `tensor`."""
        part = local(tensor)
        if part.device != self._host.device:  # seeds of attention's dropout are on the host already
            return tensor
        key = storage_key(part)
        if key not in self._known:
            self._known[key] = self._decide(part, key)
        storage = self._known[key]
        if storage is None:
            return tensor
        storage.uses += 1
        return _Moved(
            storage=storage, keeping=self, dtype=part.dtype, shape=part.shape, stride=part.stride(),
            offset=int(part.storage_offset()), layout=layout_of(tensor),
        )  # fmt: skip

    def _decide(self, part: Tensor, key: int) -> _Storage | None:
        """The storage's copy on the host, or None if it stays."""
        self._alive.append(part)
        # Asked when it is kept: sharded data parallelism gathers parameters just before they are used.
        if key in {storage_key(local(own)) for own in (*self._block.parameters(), *self._block.buffers())}:
            return None
        size = part.untyped_storage().nbytes()
        self._host.count.kept_bytes += size
        self._seen_bytes += size
        if self._moved_bytes + size > self._share * self._seen_bytes:
            return None
        self._moved_bytes += size
        storage = _Storage(self._host, self._host.bytes_of(part))
        self._moved.append(weakref.ref(storage))
        return storage

    def finish(self) -> None:
        """The forward pass has ended: what has moved leaves the device."""
        self._alive.clear()
        self._known.clear()

    def fetch(self) -> None:
        """Start to bring back what has moved, and what the block before it has."""
        before = self._before() if self._before is not None else None
        for keeping in (self, before):
            for reference in keeping.take() if keeping is not None else ():
                storage = reference()
                if storage is not None:
                    storage.fetch()

    def take(self) -> list[weakref.ref[_Storage]]:
        """What has moved and has not been asked for."""
        moved, self._moved = self._moved, []
        return moved


def _unpack(kept: Any) -> Tensor:
    if not isinstance(kept, _Moved):
        tensor: Tensor = kept
        return tensor
    kept.keeping.fetch()
    held = kept.storage.use()
    part = kept.storage.host.part_of(held, kept.dtype, kept.shape, kept.stride, kept.offset)
    return part if kept.layout is None else laid_out(part, kept.layout)
