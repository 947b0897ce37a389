"""Constants from rows: what the fit finds, what priors hold, and what it writes."""

from __future__ import annotations

import csv
from math import exp, log
from pathlib import Path

import pytest

from autoparallel.profiles import load_device
from benchmarks import rows
from benchmarks.accuracy import DEVICES
from benchmarks.families import Priors, moved, read_priors
from benchmarks.fit import rewritten, solve
from benchmarks.publishers import publishers
from benchmarks.sensitivity import Sensitive, Timed

PUBLISHED = Path(rows.__file__).parent / "published"
PRIORS = read_priors()


def published(name: str) -> list[dict[str, str]]:
    with (PUBLISHED / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def sensitives(device: str, generation: str, ratio: float, slopes: tuple[float, ...]) -> list[Sensitive]:
    row = next(
        r for name in ("training_rows", "further_rows") for r in published(name) if r["device"] == device
    )
    run = rows.parse(row, [DEVICES])
    return [
        Sensitive(
            timed=Timed(run=run, publisher=publisher, generation=generation),
            measured_s=ratio, predicted_s=1.0, slopes=slopes,
        )
        for publisher in ("A", "B", "C", "D")
    ]  # fmt: skip


def slopes_of(priors: Priors, name: str, slope: float) -> tuple[float, ...]:
    return tuple(slope if family.name == name else 0.0 for family in priors.families)


def test_every_source_has_a_publisher() -> None:
    sources = {
        row["source"]
        for name in ("training_rows", "further_rows", "released_rows")
        for row in published(name)
    }
    assert sources == set(publishers())


def test_every_prior_is_a_constant_of_a_family_that_says_where_it_is_from() -> None:
    constants = load_device("h100-sxm").constants
    for home in PRIORS.homes.values():
        assert home.prior, home.name
        for key, figure in home.prior.items():
            assert key in constants, key
            assert figure.source, (home.name, key)
            assert sum(family.holds(key) for family in PRIORS.families) == 1, key


def test_slower_rows_make_slower_products_but_not_all_the_way() -> None:
    found = solve(sensitives("h100-sxm", "hopper", 1.1, slopes_of(PRIORS, "products", -0.5)), PRIORS, {})
    assert log(1 / 1.1) / 0.5 < found["products", "hopper"] < -0.05


def test_a_generation_without_rows_follows_the_others() -> None:
    found = solve(sensitives("h100-sxm", "hopper", 1.1, slopes_of(PRIORS, "products", -0.5)), PRIORS, {})
    assert found["products", "hopper"] < found["products", ""] < 0.0
    assert found["products", "cdna3"] == pytest.approx(found["products", ""])


def test_a_device_that_follows_its_generation_moves_with_it() -> None:
    device = load_device("h100-sxm-96gb", dirs=[DEVICES])
    prior = PRIORS.homes["h100-sxm-96gb"].prior["attention.forward"].value
    slower = moved(device, "hopper", PRIORS, {("attention", "hopper"): -0.2})
    assert slower.constants["attention.forward"] == pytest.approx(prior * exp(-0.2), rel=5e-3)


def test_writing_changes_the_constants_named_and_nothing_else() -> None:
    text = "# note\n[constants.gemm]\nunits = { value = 1 }\nboost = { value = 2 }\n\n[box]\nunits = 4\n"
    changed = rewritten(text, {"gemm.boost": (0.5, "rows"), "launch_s.eager": (1e-5, "rows")})
    assert changed.splitlines()[:4] == [
        "# note", "[constants.gemm]", "units = { value = 1 }",
        'boost = { value = 0.5, kind = "fitted", source = "rows" }',
    ]  # fmt: skip
    assert changed.endswith(
        '[constants.launch_s]\neager = { value = 1e-05, kind = "fitted", source = "rows" }\n'
    )
    assert rewritten(changed, {"gemm.boost": (0.5, "rows"), "launch_s.eager": (1e-5, "rows")}) == changed
