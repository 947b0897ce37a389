"""Compressed gradients: which method a group of ranks uses, and FSDP2's reduce-scatter in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.errors import UserError
from autoparallel.runtime.tensor.questions import as_bytes

_METHODS = ("none", "bf16")


class Bf16ReduceScatter:
    """What FSDP2 takes as its reduce-scatter: bfloat16 on the wire, sums in the input's own dtype."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert not async_op
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), f"FSDP2 asked for {op}"
        sent = input_tensor.to(torch.bfloat16)
        received = torch.empty_like(sent)
        dist.all_to_all_single(as_bytes(received), as_bytes(sent), group=group)
        total = received.view(group.size(), -1).to(output_tensor.dtype).sum(dim=0)
        if op == dist.ReduceOp.AVG:
            total /= group.size()
        output_tensor.copy_(total.view(output_tensor.shape))


def check_compression(compression: Sequence[str]) -> None:
    """Refuse a compression that the runtime does not run."""
    for method in compression:
        if method not in _METHODS:
            raise UserError(
                f'grad_sync.compression "{method}": the runtime runs {" and ".join(_METHODS)}; choose one of them'
            )


def method_between(ranks: Sequence[int], compression: Sequence[str], level_sizes: Sequence[int]) -> str:
    """The method for a group of `ranks`: that of the outermost network level between them.

    `level_sizes` are devices below one port of each level, innermost first; where they are not known, the
    outermost level is taken to lie between any two ranks.
    """
    if not compression:
        return "none"
    for level, size in enumerate(level_sizes):
        if len({rank // size for rank in ranks}) == 1:
            return compression[level] if level < len(compression) else "none"
    return compression[-1]
