"""Whole tables for checkpoints: rows in ranges over the data-parallel ranks, whatever the tiers, and rows put back from there.

A table is saved as a DTensor of its whole shape, sharded along the rows, under the name of its parameter; so are the parts of its
optimizer state. Any strategy loads these. Hot rows are first written to their places in the store, which has one for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from autoparallel.runtime.loading.materialise import share_of
from autoparallel.runtime.servers.held import VALUES
from autoparallel.runtime.servers.rows_optimizer import RowsOptimizer
from autoparallel.runtime.servers.tables import Table, TieredTables
from autoparallel.runtime.tensor.questions import local


class WholeTables:
    """Reads and writes whole tables over the ranks of `mesh` (None: one rank). Every call is collective."""

    def __init__(self, tables: TieredTables, mesh: DeviceMesh | None, meet: Callable[[], object]) -> None:
        self.tables, self._mesh, self.meet = tables, mesh, meet
        self._size = mesh.size() if mesh is not None else 1
        self._rank = mesh.get_local_rank() if mesh is not None else 0

    def state(self) -> dict[str, Tensor]:
        """Every table by the name of its parameter."""
        return {
            name: self._read(table, VALUES, table.module.weight) for name, table in self.tables.names.items()
        }

    def load(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Take the tables out of `state` (whole tensors, or what `state` gave); the rest of it."""
        left = dict(state)
        for name, table in self.tables.names.items():
            if name in left:
                self._write(table, VALUES, left.pop(name), table.module.weight)
        return left

    def optimizer_state(self, optimizer: Optimizer, kind: type[Optimizer]) -> dict[str, Any]:
        """State of the tables' rows as `optimizer_state.named_state` spells it."""
        found: dict[str, Any] = {}
        rows = RowsOptimizer(kind, optimizer.defaults)
        for name, table in self.tables.names.items():
            held = self._hot_state(optimizer, table)
            steps, names = table.store.about(table.number)
            self.meet()
            first, stop = self.range_of(table)
            for part, start in rows.start.items():
                if part not in names:  # no step has been
                    own = torch.full((stop - first, table.shape.dim), start, device=table.hot.device)
                    table.store.write(
                        table.number, part, torch.arange(first, stop, device=table.hot.device), own
                    )
                    self.meet()
                found[f"state.{name}.{part}"] = self._read(table, part, held.get(part))
            found[f"state.{name}.step"] = torch.tensor(float(steps))
        return found

    def load_optimizer_state(self, optimizer: Optimizer, given: Mapping[str, Any]) -> None:
        """The inverse of `optimizer_state`, of whole tensors too."""
        for name, table in self.tables.names.items():
            held, prefix = self._hot_state(optimizer, table), f"state.{name}."
            for key, value in given.items():
                part = key.removeprefix(prefix)
                if (
                    key.startswith(prefix)
                    and isinstance(value, Tensor)
                    and value.dim() == 2
                    and part != "residual"
                ):
                    self._write(table, part, value, held.get(part))
                elif key == f"{prefix}step":
                    table.store.begin_at(table.number, int(value))
                    if isinstance(held.get("step"), Tensor):
                        held["step"].fill_(float(value))

    def gradients(self) -> dict[str, Tensor]:
        """The mean gradient of each whole table, on every rank."""
        found = {}
        for name, table in self.tables.names.items():
            whole = self.tables.gradient(table)
            weight = table.module.weight
            if isinstance(weight, Tensor) and weight.grad is not None:
                whole[table.hot] = _whole(weight.grad).to(whole)
            found[name] = whole
        return found

    def settle(self, optimizer: Optimizer | None = None) -> int:
        """Make the rows that were asked for most the hot ones of each table, as many as before; how many have come."""
        come = 0
        for table in self.tables.tables:
            if not len(table.hot):
                continue
            counts = table.store.counts(table.number)
            mine = table.hot_counts.clone()
            if self._mesh is not None:
                torch.distributed.all_reduce(mine, group=self._mesh.get_group())
            counts[table.hot] += mine + 0.5  # what is hot stays where others are wanted just as often
            wanted = counts.topk(len(table.hot)).indices.sort().values
            come += int((~torch.isin(wanted, table.hot)).sum())
            held = self._hot_state(optimizer, table) if optimizer is not None else {}
            parts = {
                part: value for part, value in held.items() if isinstance(value, Tensor) and value.dim() == 2
            }
            parts[VALUES] = _weight(table)
            for part, value in parts.items():
                self._put_hot(table, part, value)
            table.hot = wanted
            table.hot_counts.mul_(0.5)
            for part, value in parts.items():
                _fill(value, table.store.read(table.number, part, wanted))
        return come

    def _hot_state(self, optimizer: Optimizer | None, table: Table) -> dict[str, Any]:
        weight: Any = table.module.weight
        return {} if optimizer is None or weight is None else optimizer.state.get(weight, {})

    def range_of(self, table: Table) -> tuple[int, int]:
        """This rank's rows, as `Tensor.chunk` cuts them."""
        rows = table.shape.rows
        each = -(-rows // self._size)
        return min(each * self._rank, rows), min(each * (self._rank + 1), rows)

    def _read(self, table: Table, part: str, hot: Any) -> Tensor:
        self._put_hot(table, part, hot)
        first, stop = self.range_of(table)
        own = table.store.read(table.number, part, torch.arange(first, stop, device=table.hot.device))
        if self._mesh is None:
            return own
        size = torch.Size((table.shape.rows, table.shape.dim))
        return DTensor.from_local(
            own, self._mesh, [Shard(0)], shape=size, stride=(table.shape.dim, 1), run_check=False
        )

    def _write(self, table: Table, part: str, value: Any, hot: Any) -> None:
        first, stop = self.range_of(table)
        own = local(value) if isinstance(value, DTensor) else value[first:stop]
        rows = torch.arange(first, stop, device=table.hot.device)
        table.store.write(table.number, part, rows, own.to(table.hot.device))
        self.meet()
        if isinstance(hot, Tensor) and len(table.hot):
            _fill(hot, table.store.read(table.number, part, table.hot))

    def _put_hot(self, table: Table, part: str, hot: Any) -> None:
        """Hot rows to their places in the store, each rank a share of them."""
        if isinstance(hot, Tensor) and len(table.hot):
            mine = slice(self._rank, None, self._size)
            table.store.write(table.number, part, table.hot[mine], _whole(hot)[mine].detach())
        self.meet()


def _weight(table: Table) -> Any:
    return table.module.weight


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _fill(held: Tensor, whole: Tensor) -> None:
    """Put `whole` where `held` has its share of it."""
    source = whole.to(held.dtype)
    local(held).copy_(local(share_of(source, held)) if isinstance(held, DTensor) else source)


def hot_parameter(rows: Tensor, *, requires_grad: bool) -> nn.Parameter | None:
    """The hot rows as a module's parameter; None where there are none."""
    return nn.Parameter(rows.clone(), requires_grad) if len(rows) else None
