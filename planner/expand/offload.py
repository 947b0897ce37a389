"""Activations kept on the host: copied out after the forward, back before the backward, beside the kernels."""

from __future__ import annotations

from dataclasses import replace

from autoparallel.costmodel.kernels import HOST_COPY
from autoparallel.costmodel.program import BlockWork, Kernel


def host_copy(moved: int, *, backward: bool = False, beside: bool = True) -> Kernel:
    """A copy of `moved` bytes between device and host."""
    return Kernel(kind=HOST_COPY, dtype="", flops=0, bytes_moved=moved, backward=backward, beside=beside)


def with_offloaded(work: BlockWork, share: float) -> BlockWork:
    """The block with a share of what it keeps on the host between its forward and its backward.

    While it runs forward, what it keeps is still on the device; while it runs backward, its own is back already
    and that of the block before it is on its way.
    """
    moved = round(work.saved_bytes * share)
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
