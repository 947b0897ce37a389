"""The samples of a run: a dataset read in the order of its ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Dataset

from autoparallel.errors import UserError
from autoparallel.runtime.checkpoints.ledger import Ledger, Shares, ledger_from_state


class Samples:
    """A map-style dataset, and the ledger of what is consumed of it, in global batches of `size`."""

    def __init__(
        self,
        data: Any,
        ledger: Ledger,
        size: int,
        *,
        collate: Callable[[list[Any]], Any],
        loader: Mapping[str, Any],
    ) -> None:
        self.ledger, self.size = ledger, size
        self._data, self._collate, self._loader = data, collate, loader
        self._left_out: set[tuple[int, int]] = set()  # epoch and position of their first samples

    def example(self, count: int) -> Any:
        """The next `count` samples, collated."""
        return self._collate([self._data[i] for i in self.ledger.batch(count).tolist()])

    def shares(self, rank: int, ranks: int) -> Iterator[tuple[Any, list[int]]]:
        """What data-parallel rank `rank` of `ranks` reads, step by step from the ledger on, and the ids of it."""
        yield from DataLoader(
            _Named(self._data), batch_sampler=Shares(self.ledger, self.size, rank, ranks),
            collate_fn=partial(_collated, self._collate), **self._loader,
        )  # fmt: skip

    def leave_out(self) -> None:
        """Have the next batch left out, though it may come only after others that are done again."""
        self._left_out.add((self.ledger.epoch, self.ledger.position))

    def left_out(self) -> bool:
        """Whether the next batch is one that is left out."""
        return (self.ledger.epoch, self.ledger.position) in self._left_out

    def consume(self, *, skipped: bool = False) -> None:
        """Note that one more global batch is consumed."""
        self.ledger = self.ledger.after(self.size, skipped=skipped)

    def go_on(self, state: Mapping[str, Any], where: str) -> None:
        """Take over what is consumed. Raises UserError where it was consumed in another order."""
        kept, own = ledger_from_state(state), self.ledger
        for what in ("samples", "seed", "shuffle", "tail"):
            if getattr(kept, what) != getattr(own, what):
                raise UserError(
                    f"the run in {where} has {what} = {getattr(kept, what)!r} and is now given {getattr(own, what)!r}, "
                    "which is another order of samples: give what it has, or another folder"
                )
        self.ledger = kept


class _Named(Dataset[Any]):
    """Samples with their ids."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self._data[index]


def _collated(collate: Callable[[list[Any]], Any], pairs: list[tuple[int, Any]]) -> tuple[Any, list[int]]:
    return collate([item for _, item in pairs]), [index for index, _ in pairs]
