"""What of `[grad_sync]` and `[outer]` is refused by more than one key: rows of the table."""

from __future__ import annotations

from collections.abc import Iterator

from autoparallel.costmodel.compression import WEIGHTS, parse_method, parse_weights
from autoparallel.errors import UserError
from autoparallel.planner.strategy.ignored import rank_problem
from autoparallel.planner.strategy.islands import is_local
from autoparallel.planner.strategy.types import Servers, Strategy
from autoparallel.runtime.capabilities.rows import GLOO, Case, Needs, Row, only_with, shown
from autoparallel.runtime.ranks.levels import divided
from autoparallel.runtime.ranks.places import sharding_axes, summed_axes

USUAL = Servers()
ALGORITHMS = ("auto", "ring", "tree", "hierarchical", "parameter-server")
_WHOLE_SUM: Needs = (  # ranks want a share of the sum, unless nothing is sharded, or nobody adds
    {"shard.zero": (0,)},
    {"mesh.dp_shard": (1,), "mesh.cp": (1,)},
)


def _methods(case: Case) -> Iterator[str]:
    compression = case.strategy.grad_sync.compression
    where, levels = shown("grad_sync.compression", compression), len(case.level_sizes or ())
    try:
        for method in compression:
            parse_method(method)
    except UserError as error:
        yield f"{where}: {error}"
        return
    if levels and len(compression) > levels:
        yield (
            f"{where} has {len(compression)} entries, one per network level from the innermost, but the cluster has {levels}; "
            f"leave out those after the first {levels}"
        )


def _weights(case: Case) -> Iterator[str]:
    try:
        parse_weights(case.strategy.grad_sync.weights)
    except UserError as error:
        yield str(error)


def _rank(case: Case) -> Iterator[str]:
    compression = case.strategy.grad_sync.compression
    if case.numbers is None:
        return
    for method in dict.fromkeys(compression):
        if problem := rank_problem(method, case.numbers):
            yield f"{shown('grad_sync.compression', compression)}: {problem}"


def _factors(case: Case) -> Iterator[str]:
    sync, reduces = case.strategy.grad_sync, _reduces(case.strategy)
    inner = any(_powersgd(method) for method in sync.compression[:-1])
    if inner and (len(set(sync.compression)) > 1 or (reduces and sync.algorithm == "hierarchical")):
        beside = f' with grad_sync.algorithm = "{sync.algorithm}"' if sync.algorithm != "auto" else ""
        yield (
            f"{shown('grad_sync.compression', sync.compression)}{beside}: the factors of powersgd are summed over all ranks "
            'at once; use it on the outermost level only, or on all with algorithm = "auto"'
        )


def _powersgd(method: str) -> bool:
    return method.startswith("powersgd")


def _reduces(strategy: Strategy) -> bool:
    """Whether ranks other than those of a replica's parts add gradients."""
    return strategy.mesh.data_parallel * strategy.mesh.cp > 1


def _unknown_algorithm(case: Case) -> Iterator[str]:
    algorithm = case.strategy.grad_sync.algorithm
    if _reduces(case.strategy) and algorithm not in ALGORITHMS:
        yield (
            f"grad_sync.algorithm = \"{algorithm}\" is priced and not run: NVLink's sums are NCCL's choice; write one of "
            f"{', '.join(ALGORITHMS)}"
        )


def _own_messages(case: Case) -> Iterator[str]:
    sync = case.strategy.grad_sync
    if sync.algorithm not in ("ring", "tree") or not _reduces(case.strategy):
        return
    where = f'grad_sync.algorithm = "{sync.algorithm}"'
    if case.backend != GLOO:
        yield (
            f"{where}: {case.backend} chooses its algorithm by itself, by the topology that it sees (NCCL_ALGO overrides NCCL's "
            "choice); write auto, or hierarchical"
        )
    if any(method not in ("none", "") for method in sync.compression):
        yield (
            f"{where} with {shown('grad_sync.compression', sync.compression)}: what is encoded goes straight to the rank that "
            "adds it, for every stop on the way would round once more; write auto, or hierarchical"
        )


def _level_by_level(case: Case) -> Iterator[str]:
    strategy, sizes = case.strategy, case.level_sizes
    hierarchical = strategy.grad_sync.algorithm == "hierarchical" and _reduces(strategy)
    if hierarchical and sizes is not None and not sizes:
        yield (
            'grad_sync.algorithm = "hierarchical" needs to know the network\'s levels: pass cluster= to auto_parallelize'
        )
    for axes in (summed_axes(strategy), sharding_axes(strategy.mesh, strategy.shard.zero)) if sizes else ():
        try:
            divided(axes, strategy, sizes or ())
        except UserError as error:
            yield str(error)


def _replicas_alone(case: Case) -> Iterator[str]:
    outer, mesh = case.strategy.outer, case.strategy.mesh
    where = f'outer.algorithm = "{outer.algorithm}"'
    if is_local(case.strategy) and mesh.ep > 1:
        yield f"{where} with mesh.ep = {mesh.ep}: experts that replicas share are summed in every step; write ep = 1, or none"
    if is_local(case.strategy) and mesh.dp_replicate < 2:
        yield f"{where} needs replicas: mesh.dp_replicate = {mesh.dp_replicate}; raise it, or write none"


ROWS: tuple[Row, ...] = (
    Row(
        key="grad_sync.algorithm", values="others than " + ", ".join(ALGORITHMS), holds="",
        why="NVLink's sums are NCCL's choice", found=_unknown_algorithm,
    ),
    Row(
        key="grad_sync.algorithm", values='"ring", "tree"', holds="collectives run on Gloo, without `grad_sync.compression`",
        why="NCCL chooses by itself; every stop on the way of what is encoded would round once more", found=_own_messages,
    ),
    *(
        only_with(
            "grad_sync.algorithm", (name,), _WHOLE_SUM, holds="`shard.zero = 0`, or `mesh.dp_shard = 1` and `mesh.cp = 1`",
            why=f"{brings} the whole sum to every rank, and ranks that shard want a share of it", instead=instead,
        )
        for name, brings, instead in (
            ("tree", "a tree brings", "write ring, hierarchical or auto"),
            ("parameter-server", "servers give", "set shard.zero to 0, or write hierarchical or auto"),
        )
    ),
    Row(
        key="grad_sync.algorithm", values='"hierarchical", or unlike compression on the levels', found=_level_by_level,
        holds="the cluster is known, and ranks stand alike below its ports", why="gradients are reduced level by level",
    ),
    Row(
        key="grad_sync.compression", values="one entry per network level", holds="the cluster has the level",
        why="a method for a level that is not there would be ignored", found=_methods,
    ),
    Row(
        key="grad_sync.compression", values='"powersgd:RANK" below the outermost level', found=_factors,
        holds="all levels have it, and `algorithm` is not hierarchical", why="its factors are summed over all ranks at once",
    ),
    Row(
        key="grad_sync.compression", values='"powersgd:RANK" with a high rank', found=_rank,
        holds="two factors of that rank are smaller than all gradients of the model", why="gradients would travel as they are",
    ),
    Row(
        key="grad_sync.weights", values="others than " + ", ".join(WEIGHTS), holds="", found=_weights,
        why="every rank must compute with the same numbers, which error feedback would change from gather to gather",
    ),
    only_with(
        "grad_sync.weights", WEIGHTS[1:], ({"shard.zero": (3,)},), holds="`shard.zero = 3`",
        why="ZeRO-3 alone gathers parameters for each pass", instead='set shard.zero to 3, or grad_sync.weights to "none"',
    ),
    only_with(
        "servers.staleness", lambda value: value not in (None, USUAL.staleness), ({"servers.mode": ("bounded-stale",)},),
        words=f"others than {USUAL.staleness}", holds='`servers.mode = "bounded-stale"`',
        why='how far workers may be apart is asked in "bounded-stale" alone',
        instead="set servers.mode to that, or leave out servers.staleness",
    ),
    Row(
        key="outer.algorithm", values='others than "none"', holds="`mesh.dp_replicate` is 2 or more, `mesh.ep = 1`",
        why="each replica trains by itself and has whole experts", found=_replicas_alone,
    ),
)  # fmt: skip
