"""Values that would pass in silence, for nothing reads them beside the others: messages that name key, value and what to try."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autoparallel.costmodel.compression import highest_rank, parse_method
from autoparallel.costmodel.graph import ModelGraph
from autoparallel.errors import UserError
from autoparallel.planner.strategy.lengths import phases_of
from autoparallel.planner.strategy.types import Servers
from autoparallel.profiles.hardware import Cluster

_COMPRESSION = "grad_sync.compression"


def ignored_values(graph: ModelGraph, cluster: Cluster, constraints: Mapping[str, object]) -> Iterator[str]:
    """Of the constraints, and of each phase with what goes before it."""
    yield from _ignored(graph, cluster, constraints)
    said = {key: value for key, value in constraints.items() if key != "phase"}
    before = set(_ignored(graph, cluster, said))
    for phase in phases_of(constraints):
        said |= dict(phase.keys)
        found = list(_ignored(graph, cluster, said))
        yield from (f"from step {phase.from_step}: {one}" for one in found if one not in before)
        before = set(found)


def _ignored(graph: ModelGraph, cluster: Cluster, said: Mapping[str, object]) -> Iterator[str]:
    yield from _compression(graph, cluster, said.get(_COMPRESSION))
    yield from weights_problems(said)
    yield from _staleness(said)


def _compression(graph: ModelGraph, cluster: Cluster, methods: object) -> Iterator[str]:
    """An entry for a level that the network does not have, and ranks that no matrix has room for."""
    if not isinstance(methods, tuple):
        return
    levels = cluster.levels
    if len(methods) > len(levels):
        names = ", ".join(level.name for level in levels)
        yield (
            f"{_COMPRESSION} = {list(methods)} has {len(methods)} entries, one per network level from the "
            f"innermost, but {cluster.name} has {len(levels)} ({names}); leave out those after the first {len(levels)}"
        )
    for method in dict.fromkeys(methods):
        if problem := rank_problem(method, graph.parameter_count):
            yield f"{_COMPRESSION} = {list(methods)}: {problem}"


def rank_problem(method: str, numbers: int) -> str | None:
    """Why `powersgd:RANK` compresses no gradients of a model of so many numbers; None where it can, and of other methods."""
    try:
        parsed = parse_method(method)
    except UserError:  # is told where methods are read
        return None
    if parsed.name != "powersgd" or parsed.amount <= (most := highest_rank(numbers)):
        return None
    instead = f"write a rank of {most} or less" if most else "write none"
    return (
        f"{method}: two factors of that rank are no smaller than all {numbers:,} gradients of the model, which would travel as "
        f"they are; {instead}"
    )


def weights_problems(said: Mapping[str, object]) -> Iterator[str]:
    """`grad_sync.weights` where no parameters are gathered for each pass. `said`: of a complete strategy, or what is fixed of one."""
    weights, zero = said.get("grad_sync.weights", "none"), said.get("shard.zero")
    if weights != "none" and zero not in (None, 3):
        yield (
            f'grad_sync.weights = "{weights}" with shard.zero = {zero}: ZeRO-3 alone gathers parameters for each pass; set '
            'shard.zero to 3, or grad_sync.weights to "none"'
        )


def _staleness(said: Mapping[str, object]) -> Iterator[str]:
    """Steps that workers may be apart, where the mode does not ask; files that `plan` wrote have the default in every mode."""
    usual = Servers()
    staleness, mode = said.get("servers.staleness", usual.staleness), said.get("servers.mode", usual.mode)
    if staleness != usual.staleness and mode != "bounded-stale":
        yield (
            f'servers.staleness = {staleness} with servers.mode = "{mode}": how far workers may be apart is asked in '
            '"bounded-stale" alone; set servers.mode to that, or leave out servers.staleness'
        )
