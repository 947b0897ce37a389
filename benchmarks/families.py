"""The constants that training rows decide, and what they start from (`priors.toml`), before any row is seen.

    log(constant) = log(prior) + sum of x[family, home] over the families that hold it
    x[family, home] ~ N(x[family, parent], between^2),    x[family] ~ N(0, shared^2)

A home is the file that a constant stands in: a generation's, or a device's own, whose parent is its generation. The parent of
a generation is what all generations share, so that one of which nothing was measured follows the others.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp
from pathlib import Path
from statistics import mean

from autoparallel.profiles import load_device
from autoparallel.profiles.constants import UNLESS_SET
from autoparallel.profiles.hardware import Device
from autoparallel.profiles.load import stated_constants
from autoparallel.profiles.schema import FigureTable, check_figure

PRIORS = Path(__file__).with_name("priors.toml")
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Constants that move together, by one factor; one may be in several families, and has the product of their factors."""

    name: str
    keys: tuple[str, ...]
    shared: float
    between: float

    def holds(self, key: str) -> bool:
        return any(key == own or (own.endswith(".") and key.startswith(own)) for own in self.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Files that state the same constants; `parent` is the generation of a device's own."""

    name: str
    parent: str
    files: tuple[Path, ...]
    prior: Mapping[str, FigureTable]
    follows: bool = False  # its generation: its priors are that one's by a formula
    between: tuple[str, ...] = ()  # homes whose mean the constants `means` are
    means: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Priors:
    """Families and homes, as the file has them."""

    families: tuple[Family, ...]
    homes: Mapping[str, Home]

    def home_of(self, family: Family, device: str, generation: str) -> str | None:
        """Where a device's constants of a family stand; None where no prior says that they may move."""
        for home in self.homes.values():
            if device in [path.stem for path in home.files] and self.states(home.name, family):
                return home.name
        return generation if self.states(generation, family) else None

    def states(self, home: str, family: Family) -> bool:
        return bool(self.keys(home, family))

    def keys(self, home: str, family: Family) -> tuple[str, ...]:
        """The constants of a family that a home states."""
        return tuple(filter(family.holds, self.homes[home].prior)) if home in self.homes else ()


def read_priors(path: Path = PRIORS) -> Priors:
    """The families, homes and priors of a file."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    families = tuple(
        Family(name=f["name"], keys=tuple(f["keys"]), shared=f["shared"], between=f["between"])
        for f in table["family"]
    )
    every = table["prior"].get("", {})  # of all generations that say nothing else
    homes = {
        name: Home(
            name=name,
            parent=entry.get("of", ""),
            files=tuple(ROOT / file for file in entry["files"]),
            prior={
                key: check_figure(figure, f"{path.name}: {name}")
                for key, figure in (({} if "of" in entry else every) | table["prior"].get(name, {})).items()
            },
            follows=entry.get("follows", False),
            between=tuple(entry.get("between", ())),
            means=tuple(entry.get("means", ())),
        )
        for name, entry in table["home"].items()
    }
    return Priors(families=families, homes=homes)


def a_device(path: Path) -> str:
    """A device whose constants of a file are the file's."""
    of_architecture = {
        "volta": "v100-sxm2-16gb", "ampere": "a100-pcie-80gb", "hopper": "h100-sxm", "ada": "rtx4090",
        "blackwell": "b200", "cdna3": "mi300x",
    }  # fmt: skip
    return of_architecture.get(path.stem, path.stem)


Moves = Mapping[tuple[str, str], float]  # log factors on priors, by family and home


def unknown_of(priors: Priors, home: str) -> str:
    """Whose factor a home's constants have: its generation's, where it follows that by a formula."""
    return priors.homes[home].parent if priors.homes[home].follows else home


def values(priors: Priors, moves: Moves, home: str) -> dict[str, float]:
    """The constants of a home under `moves`, to three digits."""
    factor_of, found = unknown_of(priors, home), {}
    for key, figure in priors.homes[home].prior.items():
        factor = sum(
            moves.get((family.name, factor_of), 0.0) for family in priors.families if family.holds(key)
        )
        found[key] = float(f"{figure.value * exp(factor):.3g}")
    return found


def means(priors: Priors, home: str) -> dict[str, float]:
    """The constants of a home that are the mean of what other generations' files state."""
    between = [load_device(a_device(priors.homes[name].files[0])) for name in priors.homes[home].between]
    return {key: mean(device.constants[key] for device in between) for key in priors.homes[home].means}


def moved(device: Device, priors: Priors, moves: Moves, dirs: Sequence[Path] = ()) -> Device:
    """A device with the constants that its files would have under `moves`, whatever they have for them now."""
    found: dict[str, float] = {}
    stated: set[str] = set()
    for file, keys in reversed(_stated(device.name, tuple(dirs))):
        stated |= set(keys)
        found = {key: value for key, value in found.items() if key not in keys}
        for home in priors.homes.values():
            if file in home.files:
                found |= means(priors, home.name) | values(priors, moves, home.name)
    for key, other in UNLESS_SET.items():  # constants that are another's where no file states them
        if isinstance(other, str) and key not in stated | found.keys():
            found[key] = found.get(other, device.constants[other])
    return replace(device, constants={**device.constants, **found})


@cache
def _stated(device: str, dirs: tuple[Path, ...]) -> tuple[tuple[Path, tuple[str, ...]], ...]:
    return stated_constants(device, dirs=dirs)


def scaled(device: Device, keys: Sequence[str], factor: float) -> Device:
    """A device with some constants times a factor."""
    changed = {key: device.constants[key] * factor for key in keys}
    return replace(device, constants={**device.constants, **changed})
