"""The ledger of samples: every sample once an epoch, in one order, whoever reads it."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.errors import UserError
from autoparallel.runtime.checkpoints.ledger import Ledger, Shares, ledger_from_state

BATCHES = st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 5)), min_size=1, max_size=12)


@settings(max_examples=50)
@given(samples=st.integers(1, 40), seed=st.integers(0, 2**64), batches=BATCHES)
def test_every_sample_comes_once_an_epoch_whatever_the_ranks(
    samples: int, seed: int, batches: list[tuple[int, int]]
) -> None:
    """`batches`: data-parallel ranks and samples of each, as a run that changes both at every step."""
    ledger, handed_out = Ledger(samples=samples, seed=seed), []
    for ranks, each in batches:
        for rank in range(ranks):
            handed_out += ledger.share(ranks * each, rank, ranks).tolist()
        ledger = ledger_from_state(json.loads(json.dumps(ledger.after(ranks * each).state())))
    straight = Ledger(samples=samples, seed=seed).batch(len(handed_out)).tolist()
    assert handed_out == straight
    assert ledger.handed_out == len(handed_out)
    for first in range(0, len(handed_out) - samples + 1, samples):
        assert sorted(handed_out[first : first + samples]) == list(range(samples))


@settings(max_examples=30)
@given(samples=st.integers(4, 40), size=st.integers(1, 4), steps=st.integers(1, 30))
def test_a_dropped_tail_leaves_whole_batches_of_one_epoch(samples: int, size: int, steps: int) -> None:
    ledger = Ledger(samples=samples, tail="drop", seed=3)
    for step in range(steps):
        assert ledger.handed_out // samples == step // (samples // size) or ledger.position + size > samples
        batch = ledger.batch(size).tolist()
        assert len(set(batch)) == size
        ledger = ledger.after(size)


def test_the_order_of_a_seed_stays_and_those_of_epochs_and_seeds_differ() -> None:
    assert Ledger(samples=10, seed=1).batch(10).tolist()[:6] == [6, 8, 7, 5, 0, 3], (
        "old checkpoints count on it"
    )
    orders = [
        tuple(Ledger(samples=50, seed=s, epoch=e).batch(50)) for s, e in itertools.product(range(4), range(4))
    ]
    assert len(set(orders)) == len(orders)
    assert Ledger(samples=4, shuffle=False).batch(6).tolist() == [0, 1, 2, 3, 0, 1]


def test_places_are_as_likely_as_each_other() -> None:
    """Chi-squared of where sample 0 of 8 comes, over 1,000 seeds: 7 degrees of freedom, below the 99.9 % quantile."""
    counts = [0] * 8
    for seed in range(1000):
        counts[Ledger(samples=8, seed=seed).batch(8).tolist().index(0)] += 1
    assert sum((c - 125) ** 2 / 125 for c in counts) < 24.3, counts


def test_readers_that_run_ahead_do_not_move_the_ledger() -> None:
    ledger = Ledger(samples=12, seed=5)
    ahead = list(itertools.islice(Shares(ledger, 4, 1, 2), 3))
    assert ahead == [
        ledger.share(4, 1, 2).tolist(),
        ledger.after(4).share(4, 1, 2).tolist(),
        ledger.after(8).share(4, 1, 2).tolist(),
    ]
    assert ledger == Ledger(samples=12, seed=5)


def test_skipped_batches_are_noted() -> None:
    ledger = Ledger(samples=10).after(8).after(4, skipped=True)
    assert ledger.skipped == ((0, 8, 10), (1, 0, 2))
    assert ledger_from_state(json.loads(json.dumps(ledger.state()))) == ledger


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Ledger(samples=0), "no samples"),
        (lambda: Ledger(samples=3, tail="keep"), "carry, drop"),
        (lambda: Ledger(samples=3).share(4, 0, 3), "no 3 equal shares"),
        (lambda: Ledger(samples=3, tail="drop").batch(4), "more than the 3 samples"),
    ],
)
def test_wrong_sizes_are_told(make: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()  # type: ignore[operator]
