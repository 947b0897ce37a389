"""Copies of a run's state in the memory of neighbouring nodes: whether there are any, and after how many steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autoparallel.costmodel.simulate import simulate
from autoparallel.intervals import steps_of
from autoparallel.profiles import Cluster
from autoparallel.runtime.checkpoints.keeper import Checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """Copies of the state in the memory of neighbouring nodes (1 or 0), after `every` steps (None: as the strategy's
    `[recovery]` says, else after each), in a folder under `memory`, a tmpfs of every node (None: /dev/shm)."""

    copies: int = 1
    every: int | None = None
    memory: str | os.PathLike[str] | None = None


def copies_every(
    given: PeerOptions | None, checkpoints: Checkpoints, model: Any, cluster: Cluster | None, say: Callable[[str], None]
) -> int:  # fmt: skip
    """After how many steps the state of `model` is copied to memory, which `checkpoints` then holds; 0: never. Collective."""
    rule, options = model.strategy.recovery, given or PeerOptions()
    if not (rule.peers if given is None else given.copies):
        return 0
    if checkpoints.hold_copies(options.memory) == 1:
        say("peers: all processes are on one node: copies in its memory outlive them, not it")
    step_s = 0.0
    if cluster is not None and rule.policy == "peers":
        step_s = simulate(model.program, cluster).step_time_s
    return options.every or steps_of(rule, step_s)
