"""Bytes on their way between a device and the memory of its host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autoparallel.runtime.ranks.accelerator import device_module

Shape = tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class OffloadCount:
    """Bytes that could have gone to the host (`kept`), those of them that went there, and those that came back."""

    kept_bytes: int = 0
    moved_bytes: int = 0
    returned_bytes: int = 0


class HostCopies:
    """Copies bytes to pinned memory of the host and back, on a stream of its own. On the CPU, which is the host, what
    comes back is the copy itself."""

    def __init__(self, device: torch.device, count: OffloadCount) -> None:
        self.device, self.count = device, count
        self._torch = device_module(device)
        self._stream = None if device.type == "cpu" else self._torch.Stream(device)

    def copied_out(self, held: Tensor, into: Tensor | None = None) -> Tensor:
        """The bytes on the host, new there or `into` what has them there; they may still be on their way, in the order
        of the stream."""
        self.count.moved_bytes += held.nbytes
        if self._stream is None:
            return held.clone() if into is None else into.copy_(held)
        copy = torch.empty(held.shape, dtype=held.dtype, pin_memory=True) if into is None else into
        self._stream.wait_stream(self._torch.current_stream(self.device))
        with self._torch.stream(self._stream):
            copy.copy_(held, non_blocking=True)
        held.record_stream(self._stream)
        return copy

    def copied_back(self, copy: Tensor) -> tuple[Tensor, torch.Event | None]:
        """The bytes on the device, and the event after which they are there (see `arrived`)."""
        self.count.returned_bytes += copy.nbytes
        if self._stream is None:
            return copy, None
        with self._torch.stream(self._stream):
            return copy.to(self.device, non_blocking=True), self._stream.record_event()

    def bytes_of(self, part: Tensor) -> Tensor:
        """The storage of a tensor on the device, as bytes."""
        size = part.untyped_storage().nbytes()
        return part.new_empty(0, dtype=torch.uint8).set_(part.untyped_storage(), 0, (size,), (1,))

    def part_of(self, held: Tensor, dtype: torch.dtype, shape: Shape, stride: Shape, offset: int) -> Tensor:
        """The tensor of a storage that `bytes_of` gave; `offset` in numbers."""
        return held.new_empty(0, dtype=dtype).set_(held.untyped_storage(), offset, shape, stride)

    def arrived(self, held: Tensor, ready: torch.Event | None) -> Tensor:
        """What has been copied back, for kernels of the current stream."""
        if ready is not None:
            stream = self._torch.current_stream(self.device)
            stream.wait_event(ready)
            held.record_stream(stream)
        return held

    def finish(self) -> None:
        """Return when all copies so far have been made."""
        if self._stream is not None:
            self._stream.synchronize()


class ImaginedCopies(HostCopies):
    """Those of a dry run, whose tensors have no values: what is on the host is on the meta device, and not counted with
    what is on the device."""

    def copied_out(self, held: Tensor, into: Tensor | None = None) -> Tensor:
        """As of `HostCopies`."""
        self.count.moved_bytes += held.nbytes
        return torch.empty(held.shape, dtype=held.dtype, device="meta") if into is None else into

    def bytes_of(self, part: Tensor) -> Tensor:
        """As of `HostCopies`: bytes that are counted nowhere."""
        return torch.empty(part.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")

    def part_of(self, held: Tensor, dtype: torch.dtype, shape: Shape, stride: Shape, offset: int) -> Tensor:
        """As of `HostCopies`."""
        whole = held[: held.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return whole.as_strided(shape, stride, offset)

    def copied_back(self, copy: Tensor) -> tuple[Tensor, torch.Event | None]:
        """As of `HostCopies`."""
        self.count.returned_bytes += copy.nbytes
        return torch.empty(copy.shape, dtype=copy.dtype, device=self.device), None
