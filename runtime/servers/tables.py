"""All tables of one model whose rows are in tiers: looked up in forward passes, given gradients in backward passes, updated.

The `hot` rows of a table are the module's `weight`, a parameter like others; the rest is asked of a `Store`, each row once per
micro-batch, and kept until its gradient has come. When the gradients of all rows of a micro-batch are there they go back in one
exchange; `commit`, by the optimizer's step, has the stores update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from autoparallel.errors import UserError
from autoparallel.runtime.servers.foresight import Foresight, same_memory
from autoparallel.runtime.servers.store import Ending, Store, TableShape


@dataclass(slots=True, kw_only=True, eq=False)
class Table:
    """One table: which of its rows are hot (ascending), the store of the others and the table's number there."""

    shape: TableShape
    module: nn.Module
    hot: Tensor
    store: Store
    number: int
    padding: int | None
    synchronous: bool
    hot_counts: Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class _Fetched:
    """Rows of one look-up: `cold` were asked of the store, whose `values` want a gradient."""

    table: Table
    indices: Tensor
    version: int
    hot: Tensor  # places among the hot rows
    cold: Tensor
    order: Tensor  # for each index its place in hot rows, then cold ones
    values: Tensor


@dataclass(slots=True)
class _Flight:
    """The look-ups of one forward pass, and those of them whose gradients have not come."""

    waiting: list[_Fetched] = field(default_factory=list)
    arrived: list[_Fetched] = field(default_factory=list)


class TieredTables:
    """The tables of `module`; see the module's docstring. `workers` read different samples."""

    def __init__(
        self, module: nn.Module, tables: Sequence[Table], *, workers: int, update_all: bool,
        closing: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.tables = tuple(tables)
        self._workers, self._update_all, self._closing = workers, update_all, closing
        self._foresight, self._ahead = Foresight(), dict[int, _Fetched]()
        self._flight = _Flight()
        self._clip, self._dirty = 1.0, False
        self.stores: tuple[Store, ...] = tuple(dict.fromkeys(table.store for table in tables))
        module.register_forward_pre_hook(self._begin, with_kwargs=True)
        module.register_forward_hook(self._end, always_call=True)

    @property
    def names(self) -> dict[str, Table]:
        """By the name of its parameter in the model."""
        return {table.shape.name: table for table in self.tables}

    def look_up_of(self, number: int) -> Callable[[Tensor, Any], Tensor]:
        """What the module of a table calls."""
        return partial(self._look_up, number)

    def _begin(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._foresight.begin((args, kwargs))
        self._ahead, self._flight = {}, _Flight()

    def _end(self, *_: Any) -> None:
        self._foresight.end()
        self._ahead = {}

    def _look_up(self, number: int, indices: Tensor, weight: Any) -> Tensor:
        fetched = self._ahead.pop(number, None)
        if fetched is None or not _still(fetched, indices):
            asked = {n: i for n, i in self._foresight.foreseen().items() if n not in self._ahead}
            self._foresight.learn(number, indices)
            if number not in asked or not same_memory(asked[number], indices):
                asked = {number: indices}
            self._ahead |= self._fetch(asked)
            fetched = self._ahead.pop(number)
        if torch.is_grad_enabled():
            fetched.values.requires_grad_()
            flight = self._flight
            flight.waiting.append(fetched)
            fetched.values.register_post_accumulate_grad_hook(lambda _: self._came(flight, fetched))
        rows = fetched.values
        if len(fetched.hot):
            rows = torch.cat([weight.index_select(0, fetched.hot).to(rows.dtype), rows])
        elif torch.is_grad_enabled() and isinstance(weight, Tensor):
            rows = rows + weight.sum() * 0.0  # every rank's backward pass meets the same parameters
        return functional.embedding(fetched.order.view(indices.shape), rows)

    def _fetch(self, asked: Mapping[int, Tensor]) -> dict[int, _Fetched]:
        """The rows that tables are asked for, of each store at once."""
        told = {number: _divided(self.tables[number], indices) for number, indices in asked.items()}
        found = {}
        for store in self.stores:
            own = [number for number in sorted(told) if self.tables[number].store is store]
            if not own:
                continue
            pulled = store.pull([(self.tables[number].number, told[number][1]) for number in own])
            for number, values in zip(own, pulled, strict=True):
                hot, cold, order = told[number]
                indices = asked[number]
                found[number] = _Fetched(
                    table=self.tables[number], indices=indices, version=indices._version, hot=hot, cold=cold,
                    order=order, values=values,
                )  # fmt: skip
        return found

    def _came(self, flight: _Flight, fetched: _Fetched) -> None:
        flight.waiting.remove(fetched)
        flight.arrived.append(fetched)
        if not flight.waiting:
            self._return(flight)

    @torch.no_grad()
    def _return(self, flight: _Flight) -> None:
        """Gradients back to the stores, those of each at once."""
        arrived, flight.arrived = flight.arrived, []
        self._dirty = self._dirty or bool(arrived)
        for store in self.stores:
            given = []
            for fetched in sorted(
                (f for f in arrived if f.table.store is store), key=lambda f: f.table.number
            ):
                gradient = fetched.values.grad
                assert gradient is not None
                if fetched.table.padding is not None:
                    gradient = gradient * (fetched.cold != fetched.table.padding).unsqueeze(1)
                given.append((fetched.table.number, fetched.cold, gradient))
                fetched.values.grad = None
            if given:
                store.push(given)

    def finish(self) -> None:
        """The end of a step's backward passes: rows that the loss did not depend on have no gradient."""
        self._return(self._flight)
        self._flight = _Flight()

    def norm_squared(self) -> Tensor:
        """Of the mean gradients of all cold rows."""
        self._check_synchronous("clip_grad_norm_")
        return torch.tensor(sum(store.square() for store in self.stores) / self._workers**2)

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradients that have come."""
        self._clip *= float(factor)

    def gradient(self, table: Table) -> Tensor:
        """The mean gradient of a whole table but for its hot rows, which are zero. Collective."""
        self._check_synchronous("full_gradients")
        rows, sums = table.store.sums(table.number)
        found = torch.zeros(table.shape.rows, table.shape.dim, device=sums.device)
        return found.index_copy_(0, rows, sums * (self._clip / self._workers))

    def commit(self, optimizer: Optimizer, kind: type) -> None:
        """The end of a step: rows move by `kind`, with the options that the optimizer has for the table's hot rows, or its
        defaults. What is not synchronous moves by each worker's own gradient, a worker's share of the learning rate at a time."""
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        known = set(optimizer.defaults)
        for store in self.stores:
            own = [table for table in self.tables if table.store is store]
            synchronous = all(table.synchronous for table in own)
            options = {}
            for table in own:
                group = groups.get(table.module.weight, optimizer.defaults)
                options[table.number] = {key: _plain(group[key]) for key in known}
                if not synchronous:
                    options[table.number]["lr"] = options[table.number]["lr"] / self._workers
            store.commit(
                Ending(
                    kind=kind, options=options, scale=self._clip / self._workers if synchronous else self._clip,
                    all_rows=self._update_all,
                )
            )  # fmt: skip
        self._clip, self._dirty = 1.0, False

    def forget(self) -> None:
        """Drop gradients that no step has used (`zero_grad`)."""
        for store in self.stores if self._dirty else ():
            store.forget()
        self._clip, self._dirty = 1.0, False

    def join(self, address: tuple[str, int]) -> None:
        """A further server, which takes its share of the tables. Collective, between two steps."""
        for store in self.stores:
            if hasattr(store, "join"):
                store.join(address)

    def close(self) -> None:
        """Stop what was started for the tables; the model cannot look up cold rows any more."""
        for store in self.stores:
            store.close()
        if self._closing is not None:
            self._closing()

    def _check_synchronous(self, what: str) -> None:
        if not all(table.synchronous for table in self.tables):
            raise UserError(
                f'{what} with servers that are not synchronous: no worker has all gradients; write servers.mode = "synchronous"'
            )


def _divided(table: Table, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Places of hot rows, cold rows, and for each index its place in the one, then the other."""
    rows, inverse = torch.unique(indices.reshape(-1), return_inverse=True)
    if not len(table.hot):
        return rows[:0], rows, inverse
    at = torch.searchsorted(table.hot, rows).clamp(max=len(table.hot) - 1)
    is_hot = table.hot[at] == rows
    hot, cold = at[is_hot], rows[~is_hot]
    table.hot_counts.index_add_(0, hot, torch.ones_like(hot, dtype=torch.float32))
    place = torch.empty_like(rows)
    place[is_hot] = torch.arange(len(hot), device=rows.device)
    place[~is_hot] = torch.arange(len(hot), len(rows), device=rows.device)
    return hot, cold, place[inverse]


def _still(fetched: _Fetched, indices: Tensor) -> bool:
    return same_memory(fetched.indices, indices) and indices._version == fetched.version


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
