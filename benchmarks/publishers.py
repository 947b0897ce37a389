"""Who published a source, and of which generation a device is: what is left out together."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from autoparallel.profiles.load import own_constants

PUBLISHERS = Path(__file__).with_name("publishers.toml")


def publishers() -> dict[str, str]:
    """The publisher of each known source."""
    table: dict[str, list[str]] = tomllib.loads(PUBLISHERS.read_text(encoding="utf-8"))["publishers"]
    return {source: publisher for publisher, sources in table.items() for source in sources}


def publisher_of(source: str, known: dict[str, str]) -> str:
    """A source that is not listed is a publisher of its own."""
    return known.get(source, source)


def generation_of(device: str, dirs: Sequence[Path] = ()) -> str:
    """The architecture that a device's file names."""
    return own_constants(device, dirs=dirs)[0]
