"""How `torch.distributed.checkpoint` is told where a share lies in the whole tensor, where that is several pieces.

DTensor tells it one piece: the first offset along each dim, and the share's size. A share of each of several parts (of
a fused projection) is none, and would be refused as overlapping others'.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from autoparallel.runtime.loading.weights import share_ranges
from autoparallel.runtime.tensor.questions import local
from autoparallel.runtime.torch_private import laid_out, layout_of


def with_chunks(state: dict[str, Any]) -> dict[str, Any]:
    """`state`, in which DTensors of several pieces are replaced by ones that say so, of the same memory."""
    state |= {name: _told(value) for name, value in state.items() if isinstance(value, DTensor)}
    return state


def _told(tensor: DTensor) -> DTensor:
    ranges = share_ranges(tensor)
    if isinstance(tensor, nn.Parameter) or all(len(own) == 1 for own in ranges):
        return tensor
    alias = laid_out(local(tensor), layout_of(tensor))
    chunks = _Chunks(tensor, ranges)
    # By these names of the object the checkpoint's planner asks for pieces (of DTensors, too).
    for name in ("create_write_items", "create_chunk_list", "get_tensor_shard"):
        setattr(alias, f"__{name}__", getattr(chunks, name))
    return alias


class _Chunks:
    """The pieces of a share: views of it by their offsets in the whole tensor."""

    def __init__(self, tensor: DTensor, ranges: tuple[tuple[tuple[int, int], ...], ...]) -> None:
        self._size, part = tensor.size(), local(tensor)
        self._properties = TensorProperties.create_from_tensor(part)
        self._pieces: dict[torch.Size, Tensor] = {}
        starts = [_starts(own) for own in ranges]
        for pick in product(*(range(len(own)) for own in ranges)):
            piece = part
            for dim, n in enumerate(pick):
                first, stop = ranges[dim][n]
                piece = piece.narrow(dim, starts[dim][n], stop - first)
            self._pieces[torch.Size(ranges[dim][n][0] for dim, n in enumerate(pick))] = piece

    def create_chunk_list(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=offsets, sizes=piece.size())
            for offsets, piece in self._pieces.items()
        ]

    def create_write_items(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=self._properties, size=self._size),
            )
            for chunk in self.create_chunk_list()
        ]  # fmt: skip

    def get_tensor_shard(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._pieces[index.offset]


def _starts(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    """Where each range begins in a share that holds them one after another."""
    found = [0]
    for first, stop in ranges:
        found.append(found[-1] + stop - first)
    return found[:-1]
