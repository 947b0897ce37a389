"""The strategy that a run starts under: what one that was made for other processes still says about those that are here, or for all
replicas about one, and the one that the run was told to go on under."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, count
from math import prod
from pathlib import Path
from typing import Any

from autoparallel.errors import UserError
from autoparallel.plan_cache import StrategySource, read_source
from autoparallel.planner.strategy.file import (
    missing_keys,
    read_strategy_file,
    strategy_from_constraints,
)
from autoparallel.planner.strategy.types import AXES, Strategy
from autoparallel.planner.strategy.write import write_strategy
from autoparallel.profiles import Cluster, load_cluster
from autoparallel.profiles.resize import resized
from autoparallel.runtime.ranks.agreement import Agreement
from autoparallel.runtime.ranks.mesh import world_size
from autoparallel.stays import stays_of

NEXT, LOOK_S = "next.toml", 1.0
# What replicas that drop out do not do: the key, its value where it asks for nothing, and what to write.
_SUMMED_AS_THEY_ARE: tuple[tuple[str, object, str], ...] = (
    ("grad_sync.compression", (), 'write compression = ["none"]'),
    ("outer.algorithm", "none", 'write outer.algorithm = "none"'),
    ("phase", (), "leave the phases out"),
)


def for_those_here(
    source: StrategySource, given: Cluster | str | None, *, pinned: bool, say: Callable[[str], None]
) -> tuple[StrategySource, Cluster | None]:
    """The strategy where it is for these processes (or `pinned`: then it is refused later), else what stays of it for any
    number of them; and the cluster with as many devices as there are processes."""
    cluster = load_cluster(given) if isinstance(given, str) else given or source.cluster
    world = world_size()
    if cluster is not None:
        cluster = resized(cluster, world, int(os.environ.get("LOCAL_WORLD_SIZE", str(world))))
    made_for = _devices_of(source)
    if made_for is None or made_for == world or pinned:
        return source, cluster
    stays = stays_of(source.said, cluster, world)
    without = f", without {' and '.join(stays.left_out)}" if stays.left_out else ""
    say(
        f"the strategy is for {made_for} processes and {world} {'is' if world == 1 else 'are'} here: planning for these{without}"
    )
    return replace(source, strategy=None, constraints=stays.constraints), cluster


class NextStrategy:
    """`next.toml` in the folder of a run: the strategy that it goes on under in place of the one that it was given.

    Collective: every rank makes it, and has what rank 0 read. A file that is none is told, and left alone.
    """

    def __init__(self, folder: Path, everyone: Agreement) -> None:
        self._path, self._looks = folder / NEXT, everyone.rank == 0
        self._looked_at = time.monotonic()
        self._problem = ""
        self._stamp, self._source = everyone.decided(lambda: (self._stamped(), self._read()))

    def in_place_of(self, given: StrategySource, say: Callable[[str], None]) -> StrategySource:
        """The strategy of the file, where there is one and it is for as many processes as are here, or leaves that open."""
        if self._problem:
            say(f"{self._problem}: going on without it")
        if self._source is None or _devices_of(self._source) not in (None, world_size()):
            return given
        say(f"going on under {self._path}")
        return self._source

    def asked_for(self) -> bool:
        """Whether another one lies there since: told on rank 0, which looks once a second."""
        if not self._looks or time.monotonic() - self._looked_at < LOOK_S:
            return False
        self._looked_at = time.monotonic()
        return self._stamped() not in (self._stamp, 0)

    def _stamped(self) -> int:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return 0

    def _read(self) -> StrategySource | None:
        try:
            return read_source(self._path) if self._path.exists() else None
        except UserError as error:
            self._problem = str(error)
            return None


def kept_beside(folder: Path, strategy: Strategy, world: int) -> Path:
    """The file in `folder` that says which strategy ran, written where none does so yet: starts before, which had another one, keep
    theirs."""
    names = chain([f"strategy-{world}.toml"], (f"strategy-{world}-{number}.toml" for number in count(2)))
    paths = (folder / name for name in names)
    path = next(path for path in paths if not path.exists() or _says(path, strategy))
    if not path.exists():
        write_strategy(path, strategy, {}, {}, {})
    return path


def _says(path: Path, strategy: Strategy) -> bool:
    try:
        return strategy_from_constraints(read_strategy_file(path).constraints) == strategy
    except UserError:  # of another version, say
        return False


def of_one_replica(source: StrategySource, count: int) -> StrategySource:
    """What the strategy of a run of `count` replicas says of one of them: its share of `mesh.dp_replicate` and of the global
    batch. Raises UserError where these have no such share, and for what such replicas do not do."""
    given, strategy = source.constraints, source.strategy
    replicas = strategy.mesh.dp_replicate if strategy is not None else given.get("mesh.dp_replicate")
    if replicas is None:
        raise UserError(
            f"{source.name}: replicas that drop out need a strategy that says how many there are: mesh.dp_replicate is "
            f"missing (`autoparallel plan --set recovery.policy=drop-replica` writes one)"
        )
    if not isinstance(replicas, int) or replicas % count:
        raise UserError(
            f"{source.name}: mesh.dp_replicate = {replicas} has no {count} equal shares: change one of them"
        )
    for key, plain, remedy in _SUMMED_AS_THEY_ARE:
        value: Any = source.said.get(key, plain)
        if value != plain and not (isinstance(value, tuple) and set(value) == {"none"}):
            shown = (
                f"{key} = {list(value) if isinstance(value, tuple) else value}"
                if key != "phase"
                else "[[phase]]"
            )
            raise UserError(
                f"{source.name}: {shown}: replicas that drop out and come back sum their gradients as they are, after every "
                f"step, by one strategy; {remedy}, or train with Trainer"
            )
    if strategy is not None:
        mesh = replace(strategy.mesh, dp_replicate=replicas // count, placement=(), per_node=0)
        batch = replace(strategy.batch, global_=strategy.batch.global_ // count)
        return replace(
            source, strategy=replace(strategy, mesh=mesh, batch=batch), graph_hash=None, cluster=None
        )
    stays = {key: value for key, value in given.items() if key != "batch.global"}
    return replace(source, constraints={**stays, "mesh.dp_replicate": replicas // count}, cluster=None)


def _devices_of(source: StrategySource) -> int | None:
    """How many processes a whole strategy is for; None for one that leaves it open."""
    if source.strategy is not None:
        return source.strategy.mesh.devices
    if missing_keys(source.constraints):
        return None
    return prod(int(str(source.constraints[f"mesh.{axis}"])) for axis in AXES)
