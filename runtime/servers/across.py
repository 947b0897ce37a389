"""Cold rows on the data-parallel ranks themselves, a row each in turn; rows and gradients go by all-to-all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.runtime.servers.held import VALUES, HeldRows
from autoparallel.runtime.servers.rows_optimizer import RowsOptimizer
from autoparallel.runtime.servers.store import Ending, TableShape


class AcrossRanks:
    """A `Store` on the ranks of `group`: row r on rank r mod n, there in place r div n. Every call is collective."""

    def __init__(
        self, tables: Sequence[TableShape], group: dist.ProcessGroup | None, *, device: torch.device,
        param_dtype: torch.dtype, grad_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._group, self._device = group, device
        self._size = group.size() if group is not None else 1
        self._rank = group.rank() if group is not None else 0
        self._param_dtype, self._grad_dtype = param_dtype, grad_dtype
        self._shapes = tuple(tables)
        self._held = [
            HeldRows(len(range(self._rank, t.rows, self._size)), t.dim, device=device) for t in tables
        ]
        self._optimizers: dict[type, RowsOptimizer] = {}

    def pull(self, asked: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """See `Store`. One exchange for the tables of equal dim."""
        return self._asked(
            [(table, rows) for table, rows in asked],
            lambda held, places: held.look_up(places),
            self._param_dtype,
        )

    def push(self, given: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """See `Store`."""
        for dim, numbers in self._by_dim([table for table, _, _ in given]).items():
            own = [given[n] for n in numbers]
            for table, places, values in self._sent(
                [(t, rows, g) for t, rows, g in own], dim, self._grad_dtype
            ):
                for worker, (at, part) in enumerate(zip(places, values, strict=True)):
                    if len(at):
                        self._held[table].give(worker, at, part)

    def square(self) -> float:
        """See `Store`."""
        own = [held.given()[1].double().square().sum() for held in self._held]
        total = torch.stack(own).sum() if own else torch.zeros((), dtype=torch.float64, device=self._device)
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return float(total)

    def sums(self, table: int) -> tuple[Tensor, Tensor]:
        """See `Store`."""
        places, sums = self._held[table].given()
        return self._gathered(places * self._size + self._rank), self._gathered(sums)

    def commit(self, ending: Ending) -> None:
        """See `Store`."""
        for table, held in enumerate(self._held):
            if ending.kind not in self._optimizers:
                self._optimizers[ending.kind] = RowsOptimizer(ending.kind, ending.options[table])
            held.update(
                self._optimizers[ending.kind], ending.options[table], scale=ending.scale, all_rows=ending.all_rows
            )  # fmt: skip

    def forget(self) -> None:
        """See `Store`."""
        for held in self._held:
            held.forget()

    def about(self, table: int) -> tuple[int, tuple[str, ...]]:
        """See `Store`."""
        return self._held[table].steps, tuple(self._held[table].fields)

    def read(self, table: int, name: str, rows: Tensor) -> Tensor:
        """See `Store`."""
        return self._asked([(table, rows)], lambda held, places: held.read(name, places), torch.float32)[0]

    def write(self, table: int, name: str, rows: Tensor, values: Tensor) -> None:
        """See `Store`."""
        dim = self._shapes[table].dim
        for _, places, parts in self._sent([(table, rows, values)], dim, torch.float32):
            for at, part in zip(places, parts, strict=True):
                self._held[table].write(name, at, part)

    def begin_at(self, table: int, steps: int) -> None:
        """See `Store`."""
        self._held[table].steps = steps

    def counts(self, table: int) -> Tensor:
        """See `Store`."""
        own = self._held[table].fields[VALUES].counts
        found = torch.zeros(self._shapes[table].rows, device=self._device)
        found[self._rank :: self._size] = own
        if self._group is not None:
            dist.all_reduce(found, group=self._group)
        return found

    def close(self) -> None:
        """See `Store`."""

    def _by_dim(self, tables: Sequence[int]) -> dict[int, list[int]]:
        """Places in a list of tables, by the numbers that a row has."""
        found: dict[int, list[int]] = {}
        for number, table in enumerate(tables):
            found.setdefault(self._shapes[table].dim, []).append(number)
        return found

    def _asked(self, asked, answer, dtype: torch.dtype) -> list[Tensor]:  # type: ignore[no-untyped-def]
        found: list[Tensor] = [torch.empty(0)] * len(asked)
        for dim, numbers in self._by_dim([table for table, _ in asked]).items():
            told = [self._told(*asked[n]) for n in numbers]
            counts = torch.stack([count for _, _, count in told])  # [tables, ranks]
            there = self._counts(counts)
            wanted = self._exchanged(_by_rank([places for _, places, _ in told], counts), counts, there)
            answers = []
            for rank_part, own in zip(wanted.split(there.sum(0).tolist()), there.T.tolist(), strict=True):
                for number, places in zip(numbers, rank_part.split(own), strict=True):
                    answers.append(answer(self._held[asked[number][0]], places).to(dtype))
            sent = torch.cat(answers) if answers else torch.empty(0, dim, dtype=dtype, device=self._device)
            rows = self._exchanged(sent, there, counts)
            for number, part, (order, _, _) in zip(numbers, _by_table(rows, counts), told, strict=True):
                found[number] = torch.empty_like(part).index_copy_(0, order, part)
        return found

    def _sent(self, given, dim: int, dtype: torch.dtype):  # type: ignore[no-untyped-def]
        """Of each table the places that every rank has sent rows for, and these rows."""
        told = [self._told(table, rows) for table, rows, _ in given]
        counts = torch.stack([count for _, _, count in told])
        there = self._counts(counts)
        values = [
            v.to(dtype).reshape(-1, dim)[order] for (_, _, v), (order, _, _) in zip(given, told, strict=True)
        ]
        places = self._exchanged(_by_rank([p for _, p, _ in told], counts), counts, there)
        rows = self._exchanged(_by_rank(values, counts), counts, there)
        columns = there.T.tolist()
        at = [part.split(own) for part, own in zip(places.split(there.sum(0).tolist()), columns, strict=True)]
        of = [part.split(own) for part, own in zip(rows.split(there.sum(0).tolist()), columns, strict=True)]
        for number, (table, _, _) in enumerate(given):
            yield table, [row[number] for row in at], [row[number] for row in of]

    def _told(self, table: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The order of rows by the ranks that have them, their places there, and how many each rank has."""
        del table
        owners = rows % self._size
        order = torch.argsort(owners, stable=True)
        return order, (rows // self._size)[order], torch.bincount(owners, minlength=self._size)

    def _counts(self, counts: Tensor) -> Tensor:
        """[tables, ranks] of what others ask of this rank."""
        sent = counts.T.contiguous()
        found = torch.empty_like(sent)
        if self._group is None:
            return counts
        dist.all_to_all_single(found, sent, group=self._group)
        return found.T.contiguous()

    def _exchanged(self, rows: Tensor, sent: Tensor, received: Tensor) -> Tensor:
        """`rows` in the order of ranks, to them."""
        if self._group is None:
            return rows
        into, out_of = received.sum(0).tolist(), sent.sum(0).tolist()
        found = rows.new_empty(sum(into), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), into, out_of, group=self._group)
        return found

    def _gathered(self, part: Tensor) -> Tensor:
        if self._group is None:
            return part
        sizes = torch.zeros(self._size, dtype=torch.int64, device=self._device)
        sizes[self._rank] = len(part)
        dist.all_reduce(sizes, group=self._group)
        found = [part.new_zeros(int(sizes.max()), *part.shape[1:]) for _ in range(self._size)]
        mine = part.new_zeros(int(sizes.max()), *part.shape[1:])
        mine[: len(part)] = part
        dist.all_gather(found, mine, group=self._group)
        return torch.cat([one[:size] for one, size in zip(found, sizes.tolist(), strict=True)])


def _by_rank(tables: Sequence[Tensor], counts: Tensor) -> Tensor:
    """Rows of tables, each in the order of ranks, as those of all tables in the order of ranks."""
    split = [rows.split(own) for rows, own in zip(tables, counts.tolist(), strict=True)]
    return torch.cat([part for rank in zip(*split, strict=True) for part in rank])


def _by_table(rows: Tensor, counts: Tensor) -> list[Tensor]:
    """The inverse of `_by_rank`."""
    ranks = [
        part.split(own)
        for part, own in zip(rows.split(counts.sum(0).tolist()), counts.T.tolist(), strict=True)
    ]
    return [torch.cat([rank[number] for rank in ranks]) for number in range(len(counts))]
