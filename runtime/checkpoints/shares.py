"""A rank's tensors in one file, written and read for `torch.distributed.checkpoint`, whose planners decide who writes
what and which pieces make up a share under another strategy.

The file is a safetensors file (8 bytes of header size, a JSON header, the numbers), so that anybody can look into it, and
reading it runs nobody's code. A piece of a tensor is named `name[offsets]`. What is in which file stands in the manifest.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from autoparallel.runtime.checkpoints.folder import sync
from autoparallel.runtime.checkpoints.manifest import CheckpointDamaged

# Bytes that are checked and written at once. Kind: choice; the interpreter's lock is free meanwhile.
_PIECE_BYTES = 16 * 2**20
_HEADER_BYTES = 8
# The names of the safetensors format; complex numbers are kept as pairs of real ones.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.complex64: "F32", torch.complex128: "F64",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What became of a rank's file: its checksum, or why it is not there."""

    file: str
    bytes_: int = 0
    crc32: int = 0
    problem: str | None = None


class ShareFile:
    """The file of one rank: where each piece of its plan lies, and a copy on the host that training cannot change.

    Costs as much host memory as this rank's parameters and optimizer state, once.
    """

    def __init__(self, name: str, plan: SavePlan) -> None:
        self.name = name
        # The widest first, so that every piece is aligned without gaps.
        self._items = sorted(plan.items, key=lambda i: (-_tensor(i).properties.dtype.itemsize, i.index.fqn))
        starts, place = [], 0
        for item in self._items:
            starts.append(place)
            place += _bytes(item)
        self._starts = starts
        self._header = self._described()
        self._copy = torch.empty(place, dtype=torch.uint8, pin_memory=torch.accelerator.is_available())

    def _described(self) -> bytes:
        header: dict[str, Any] = {}
        for item, start in zip(self._items, self._starts, strict=True):
            dtype, shape = _tensor(item).properties.dtype, list(_tensor(item).chunk.sizes)
            header[self._key(item)] = {
                "dtype": _DTYPES[dtype],
                "shape": [*shape, 2] if dtype.is_complex else shape,
                "data_offsets": [start, start + _bytes(item)],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _HEADER_BYTES)
        return len(text).to_bytes(_HEADER_BYTES, "little") + text

    @staticmethod
    def _key(item: WriteItem) -> str:
        data = _tensor(item)
        whole = data.chunk.sizes == data.size
        return item.index.fqn if whole else f"{item.index.fqn}{list(data.chunk.offsets)}"

    def chunks(self) -> list[tuple[str, list[int], int]]:
        """Name, offsets, and where in the file each piece begins, in bytes."""
        first = len(self._header)
        return [
            (item.index.fqn, list(_tensor(item).chunk.offsets), first + start)
            for item, start in zip(self._items, self._starts, strict=True)
        ]

    @torch.no_grad()
    def take(self, planner: SavePlanner) -> None:
        """Copy the numbers as they are now to the host."""
        self._fill(planner, self._copy)

    def take_into(self, planner: SavePlanner, room: Tensor) -> None:
        """Make `room`, of `bytes_` bytes, what `write` writes of the numbers as they are now."""
        first = len(self._header)
        room[:first].copy_(torch.frombuffer(bytearray(self._header), dtype=torch.uint8))
        self._fill(planner, room[first:])

    @property
    def bytes_(self) -> int:
        """Of the whole file."""
        return len(self._header) + self._copy.numel()

    @torch.no_grad()
    def _fill(self, planner: SavePlanner, copy: Tensor) -> None:
        for item, start in zip(self._items, self._starts, strict=True):
            source = planner.resolve_data(item)
            assert isinstance(source, Tensor)
            room = copy[start : start + _bytes(item)].view(source.dtype).view(source.shape)
            room.copy_(source.detach(), non_blocking=True)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def write(self, folder: Path) -> Written:
        """Put the copy on the disk, checksums and all; a disk that does not take it is told, not raised."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            crc, path = 0, folder / self.name
            with path.open("wb", buffering=0) as out:
                for view in (memoryview(self._header), *_pieces(self._copy)):
                    crc = zlib.crc32(view, crc)
                    while view:  # unbuffered: a write may take less than it is given
                        view = view[out.write(view) :]
            sync(path)
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            said = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            return Written(file=self.name, problem=f"{folder / self.name}: {said}")
        return Written(file=self.name, bytes_=self.bytes_, crc32=crc)


def _pieces(copy: Tensor) -> list[memoryview]:
    numbers: memoryview = copy.numpy().data
    return [numbers[at : at + _PIECE_BYTES] for at in range(0, len(numbers), _PIECE_BYTES)]


def _tensor(item: WriteItem) -> Any:
    assert item.tensor_data is not None, "only tensors are planned"
    return item.tensor_data


def _bytes(item: WriteItem) -> int:
    data = _tensor(item)
    size: int = prod(data.chunk.sizes) * data.properties.dtype.itemsize
    return size


def described_tensors(
    metadata: Metadata, held: Sequence[tuple[str, Sequence[tuple[str, list[int], int]]]]
) -> dict[str, Any]:
    """The manifest's `tensors`, of DCP's own metadata and what each rank's file (`held`: its name, `chunks()`) holds."""
    places = {(name, tuple(o)): (file, start) for file, chunks in held for name, o, start in chunks}
    found: dict[str, Any] = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        chunks = []
        for chunk in tensor.chunks:
            file, start = places[name, tuple(chunk.offsets)]
            chunks.append(
                {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": file, "start": start}
            )
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        found[name] = {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}
    return found


def check_file(path: Path, said: Mapping[str, int]) -> str | None:
    """What is wrong with a file that should have these `bytes` and this `crc32`; None if nothing is."""
    try:
        size = path.stat().st_size
        if size != said["bytes"]:
            return f"{path.name} has {size} bytes instead of {said['bytes']}"
        crc = 0
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                crc = zlib.crc32(piece, crc)
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None if crc == said["crc32"] else f"{path.name} is damaged (its checksum differs)"


class ShareReader(StorageReader):
    """What DCP reads the shares of the checkpoint in `folder` with, as its manifest describes them."""

    def __init__(self, folder: Path, tensors: Mapping[str, Any]) -> None:
        self._folder, self._tensors = folder, tensors
        self._places = {
            (name, tuple(c["offsets"])): c for name, tensor in tensors.items() for c in tensor["chunks"]
        }
        self._files: dict[str, Tensor] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        del checkpoint_id

    def read_metadata(self) -> Metadata:
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=getattr(torch, tensor["dtype"])),
                    size=torch.Size(tensor["size"]),
                    chunks=[
                        ChunkStorageMetadata(offsets=torch.Size(c["offsets"]), sizes=torch.Size(c["sizes"]))
                        for c in tensor["chunks"]
                    ],
                )
                for name, tensor in self._tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        del metadata, is_coordinator

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            source = self._piece(item.storage_index)
            for dim, (first, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dim, first, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def file_of(self, index: MetadataIndex) -> str:
        """The file that a piece is in."""
        assert index.offset is not None
        found: str = self._places[index.fqn, tuple(index.offset)]["file"]
        return found

    def _piece(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        place, tensor = self._places[index.fqn, tuple(index.offset)], self._tensors[index.fqn]
        dtype = getattr(torch, tensor["dtype"])
        size = prod(place["sizes"]) * dtype.itemsize
        if not size:
            return torch.empty(place["sizes"], dtype=dtype)
        raw = self._file(place["file"])[place["start"] : place["start"] + size]
        if place["start"] % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(place["sizes"])

    def _file(self, name: str) -> Tensor:
        if name not in self._files:
            try:  # copy-on-write: nothing that is done to it comes to the disk
                self._files[name] = torch.from_numpy(np.memmap(self._folder / name, dtype=np.uint8, mode="c"))
            except (OSError, ValueError) as error:
                raise CheckpointDamaged(f"{self._folder}: {name} cannot be read ({error})") from None
        return self._files[name]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        del checkpoint_id
        return True
