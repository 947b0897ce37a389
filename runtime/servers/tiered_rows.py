"""Rows of numbers, those that are asked for most in memory, the others in a memory-mapped file without a name, which goes with its
process, however that ends.

Every row has a home in the file; `memory_rows` of them are in memory instead. `settle` moves the most wanted there, by how
often they were read since the start, what is long ago counting half after each `settle`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class TieredRows:
    """`rows` rows of `width` numbers, zeros at first; the file is on the disk of `folder`. Without one all are in memory."""

    def __init__(
        self, rows: int, width: int, *, dtype: torch.dtype = torch.float32, memory_rows: int | None = None,
        folder: Path | None = None, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        here = rows if folder is None or memory_rows is None else min(memory_rows, rows)
        self.counts = torch.zeros(rows, dtype=torch.float32, device=device)
        self._memory = torch.zeros(here, width, dtype=dtype, device=device)
        self._whole = here == rows
        if self._whole:
            return
        assert folder is not None
        shape, kind = (rows, width), torch.empty((), dtype=dtype).numpy().dtype
        with tempfile.TemporaryFile(dir=folder) as file:
            self._disk = torch.from_numpy(np.memmap(file, dtype=kind, mode="w+", shape=shape))
        self._place = torch.full((rows,), -1, dtype=torch.int64)  # in memory; -1: on disk
        self._who = torch.arange(here)
        self._place[self._who] = self._who

    @property
    def memory_rows(self) -> int:
        """How many rows are in memory."""
        return len(self._memory)

    def read(self, places: Tensor, *, counted: bool = False) -> Tensor:
        """A copy of the rows at `places`."""
        if counted:
            self.counts.index_add_(0, places, torch.ones_like(places, dtype=torch.float32))
        if self._whole:
            return self._memory.index_select(0, places)
        where = self._place[places]
        found = torch.empty(len(places), self._memory.shape[1], dtype=self._memory.dtype)
        warm = where >= 0
        found[warm] = self._memory[where[warm]]
        found[~warm] = self._disk[places[~warm]]
        return found

    def write(self, places: Tensor, values: Tensor) -> None:
        """Put `values` in the rows at `places`, each of them named once."""
        values = values.to(self._memory.dtype)
        if self._whole:
            self._memory.index_copy_(0, places, values)
            return
        where = self._place[places]
        warm = where >= 0
        self._memory[where[warm]] = values[warm]
        self._disk[places[~warm]] = values[~warm]

    def settle(self) -> int:
        """Bring the most wanted rows to memory; how many have come."""
        if self._whole or not self.memory_rows:
            self.counts *= 0.5
            return 0
        wanted = torch.zeros(len(self.counts), dtype=torch.bool)
        # What is in memory stays where others are wanted just as often.
        favoured = self.counts + 0.5 * (self._place >= 0)
        wanted[favoured.topk(self.memory_rows, sorted=False).indices] = True
        gone = torch.nonzero(~wanted[self._who]).view(-1)
        come = torch.nonzero(wanted & (self._place < 0)).view(-1)
        leaving = self._who[gone]
        self._disk[leaving] = self._memory[gone]
        self._memory[gone] = self._disk[come]
        self._place[leaving] = -1
        self._place[come] = gone
        self._who[gone] = come
        self.counts *= 0.5
        return len(come)
