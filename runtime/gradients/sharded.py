"""What FSDP2's units do instead of the backend's reduce-scatter: encoded, level by level of the network, or both.

One `UnitScatter` a unit, because a unit's residuals are its own. It is FSDP2's public hook (`set_custom_reduce_scatter`);
gathers of parameters are `gathered.UnitGather`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.costmodel.compression import highest_rank, parse_method
from autoparallel.runtime.gradients.exchanges import Exchange
from autoparallel.runtime.gradients.feedback import Memory
from autoparallel.runtime.gradients.reductions import LowRank
from autoparallel.runtime.ranks.gathers import reduce_scatter_single


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWire:
    """How gradients travel over the ranks that shard: by `method` at once, or first over `inside`, then over `across`.

    `order[i]` is the position in the whole group of the rank whose part comes i-th, when the parts are sorted by position
    inside and then by the group inside (empty where it is done at once).
    """

    method: str = "none"
    ring: bool = False
    inside: Exchange | None = None
    across: Exchange | None = None
    order: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Nothing that the backend does not do itself."""
        return self.inside is None and not self.ring and parse_method(self.method).name == "none"

    @property
    def biased(self) -> bool:
        """Whether error feedback carries something from step to step."""
        if self.inside is not None and self.across is not None:
            return self.inside.biased or self.across.biased
        return parse_method(self.method).biased


class UnitScatter:
    """FSDP2's reduce-scatter for one unit."""

    def __init__(self, wire: ShardWire) -> None:
        self._wire = wire
        self._memory = Memory()
        self._group: dist.ProcessGroup | None = None
        self._numbers = 0  # of the unit's last input
        self._divisor = 1.0  # by which FSDP2 divides the output
        self._given: Tensor | None = (
            None  # to be added to this rank's part of the mean, in units of gradients
        )

    @property
    def biased(self) -> bool:
        return self._wire.biased

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:  # fmt: skip
        assert not async_op
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), f"FSDP2 asked for {op}"
        size = group.size()
        self._group, self._numbers = group, input_tensor.numel()
        average = op == dist.ReduceOp.AVG
        self._divisor = float(size) if average else _divided_afterwards(input_tensor.dtype, size)
        rows = input_tensor.view(size, -1)
        if self._given is not None and self._given.numel() == rows.shape[1]:
            rows[group.rank()] += self._given.to(rows.dtype) * self._divisor
        self._given = None
        total = self._sum(rows, group)
        if average:
            total /= size
        output_tensor.copy_(total.view(output_tensor.shape))

    def _sum(self, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        if group.size() == 1:  # nothing is sent
            return rows[0]
        wire, memory = self._wire, self._memory
        method = parse_method(wire.method)
        if wire.inside is not None and wire.across is not None:
            nodes = wire.across.group.size()
            by_node = rows[torch.tensor(wire.order, device=rows.device)].view(wire.inside.group.size(), -1)
            inside = wire.inside.scatter(by_node, memory).wait()
            return wire.across.scatter(inside.view(nodes, -1), memory.across).wait()
        if method.name == "powersgd" and int(method.amount) <= highest_rank(rows.numel()):
            LowRank(group, int(method.amount)).start(rows, memory).wait()
            return rows[group.rank()] * group.size()
        exchange = Exchange(group, "none" if method.name == "powersgd" else wire.method, ring=wire.ring)
        return exchange.scatter(rows, memory).wait()

    def owed(self) -> Tensor | None:
        """What error feedback still has to bring to this rank's part of the gradient's mean; None where none is kept.
        Collective over the unit's group."""
        residuals = self._memory.tensors()
        group = self._group
        if group is None or not residuals:
            return self._given
        size, wire = group.size(), self._wire
        whole = residuals[0].new_zeros(size, self._numbers // size)
        own = self._memory.residuals.get("scatter")
        if wire.inside is not None and wire.across is not None:
            order = torch.tensor(wire.order, device=whole.device)
            if own is not None:
                whole[order] += own.view(size, -1)
            far = self._memory.across.residuals.get("scatter")
            if far is not None:  # of the parts that stand where this rank stands inside
                nodes, place = wire.across.group.size(), wire.inside.group.rank()
                whole[order[place * nodes : (place + 1) * nodes]] += far
        elif own is not None:
            whole += own.reshape(-1)[: self._numbers].view(size, -1)
        found = whole.new_empty(whole.shape[1])
        reduce_scatter_single(found, whole.view(-1), group=group)
        found /= self._divisor
        return found if self._given is None else found + self._given

    @property
    def is_given(self) -> bool:
        """Whether the next mean gets what another run owed."""
        return self._given is not None

    def give(self, part: Tensor | None) -> None:
        """Add `part` to this rank's part of the next mean (None: nothing), and forget what was kept."""
        self._memory, self._given = Memory(), part


def _divided_afterwards(dtype: torch.dtype, ranks: int) -> float:
    """By what FSDP2 divides a sum over `ranks`: all of the mean's divisor, but for what it has divided by before, which
    it does for dtypes whose range or division it does not leave to the backend."""
    if dtype in (torch.float32, torch.bfloat16):
        return float(ranks)
    before = 1
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return ranks / before
