"""Activations kept on the host: copied out after the forward, back before the backward, beside the kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autoparallel.costmodel.kernels import HOST_COPY
from autoparallel.costmodel.program import BlockWork, Kernel


def host_copy(moved: int, *, backward: bool = False, beside: bool = True) -> Kernel:
    """A copy of `moved` bytes between device and host."""
    return Kernel(kind=HOST_COPY, dtype="", flops=0, bytes_moved=moved, backward=backward, beside=beside)


def whole_storages_bytes(kept: Iterable[int], share: float) -> int:
    """What moves of storages of these bytes, in the order in which they are kept: each as long as what has moved stays within the
    share of what was kept so far (`runtime/memory/offload.py`)."""
    seen = moved = 0
    for size in kept:
        seen += size
        if moved + size <= share * seen:
            moved += size
    return moved


def with_offloaded(work: BlockWork, moved: int) -> BlockWork:
    """The block with so many bytes of what it keeps on the host between its forward and its backward.

    While it runs forward, what it keeps is still on the device; while it runs backward, its own is back already
    and that of the block before it is on its way.
    """
    if not moved:
        return work
    kept = work.saved_bytes if work.weight_saved_bytes is None else work.weight_saved_bytes
    return replace(
        work,
        forward=(*work.forward, host_copy(moved)),
        backward_input=(host_copy(moved, backward=True), *work.backward_input),
        saved_bytes=work.saved_bytes - moved,
        host_bytes=moved,
        weight_saved_bytes=kept,
        forward_temp_bytes=work.forward_temp_bytes + moved,
        backward_temp_bytes=work.backward_temp_bytes + 2 * moved,
        standing_temp_bytes=None
        if work.standing_temp_bytes is None
        else work.standing_temp_bytes + 2 * moved,
        left_bytes=work.left_bytes + 2 * moved,
    )
