"""Which shipped device a machine has, by the name that its driver gives it, such as "NVIDIA H100 80GB HBM3"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from autoparallel.profiles.load import device_names

_SIZE = re.compile(r"\d+gb")
_CARDS = ("pcie", "nvl")  # words of cards that sit in a slot, not on a board of several


def device_of_hardware(hardware: str) -> str | None:
    """The shipped device of that name; None where there is none, or only another form of it.

    The first part of a device's name is a word of the hardware's, or two ("RTX 4090"). Its other parts must not say
    another size or another form: drivers name the memory of some and the slot of others, and of boards neither.
    """
    words = hardware.lower().replace("-", " ").split()
    if "laptop" in words:  # other chips of the same name
        return None
    known = {*words, *(first + second for first, second in pairwise(words))}
    matching = [n for n in device_names() if n.split("-")[0] in known and not _is_another(n, words)]
    return max(matching, key=lambda n: sum(part in known for part in n.split("-")), default=None)


def _is_another(name: str, words: Sequence[str]) -> bool:
    parts = name.split("-")
    sizes = [part for part in parts if _SIZE.fullmatch(part)]
    told = [word for word in words if _SIZE.fullmatch(word)]
    if sizes and told and sizes[0] not in told:
        return True
    on_card = any(word in words for word in _CARDS)
    return ("pcie" in parts and "pcie" not in words) or (on_card and any(p.startswith("sxm") for p in parts))
