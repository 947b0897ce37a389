"""What of `[grad_sync]` the runtime does not run, and what to write instead. Imports no torch.

Each refusal names key, value and remedy; `sync_problems` has them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoparallel.costmodel.compression import parse_method
from autoparallel.errors import UserError
from autoparallel.planner.strategy.islands import is_local
from autoparallel.planner.strategy.types import Strategy

ALGORITHMS = ("auto", "hierarchical", "ring", "tree", "parameter-server")
POINT_TO_POINT = ("ring", "tree")  # ours: see point_to_point.py
CHOOSES_NOTHING = "gloo"  # the backend that they run on


def check_sync(strategy: Strategy, level_sizes: Sequence[int], backend: str = CHOOSES_NOTHING) -> None:
    """Raises UserError with the first of `sync_problems`."""
    for problem in sync_problems(strategy, level_sizes, backend):
        raise UserError(problem)


def sync_problems(
    strategy: Strategy, level_sizes: Sequence[int] | None, backend: str = CHOOSES_NOTHING
) -> Iterator[str]:
    """Why gradients cannot be synchronised as the strategy says. `level_sizes` are devices below one port of each
    network level, innermost first; none where the cluster is not known (None: it will be). `backend` runs the collectives."""
    sync = strategy.grad_sync
    yield from _methods(sync.compression, level_sizes)
    yield from _local(strategy)
    if strategy.mesh.data_parallel * strategy.mesh.cp > 1:
        yield from _algorithm(sync.algorithm, sync.compression, level_sizes)
        yield from _point_to_point(strategy, backend)


def _point_to_point(strategy: Strategy, backend: str) -> Iterator[str]:
    sync, mesh = strategy.grad_sync, strategy.mesh
    if sync.algorithm == "parameter-server" and strategy.shard.zero and mesh.dp_shard * mesh.cp > 1:
        yield (
            f'grad_sync.algorithm = "parameter-server": servers give the whole sum to every rank, and shard.zero = '
            f"{strategy.shard.zero} wants a share of it; write hierarchical or auto"
        )
    if sync.algorithm not in POINT_TO_POINT:
        return
    where = f'grad_sync.algorithm = "{sync.algorithm}"'
    lossy = [method for method in sync.compression if method not in ("none", "")]
    if backend != CHOOSES_NOTHING:
        yield (
            f"{where}: {backend} chooses its algorithm by itself, by the topology that it sees (NCCL_ALGO overrides NCCL's "
            "choice); write auto, or hierarchical"
        )
    if lossy:
        yield (
            f"{where} with grad_sync.compression = {list(sync.compression)}: what is encoded goes straight to the rank that "
            "adds it, for every stop on the way would round once more; write auto, or hierarchical"
        )
    if sync.algorithm == "tree" and strategy.shard.zero and mesh.dp_shard * mesh.cp > 1:
        yield (
            f"{where}: a tree brings the whole sum to every rank, and shard.zero = {strategy.shard.zero} wants a share of "
            "it; write ring, hierarchical or auto"
        )


def _local(strategy: Strategy) -> Iterator[str]:
    """Replicas that train by themselves: each has whole experts, and outermost."""
    outer, mesh = strategy.outer, strategy.mesh
    where = f'outer.algorithm = "{outer.algorithm}"'
    if not is_local(strategy):
        return
    if mesh.ep > 1:
        yield f"{where} with mesh.ep = {mesh.ep}: experts that replicas share are summed in every step; write ep = 1, or none"
    if mesh.dp_replicate < 2:
        yield f"{where} needs replicas: mesh.dp_replicate = {mesh.dp_replicate}; raise it, or write none"


def _methods(compression: Sequence[str], level_sizes: Sequence[int] | None) -> Iterator[str]:
    for method in compression:
        try:
            parse_method(method)
        except UserError as error:
            yield f"grad_sync.compression = {list(compression)}: {error}"
            return
    extra = [method for method in compression[len(level_sizes or ()) :] if method not in ("none", "")]
    if level_sizes and extra:
        yield (
            f"grad_sync.compression = {list(compression)} has {len(compression)} entries, one per network level from the "
            f"innermost, but the cluster has {len(level_sizes)}; leave out those after the first {len(level_sizes)}"
        )
    inner = compression[:-1]
    if any(parse_method(method).name == "powersgd" for method in inner) and len(set(compression)) > 1:
        yield (
            f"grad_sync.compression = {list(compression)}: the factors of powersgd are summed over all ranks at once, so "
            "that no level outside of it can have another method; use it on the outermost level, or on all"
        )


def _algorithm(
    algorithm: str, compression: Sequence[str], level_sizes: Sequence[int] | None
) -> Iterator[str]:
    where = f'grad_sync.algorithm = "{algorithm}"'
    if algorithm not in ALGORITHMS:
        yield (
            f"{where} is priced and not run: NVLink's sums are NCCL's choice; write one of {', '.join(ALGORITHMS)}"
        )
    elif algorithm == "hierarchical":
        if level_sizes is not None and not level_sizes:
            yield f"{where} needs to know the network's levels: pass cluster= to auto_parallelize"
        if any(parse_method(method).name == "powersgd" for method in compression[:-1]):
            yield (
                f"{where} with grad_sync.compression = {list(compression)}: the factors of powersgd are summed over all "
                "ranks at once; use it on the outermost level only, or write auto"
            )
