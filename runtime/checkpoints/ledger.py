"""The ledger of samples: in which order they come, and how far they are consumed.

A sample is consumed exactly once an epoch, in an order that a seed decides: neither the strategy nor the number of ranks
has a part in it. A global batch is a run of that order; a data-parallel rank takes its share of the run. What is saved is
a few numbers.

The order of an epoch is a permutation computed entry by entry (a Feistel network over the next power of four, walked until
it lands inside; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): nothing is held in memory for a dataset
of any size, and no library's generator can change it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoparallel.errors import UserError

Ids = NDArray[np.int64]
TAILS = ("carry", "drop")
# Rounds of the network. Kind: choice; four make it as good as random to who cannot ask adaptively (Luby and Rackoff).
_ROUNDS = 6
_WORD = np.uint64(0xFFFFFFFFFFFFFFFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """How far `samples` samples are consumed: `position` of them in epoch `epoch` (from 0).

    `tail` says what becomes of the samples at the end of an epoch that do not fill a batch: "carry", the batch goes on
    with the first of the next epoch; "drop", they are left out of this epoch.
    """

    samples: int
    seed: int = 0
    shuffle: bool = True
    tail: str = "carry"
    epoch: int = 0
    position: int = 0
    skipped: tuple[tuple[int, int, int], ...] = ()  # epoch, first and last position + 1 of batches left out

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError("the dataset has no samples: give one that has")
        if self.tail not in TAILS:
            raise UserError(f'tail = "{self.tail}": choose one of {", ".join(TAILS)}')

    @property
    def handed_out(self) -> int:
        """Samples since the first epoch, those that were dropped or skipped among them."""
        return self.epoch * self.samples + self.position

    def batch(self, size: int) -> Ids:
        """Ids (int64, `size` of them) of the next global batch. Raises UserError for a size that cannot be filled."""
        pieces = [self._order(epoch, first, stop) for epoch, first, stop in self._runs(size)]
        return np.concatenate(pieces)

    def share(self, size: int, rank: int, ranks: int) -> Ids:
        """Of the next global batch of `size`, what data-parallel rank `rank` of `ranks` reads: an equal run of it."""
        if size % ranks:
            raise UserError(
                f"a global batch of {size} samples has no {ranks} equal shares: change one of them"
            )
        each = size // ranks
        return self.batch(size)[rank * each : (rank + 1) * each]

    def after(self, size: int, *, skipped: bool = False) -> Ledger:
        """The ledger once the next `size` samples are consumed; `skipped`: noted as left out, not trained on."""
        runs = self._runs(size)
        epoch, _, position = runs[-1]
        if position == self.samples:
            epoch, position = epoch + 1, 0
        left_out = (*self.skipped, *runs) if skipped else self.skipped
        return replace(self, epoch=epoch, position=position, skipped=left_out)

    def _runs(self, size: int) -> list[tuple[int, int, int]]:
        """The next `size` samples as runs of (epoch, first position, last position + 1)."""
        if size < 1:
            raise UserError(f"a global batch of {size} samples: give at least 1")
        epoch, position = self.epoch, self.position
        if self.tail == "drop":
            if size > self.samples:
                raise UserError(
                    f'a global batch of {size} is more than the {self.samples} samples of an epoch with tail = "drop": '
                    'take a smaller batch, or tail = "carry"'
                )
            if position + size > self.samples:
                epoch, position = epoch + 1, 0
        runs = []
        while size:
            stop = min(position + size, self.samples)
            runs.append((epoch, position, stop))
            size -= stop - position
            epoch, position = epoch + 1, 0
        return runs

    def _order(self, epoch: int, first: int, stop: int) -> Ids:
        positions = np.arange(first, stop, dtype=np.uint64)
        if self.shuffle:
            positions = _permuted(positions, self.samples, _keys(self.seed, epoch))
        return positions.astype(np.int64)

    def state(self) -> dict[str, Any]:
        """What is saved: JSON."""
        return {**asdict(self), "skipped": [list(run) for run in self.skipped]}


def ledger_from_state(state: Mapping[str, Any]) -> Ledger:
    """Inverse of `Ledger.state`."""
    return Ledger(**{**state, "skipped": tuple((e, a, b) for e, a, b in state["skipped"])})


class Shares:
    """What a torch DataLoader takes as `batch_sampler`: lists of ids, one a step, of one rank's shares from `ledger` on.

    Workers may read ahead as far as they like: the ledger that is saved is the one that training has come to.
    """

    def __init__(self, ledger: Ledger, size: int, rank: int, ranks: int) -> None:
        ledger.share(size, rank, ranks)  # wrong sizes are told here, not inside a worker
        self._ledger, self._size, self._rank, self._ranks = ledger, size, rank, ranks

    def __iter__(self) -> Iterator[list[int]]:
        ledger = self._ledger
        while True:
            yield ledger.share(self._size, self._rank, self._ranks).tolist()
            ledger = ledger.after(self._size)


def _keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Keys of the rounds."""
    start = _mixed(_mixed(np.array([seed & int(_WORD)], np.uint64)) ^ np.uint64(epoch))
    return _mixed(start + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _permuted(words: NDArray[np.uint64], count: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Where a permutation of 0 to `count` - 1 takes `words`."""
    bits = np.uint64(max((count - 1).bit_length() + 1, 2) // 2)
    mask = (np.uint64(1) << bits) - np.uint64(1)
    words = words.copy()
    moving = np.ones(len(words), dtype=bool)
    while moving.any():
        left, right = words[moving] >> bits, words[moving] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        words[moving] = (left << bits) | right
        moving = words >= np.uint64(count)
    return words
