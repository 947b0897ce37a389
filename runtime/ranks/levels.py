"""Network levels between the ranks that reduce gradients together, from the strategy alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from autoparallel.costmodel.compression import method_at
from autoparallel.errors import UserError
from autoparallel.planner.strategy.types import Strategy
from autoparallel.runtime.ranks.places import groups_along


def method_between(ranks: Sequence[int], compression: Sequence[str], level_sizes: Sequence[int]) -> str:
    """The method for a group of `ranks`: that of the outermost network level between them.

    `level_sizes` are devices below one port of each level, innermost first; where they are not known, the
    outermost level is taken to lie between any two ranks.
    """
    if not compression:
        return "none"
    for level, size in enumerate(level_sizes):
        if len({rank // size for rank in ranks}) == 1:
            return method_at(compression, level)
    return compression[-1]


def two_levels(ranks: Sequence[int], level_sizes: Sequence[int]) -> tuple[list[list[int]], int] | None:
    """`ranks` divided into those below one port each, and the level they are divided at.

    The innermost network level below whose ports several of them stand, of those above which they are not all
    together; `level_sizes` are devices below one port of each level, innermost first. None where there is no
    such level, or where unequal numbers stand below its ports.
    """
    for level, size in enumerate(level_sizes):
        below: dict[int, list[int]] = {}
        for rank in ranks:
            below.setdefault(rank // size, []).append(rank)
        counts = {len(part) for part in below.values()}
        if len(below) > 1 and len(counts) == 1 and counts != {1}:
            return list(below.values()), level
    return None


def divided(axes: Sequence[str], strategy: Strategy, level_sizes: Sequence[int]) -> list[list[list[int]]]:
    """Each group along `axes`, divided into the parts inside; empty where it is reduced at once."""
    compression = strategy.grad_sync.compression
    by_level = strategy.grad_sync.algorithm in ("hierarchical", "parameter-server")
    if not by_level and set(compression) <= {"none", ""}:
        return []
    groups = [sorted(ranks) for ranks in groups_along(strategy.mesh, *axes)] if axes else []
    found = [two_levels(ranks, level_sizes) for ranks in groups]
    if all(levels is None for levels in found):
        return []
    differs = any(
        method_between(levels[0][0], compression, level_sizes)
        != method_between(ranks, compression, level_sizes)
        for levels, ranks in zip(found, groups, strict=True)
        if levels is not None
    )
    if not by_level and not differs:
        return []
    if len({levels and (levels[1], len(levels[0])) for levels in found}) > 1:
        raise UserError(
            f"grad_sync: the ranks along {' x '.join(axes)} do not stand alike below the ports of the network, so their "
            'gradients cannot be reduced level by level: change mesh.order, or use one compression and algorithm = "auto"'
        )
    return [levels[0] for levels in found if levels is not None]


def pairs_of(divided_groups: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Of groups divided into parts inside, the ranks that stand at the same place in each part."""
    return [list(place) for parts in divided_groups for place in zip(*parts, strict=True)]
