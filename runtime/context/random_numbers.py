"""Random numbers for shares of a sequence: peers, whose generators are in step, draw other ones for each share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autoparallel.runtime.ranks.accelerator import forked_generators
from autoparallel.runtime.torch_private import outside_tracing

_SEEDS = 2**62


@contextmanager
def drawn_apart(rank: int, device: torch.device, *, needed: bool) -> Iterator[None]:
    """Inside, what is drawn on `device` differs by `rank`; afterwards all ranks' generators are in step again."""
    if not needed:
        yield
        return
    with outside_tracing():
        common = int(torch.randint(0, _SEEDS, ()).item())
    with forked_generators(device):
        torch.manual_seed((common + rank) % _SEEDS)
        yield
