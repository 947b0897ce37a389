"""What a strategy that was made for other processes still says about those that are here."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from math import prod

from autoparallel.plan_cache import StrategySource
from autoparallel.planner.strategy.file import missing_keys
from autoparallel.planner.strategy.types import AXES
from autoparallel.profiles import Cluster, load_cluster
from autoparallel.profiles.resize import resized
from autoparallel.runtime.ranks.mesh import world_size


def for_those_here(
    source: StrategySource, given: Cluster | str | None, *, pinned: bool, say: Callable[[str], None]
) -> tuple[StrategySource, Cluster | None]:
    """The strategy where it is for these processes (or `pinned`: then it is refused later), else what it fixes for any
    number of them: the global batch and `execution`; and the cluster with as many devices as there are processes."""
    cluster = load_cluster(given) if isinstance(given, str) else given or source.cluster
    world = world_size()
    if cluster is not None:
        cluster = resized(cluster, world, int(os.environ.get("LOCAL_WORLD_SIZE", str(world))))
    made_for = _devices_of(source)
    if made_for is None or made_for == world or pinned:
        return source, cluster
    say(f"the strategy is for {made_for} processes and {world} are here: planning for these")
    stays = {k: v for k, v in source.constraints.items() if k == "batch.global" or k.startswith("execution.")}
    return replace(source, strategy=None, constraints=stays), cluster


def _devices_of(source: StrategySource) -> int | None:
    """How many processes a whole strategy is for; None for one that leaves it open."""
    if source.strategy is not None:
        return source.strategy.mesh.devices
    if missing_keys(source.constraints):
        return None
    return prod(int(str(source.constraints[f"mesh.{axis}"])) for axis in AXES)
