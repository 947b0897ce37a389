"""The samples of a run: a dataset read in the order of its ledger, or one for each length of sequences that its phases have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Dataset

from autoparallel.errors import UserError
from autoparallel.planner.strategy.lengths import SEQ_LEN, phase_lengths, phases_of
from autoparallel.runtime.checkpoints.identity import dataset_identity
from autoparallel.runtime.checkpoints.ledger import Ledger, Shares, ledger_from_state

_LENGTHS = "lengths"  # of a state of several ledgers


class Samples:
    """Map-style datasets, and the ledgers of what is consumed of them, in global batches of `size`.

    `data` is a dataset, or a mapping of datasets by the tokens of their sequences; `said` is what the strategy says of lengths
    (`batch.seq_len`, the first dataset's where it says nothing, and its phases'). `ledger(samples=…)` makes a ledger. Raises UserError
    where a length has no dataset.
    """

    def __init__(
        self,
        data: Any,
        ledger: Callable[..., Ledger],
        size: int,
        said: Mapping[str, object],
        *,
        collate: Callable[[list[Any]], Any],
        loader: Mapping[str, Any],
    ) -> None:
        self._sets: dict[int, Any] = dict(data) if isinstance(data, Mapping) else {0: data}
        self._ledgers = {tokens: ledger(samples=len(one)) for tokens, one in self._sets.items()}
        if not self._sets:
            raise UserError("Trainer(data={}): give a dataset, or one for each length of sequences")
        self.size, self._collate, self._loader = size, collate, loader
        self._left_out: set[tuple[int, int, int]] = set()  # length, epoch and position of their first samples
        self._now = next(iter(self._sets))
        self.check(said)
        stated = said.get(SEQ_LEN, 0)
        assert isinstance(stated, int)
        self.enter(stated)
        self._first = self._now

    def check(self, said: Mapping[str, object]) -> None:
        """Raises UserError where phases have sequences of a length that no dataset has."""
        for tokens, where in phase_lengths(phases_of(said)).items():
            if tokens not in self._sets:
                raise UserError(
                    f"{where}: Trainer has no data of that length: give a dataset for each length, as data={{LENGTH: …, {tokens}: …}}"
                )

    def enter(self, tokens: int) -> None:
        """From now on read sequences of so many tokens (0: of those that are read). Raises UserError where there are none."""
        if tokens in (0, self._now) or set(self._sets) == {0}:
            return
        if tokens not in self._sets:
            known = " and ".join(map(str, self._sets))
            raise UserError(f"{SEQ_LEN} = {tokens}: Trainer has data of {known} tokens; give that, too")
        self._now = tokens

    @property
    def ledger(self) -> Ledger:
        """What is consumed of the dataset that is read."""
        return self._ledgers[self._now]

    def identity(self) -> dict[str, str]:
        """Hashes of the datasets."""
        others = {f"dataset of {n} tokens": dataset_identity(self._sets[n]) for n in self.others}
        return {"dataset": dataset_identity(self._sets[self._first]), **others}

    @property
    def others(self) -> tuple[int, ...]:
        """The lengths of which there are datasets beside the first."""
        return tuple(tokens for tokens in self._sets if tokens != self._first)

    def example(self, count: int, tokens: int = 0) -> Any:
        """The next `count` samples, collated, of the dataset of so many tokens, the first one where there is none."""
        known = tokens if tokens in self._sets else self._first
        return self._collate([self._sets[known][i] for i in self._ledgers[known].batch(count).tolist()])

    def shares(self, rank: int, ranks: int) -> Iterator[tuple[Any, list[int]]]:
        """What data-parallel rank `rank` of `ranks` reads, step by step from the ledger on, and the ids of it."""
        yield from DataLoader(
            _Named(self._sets[self._now]), batch_sampler=Shares(self.ledger, self.size, rank, ranks),
            collate_fn=partial(_collated, self._collate), **self._loader,
        )  # fmt: skip

    def leave_out(self) -> None:
        """Have the next batch left out, though it may come only after others that are done again."""
        self._left_out.add((self._now, self.ledger.epoch, self.ledger.position))

    def left_out(self) -> bool:
        """Whether the next batch is one that is left out."""
        return (self._now, self.ledger.epoch, self.ledger.position) in self._left_out

    def consume(self, *, skipped: bool = False) -> None:
        """Note that one more global batch is consumed."""
        self._ledgers[self._now] = self.ledger.after(self.size, skipped=skipped)

    def state(self) -> dict[str, Any]:
        """What is saved: JSON. Of one dataset its ledger, of several theirs by length."""
        if len(self._sets) == 1:
            return self.ledger.state()
        return {_LENGTHS: {str(tokens): ledger.state() for tokens, ledger in self._ledgers.items()}}

    def go_on(self, state: Mapping[str, Any], where: str) -> None:
        """Take over what is consumed, of the first dataset where there was one alone. Raises UserError where it was consumed in another
        order, or of a dataset that is not there any more."""
        kept = state.get(_LENGTHS, {str(self._first): state})
        for tokens in map(int, kept):
            if tokens not in self._sets:
                raise UserError(
                    f"the run in {where} has consumed data of {tokens} tokens, and none of that length is given: give data={{{tokens}: …}}, "
                    "or another folder"
                )
        for tokens, one in kept.items():
            self._ledgers[int(tokens)] = self._going_on(one, self._ledgers[int(tokens)], where)

    @staticmethod
    def _going_on(state: Mapping[str, Any], own: Ledger, where: str) -> Ledger:
        kept = ledger_from_state(state)
        for what in ("samples", "seed", "shuffle", "tail"):
            if getattr(kept, what) != getattr(own, what):
                raise UserError(
                    f"the run in {where} has {what} = {getattr(kept, what)!r} and is now given {getattr(own, what)!r}, "
                    "which is another order of samples: give what it has, or another folder"
                )
        return kept


class _Named(Dataset[Any]):
    """Samples with their ids."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self._data[index]


def _collated(collate: Callable[[list[Any]], Any], pairs: list[tuple[int, Any]]) -> tuple[Any, list[int]]:
    return collate([item for _, item in pairs]), [index for index, _ in pairs]
