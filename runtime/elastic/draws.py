"""Random numbers of a step (dropout, most of all) that do not depend on where a run was interrupted.

Every step begins with a seed made of the run's seed, the step, the data-parallel rank and the pipeline stage: a run that
goes on from a checkpoint under the same strategy draws what it would have drawn. Under another strategy a sample meets
another rank, or another place in its micro-batch, and so another mask; the order of samples does not change.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from autoparallel.planner.strategy.types import Strategy


def seed_step(seed: int, step: int, data_rank: int, stage: int) -> None:
    """Seed the generators of this process, on the host and on its accelerators. Peers of tp and cp seed alike."""
    text = f"{seed} {step} {data_rank} {stage}".encode()
    torch.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1)


def stage_of(rank: int, strategy: Strategy) -> int:
    """The position of `rank` along pp."""
    mesh: Any = strategy.mesh
    stride = 1
    for axis in reversed(mesh.order):
        if axis == "pp":
            return int(rank // stride % mesh.pp)
        stride *= getattr(mesh, axis)
    return 0
