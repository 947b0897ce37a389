"""The rows of one part of a table, with the optimizer state of each, and the gradients that have come for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoparallel.runtime.servers.rows_optimizer import RowsOptimizer
from autoparallel.runtime.servers.tiered_rows import TieredRows

VALUES = "values"
_AT_ONCE = 1 << 22  # numbers that are updated at a time. Kind: choice


class HeldRows:
    """`rows` rows of `dim` numbers in `dtype`; `memory_rows` of them in memory, the rest on the disk of `folder`."""

    def __init__(
        self, rows: int, dim: int, *, dtype: torch.dtype = torch.float32, memory_rows: int | None = None,
        folder: Path | None = None, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.rows, self.dim, self._dtype = rows, dim, dtype
        self._memory_rows, self._folder, self._device = memory_rows, folder, device
        self.fields: dict[str, TieredRows] = {VALUES: self._made()}
        self.steps = 0
        self._given: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def _made(self) -> TieredRows:
        return TieredRows(
            self.rows, self.dim, dtype=self._dtype, memory_rows=self._memory_rows, folder=self._folder,
            device=self._device,
        )  # fmt: skip

    def look_up(self, places: Tensor) -> Tensor:
        """The rows at `places`, which count as wanted."""
        return self.fields[VALUES].read(places, counted=True)

    def read(self, name: str, places: Tensor) -> Tensor:
        """A part of the state of rows (or their values); zeros where no step has made it yet."""
        if name not in self.fields:
            return torch.zeros(len(places), self.dim, dtype=self._dtype, device=self._device)
        return self.fields[name].read(places)

    def write(self, name: str, places: Tensor, values: Tensor) -> None:
        """Put `values` in the rows at `places`."""
        if name not in self.fields:
            self.fields[name] = self._made()
        self.fields[name].write(places, values)

    def give(self, worker: int, places: Tensor, gradients: Tensor) -> None:
        """Note gradients for the next update; `places` are told apart, `worker` says in which order sums are taken."""
        self._given.setdefault(worker, []).append((places, gradients))

    def given(self, worker: int | None = None) -> tuple[Tensor, Tensor]:
        """The rows for which gradients have come, and their sums: the same whatever came first. Of one worker, or of all."""
        wanted = sorted(self._given) if worker is None else [worker]
        pieces = [piece for one in wanted for piece in self._given.get(one, ())]
        if not pieces:
            empty = torch.empty(0, self.dim, dtype=self._dtype, device=self._device)
            return torch.empty(0, dtype=torch.int64, device=self._device), empty
        rows, inverse = torch.unique(torch.cat([places for places, _ in pieces]), return_inverse=True)
        sums = torch.zeros(len(rows), self.dim, dtype=self._dtype, device=self._device)
        return rows, sums.index_add_(0, inverse, torch.cat([g for _, g in pieces]).to(self._dtype))

    def forget(self, worker: int | None = None) -> None:
        """Drop gradients that have come, of one worker or of all."""
        if worker is None:
            self._given.clear()
        else:
            self._given.pop(worker, None)

    def update(
        self, optimizer: RowsOptimizer, options: Mapping[str, Any], *, scale: float = 1.0, all_rows: bool = False,
        worker: int | None = None,
    ) -> None:  # fmt: skip
        """One step with what has come (of one worker, or of all), times `scale`: of the rows that it came for, or of all."""
        for name in optimizer.names:
            if name not in self.fields:
                self.fields[name] = self._made()
                if start := optimizer.start[name]:
                    every = torch.arange(self.rows, device=self._device)
                    self.fields[name].write(
                        every, torch.full((self.rows, self.dim), start, dtype=self._dtype)
                    )
        touched, sums = self.given(worker)
        self.forget(worker)
        at_once = max(1, _AT_ONCE // max(self.dim, 1))
        if not all_rows:
            for first in range(0, len(touched), at_once):
                part = slice(first, first + at_once)
                self._step(optimizer, options, touched[part], sums[part] * scale)
        else:
            for first in range(0, self.rows, at_once):
                places = torch.arange(first, min(first + at_once, self.rows), device=self._device)
                gradients = torch.zeros(len(places), self.dim, dtype=self._dtype, device=self._device)
                inside = (touched >= first) & (touched < first + len(places))
                gradients.index_copy_(0, touched[inside] - first, sums[inside] * scale)
                self._step(optimizer, options, places, gradients)
        self.steps += 1

    def _step(
        self, optimizer: RowsOptimizer, options: Mapping[str, Any], places: Tensor, gradients: Tensor
    ) -> None:
        values = self.fields[VALUES].read(places)
        state = {name: self.fields[name].read(places) for name in optimizer.names}
        optimizer.step(values, state, gradients, self.steps, options)
        self.fields[VALUES].write(places, values)
        for name, part in state.items():
            self.fields[name].write(places, part)

    def settle(self) -> int:
        """Bring what is wanted most to memory, state too; how many rows have come."""
        counts = self.fields[VALUES].counts
        for rows in self.fields.values():
            rows.counts.copy_(counts)
        return max(rows.settle() for rows in self.fields.values())
