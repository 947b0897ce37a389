"""What a complete strategy may say: the values of each key, from the strategy file's own definition and the legality rules.

Shares no code with the search: what that leaves out is tried here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations
from math import gcd, prod
from random import Random

from autoparallel.costmodel.compression import is_lossy
from autoparallel.costmodel.graph import OpKind
from autoparallel.planner.problem import Problem
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.types import AXES, Mesh, Strategy
from autoparallel.profiles.parts import devices_of_nodes

SIZES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
MODES = ("none", "selective", "operators", "full")
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb1p", "zbv", "dualpipev")  # of several pipeline ranks
V_SHAPED = ("zbv", "dualpipev")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Values of the keys that have endlessly many, or that a caller does not want all of."""

    shares: tuple[float, ...] = (0.0, 0.5, 1.0)
    algorithms: tuple[str, ...] = ("auto", "ring", "tree", "hierarchical", "parameter-server")
    buckets_mib: tuple[float, ...] = (5.0, 25.0, 100.0, 400.0)
    overlaps: tuple[bool, ...] = (True, False)
    methods: tuple[str, ...] = (
        "bf16",
        "fp8",
        "int8",
        "topk:0.01",
        "powersgd:4",
    )  # where lossy ones are allowed
    modes: tuple[str, ...] = MODES
    schedules: tuple[str, ...] = SCHEDULES
    most_virtual: int = 8
    orders: bool = True  # every order of the axes, not only the usual one
    uneven: bool = True  # every way to divide blocks to chunks
    places: bool = True  # every order of the nodes where these are unlike, or their network is
    partly: bool = True  # every number of recomputed blocks in each chunk


ALL = Choices()


def divisors(n: int) -> list[int]:
    """In ascending order."""
    return [d for d in range(1, n + 1) if n % d == 0] if n < 4096 else _large_divisors(n)


def _large_divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def prime_factors(n: int) -> list[int]:
    """Each as often as it divides."""
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1 if p * p <= n else n - p
    return found


def sizes_of(devices: int) -> Iterator[dict[str, int]]:
    """Every way to divide `devices` to the five axes."""

    def divide(rest: int, axes: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
        if len(axes) == 1:
            yield (rest,)
            return
        for size in divisors(rest):
            yield from ((size, *others) for others in divide(rest // size, axes[1:]))

    return (dict(zip(SIZES, sizes, strict=True)) for sizes in divide(devices, SIZES))


def orders_of(mesh: Mesh) -> Iterator[tuple[str, ...]]:
    """Every order that differs: axes of one rank stand where they usually do."""
    real = [axis for axis in AXES if getattr(mesh, axis) > 1]
    slots = [AXES.index(axis) for axis in real]
    for order in permutations(real):
        full = list(AXES)
        for slot, axis in zip(slots, order, strict=True):
            full[slot] = axis
        yield tuple(full)


def compositions(total: int, parts: int, least: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every way to divide `total` to `parts`, each with its least."""
    spare = total - sum(least)
    if spare < 0:
        return
    for cuts in combinations(range(spare + parts - 1), parts - 1):
        edges = (-1, *cuts, spare + parts - 1)
        yield tuple(n + b - a - 1 for n, (a, b) in zip(least, pairwise(edges), strict=True))


def virtual_stages(schedule: str, most: int) -> tuple[int, ...]:
    """Chunks per rank that a schedule may have."""
    if schedule in V_SHAPED:
        return (2,)
    if schedule == "interleaved-1f1b":
        return tuple(range(2, most + 1))
    return tuple(range(1, most + 1)) if schedule == "zb1p" else (1,)


def least_of_chunks(problem: Problem, chunks: int) -> tuple[int, ...]:
    """A block each; none at an end of the model that has something before or after its blocks."""
    least, chain = [1] * chunks, problem.graph.chain
    for end in (0, -1):
        if chunks > 1 and not chain[end].repeated:
            least[end] = 0
    return tuple(least)


def even_blocks(problem: Problem, chunks: int) -> tuple[int, ...]:
    """As even as can be, the first ones with one more."""
    each, more = divmod(len(problem.graph.repeated_positions), chunks)
    return tuple(each + (i < more) for i in range(chunks))


def device_counts(problem: Problem) -> tuple[int, ...]:
    """All devices; where nodes are unlike, also those of regular parts and single groups; most first."""
    cluster = problem.cluster
    have = devices_of_nodes(cluster)
    found = {cluster.devices, *(group.devices for group in cluster.groups)}
    found |= {least * sum(n >= least for n in have) for least in set(have)}
    return tuple(sorted(found, reverse=True))


def has_experts(problem: Problem) -> bool:
    """Whether mesh.ep may be above 1."""
    return any(op.kind is OpKind.GROUPED_GEMM for block in problem.graph.blocks for op in block.operators)


def copies(problem: Problem, mesh: Mesh, zero: int) -> tuple[int, ...]:
    """Numbers of ranks that may share a second copy of ZeRO-3's parameters: neighbours of dp_shard inside a unit of a level of the
    network, but of the outermost."""
    if zero != 3 or mesh.pp * mesh.cp * mesh.tp > 1 or problem.cluster.network is not None:
        return ()
    if problem.execution.parameter_gathers:
        return ()
    inside = mesh.order[mesh.order.index("dp_shard") + 1 :]
    apart = prod(getattr(mesh, axis) for axis in inside)
    units = [level.size for level in problem.cluster.levels[:-1]]
    found = {gcd(mesh.dp_shard, unit // apart) for unit in units if unit % apart == 0}
    return tuple(sorted(n for n in found if 1 < n < mesh.dp_shard))


def meets(problem: Problem, strategy: Strategy) -> bool:
    """Whether the strategy has what the user fixed, and no lossy method that nobody allowed."""
    for key, wanted in problem.constraints.items():
        section, _, name = key.partition(".")
        if section in ("tensor", "embedding"):
            return False  # nothing here knows how to keep these
        found = getattr(getattr(strategy, section), "global_" if name == "global" else name)
        if (tuple(found) != tuple(wanted)) if isinstance(wanted, (list, tuple)) else found != wanted:
            return False
    sync = strategy.grad_sync
    lossy = {"compression": any(map(is_lossy, sync.compression)), "weights": is_lossy(sync.weights)}
    allowed = all(
        problem.allow_lossy or f"grad_sync.{key}" in problem.constraints
        for key, is_so in lossy.items()
        if is_so
    )
    return strategy.batch.global_ == problem.global_batch and allowed


def same_but(strategy: Strategy, base: Strategy | None, left_out: Collection[str]) -> bool:
    """Whether the strategy has the values of `base` (without one: the usual ones) in all keys that are left out."""
    base = base or Strategy(batch=strategy.batch)
    for key in left_out:
        section, _, name = key.partition(".")
        own, other = (getattr(one, section) for one in (strategy, base))
        if (getattr(own, name) != getattr(other, name)) if name else own != other:
            return False
    return True


def legal(problem: Problem, strategy: Strategy) -> bool:
    """Whether the strategy can run, and is one of the problem."""
    return meets(problem, strategy) and not strategy_problems(problem.graph, problem.cluster, strategy)


def draw_divisor(rng: Random, n: int) -> int:
    """A divisor of n: each prime factor goes in or not."""
    found = 1
    for prime in prime_factors(n):
        found *= prime if rng.random() < 0.5 else 1
    return found
