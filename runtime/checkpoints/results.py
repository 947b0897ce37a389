"""What saving and loading hand back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The checkpoint that was loaded; `refused` are those that were damaged, in words; `in_memory`: it was a copy there."""

    step: int
    extra: Mapping[str, Any]
    refused: tuple[str, ...] = ()
    in_memory: bool = False


@dataclass(slots=True, kw_only=True)
class Timing:
    """Seconds that training waited for saves, and of the last one: its copy, and copy and write together."""

    waited_s: float = 0.0
    last_copy_s: float = 0.0
    last_save_s: float = 0.0
    last_neighbour_s: float = 0.0  # of the last copy in memory
    bytes_: int = 0  # of this rank's last file
