"""Constants from rows: what the fit finds, what priors hold, and what it writes."""

from __future__ import annotations

import csv
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import pytest

from autoparallel.profiles import load_device
from autoparallel.profiles.constants import UNLESS_SET
from autoparallel.profiles.load import stated_constants
from benchmarks import rows
from benchmarks.accuracy import DEVICES
from benchmarks.families import ROOT, Priors, a_device, moved, read_priors, values
from benchmarks.fit import rewritten, solve
from benchmarks.leave_out import shipped
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
            assert any(family.holds(key) for family in PRIORS.families), key


def test_slower_rows_make_slower_products_but_not_all_the_way() -> None:
    found = solve(sensitives("h100-sxm", "hopper", 1.1, slopes_of(PRIORS, "products", -0.5)), PRIORS, {})
    assert log(1 / 1.1) / 0.5 < found["products", "hopper"] < -0.05


def test_a_generation_without_rows_follows_the_others() -> None:
    found = solve(sensitives("h100-sxm", "hopper", 1.1, slopes_of(PRIORS, "products", -0.5)), PRIORS, {})
    assert found["products", "hopper"] < found["products", ""] < 0.0
    assert found["products", "cdna3"] == pytest.approx(found["products", ""])


def test_slower_products_in_16_bits_are_slower_in_8_too() -> None:
    moves = {("products", "hopper"): -0.2, ("products-8", "hopper"): 0.05}
    prior, found = PRIORS.homes["hopper"].prior, values(PRIORS, moves, "hopper")
    for key, factor in (("gemm.efficiency.half", -0.2), ("gemm.efficiency.fp8", -0.15)):
        assert found[key] == pytest.approx(prior[key].value * exp(factor), rel=5e-3)


@pytest.mark.parametrize("home", PRIORS.homes)
def test_the_factors_of_what_ships_give_what_ships(home: str) -> None:
    device = load_device(a_device(PRIORS.homes[home].files[0]), dirs=[DEVICES])
    for key, value in values(PRIORS, shipped(PRIORS), home).items():
        assert value == pytest.approx(device.constants[key], rel=0.03), key


def test_a_device_that_follows_its_generation_moves_with_it() -> None:
    device = load_device("h100-sxm-96gb", dirs=[DEVICES])
    prior = PRIORS.homes["h100-sxm-96gb"].prior["attention.forward"].value
    slower = moved(device, PRIORS, {("attention", "hopper"): -0.2}, [DEVICES])
    assert slower.constants["attention.forward"] == pytest.approx(prior * exp(-0.2), rel=5e-3)


@pytest.mark.parametrize("name", ["h100-sxm", "a100-sxm-80gb", "h100-sxm-96gb", "v100-sxm2-16gb", "mi300x"])
def test_what_the_fit_writes_is_priced_whatever_the_files_hold(name: str) -> None:
    device, written = load_device(name, dirs=[DEVICES]), set[str]()
    for file, _ in stated_constants(name, dirs=[DEVICES]):
        homes = [home for home in PRIORS.homes.values() if file in home.files]
        written |= {key for home in homes for key in (*home.prior, *home.means)}
    written |= {key for key, other in UNLESS_SET.items() if other in written}
    other = {key: value * 1.3 if key in written else value for key, value in device.constants.items()}
    changed = moved(replace(device, constants=other), PRIORS, {}, [DEVICES])
    assert changed == moved(device, PRIORS, {}, [DEVICES])


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


# Words of a guess, and what a constant that the fit does not write must name: what somebody measured, published or counted.
GUESSES = re.compile(r"estimate|assum|by the author|by hand|to be (corrected|fitted)", re.IGNORECASE)
FITTED_TO = re.compile(
    r"published/(kernels|collectives)\.csv|arXiv|paper|datasheet|measured:|autoparallel profile|SemiAnalysis|stas00|runs that died"
)
HOMES = {file: home for home in PRIORS.homes.values() for file in home.files}


@pytest.mark.parametrize("folder", ["architectures", "devices"])
def test_every_constant_is_written_by_the_fit_or_carries_a_source(folder: str) -> None:
    wrong = []
    for path in sorted((ROOT / "profiles" / folder).glob("*.toml")):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        listed = {key: entry for entry in table.get("provenance", ()) for key in entry["keys"]}
        home = HOMES.get(path)
        for key, figure in _figures(table):
            known = figure if isinstance(figure, dict) else listed.get(key, {})
            kind, source = known.get("kind"), known.get("source", "")
            name = key.removeprefix("constants.")
            fits = home is not None and (name in home.means or name in home.prior)
            guessed = GUESSES.search(source) or (kind == "fitted" and not FITTED_TO.search(source))
            if fits != source.startswith("benchmarks/fit.py") or (guessed and not fits):
                wrong.append((path.name, key, source))
            elif fits and home is not None and name in home.prior:
                prior = home.prior[name]
                if not source.endswith(f"from {prior.value:g} ({prior.kind}: {prior.source})"):
                    wrong.append((path.name, key, f"{source}: the prior is another now"))
    assert not wrong, "\n".join(map(str, wrong))


def _figures(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """The constants, rates and sizes that a file states, by dotted key."""
    for name, value in table.items():
        if isinstance(value, dict) and "value" not in value and name not in ("residuals", "posterior"):
            yield from _figures(value, f"{prefix}{name}.")
        elif isinstance(value, float | dict) and name not in ("residuals", "posterior"):
            yield f"{prefix}{name}", value


def test_no_prior_is_a_guess() -> None:
    for home in PRIORS.homes.values():
        for key, figure in home.prior.items():
            assert not GUESSES.search(figure.source), (home.name, key)
            if figure.kind == "fitted":
                assert "proportions" in figure.source, (home.name, key)
