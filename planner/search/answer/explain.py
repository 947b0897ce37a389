"""No strategy: which constraint binds, by how much, and the nearest changes that would give one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from autoparallel.errors import UserError
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.expand.state import dtype_bytes, optimizer_bytes_per_parameter
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.search.answer.alternatives import smallest
from autoparallel.planner.search.answer.constraints import chosen_by_user
from autoparallel.planner.search.answer.outcome import GIB, InfeasiblePlan, Relaxation
from autoparallel.planner.search.bounds.outer import Outer, build_outer, outer_of
from autoparallel.planner.search.evaluate import Evaluation, evaluate
from autoparallel.planner.search.frontier import TOLERANCE, Frontier, Stopped
from autoparallel.planner.search.space.build import MODES, SCHEDULES, Space, build_space
from autoparallel.planner.search.space.meshes import divisors
from autoparallel.planner.search.stages.unlike import capacities
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.parts import grown

SIMULATED = 4  # deals simulated for each relaxation: enough to show that one fits
# Work (`Frontier.work`, about milliseconds) that goes into the smallest strategy, and into each relaxation: bounds on
# memory are close, and a first strategy that fits is found at once or hardly at all. Kind: formula.
CLOSEST_WORK = 200.0
TRIED_WORK = 500.0
MOST_TIMES_DEVICES = 1024
DOUBLINGS_TRIED = (
    5  # of the devices that the model's state fills: beyond, something else is in the way. Kind: formula
)
VALUES_SHOWN = 8
UNLIMITED_BYTES = float(2**60)
OFFLOADS = (("offload.optimizer",), ("offload.optimizer", "offload.activations"))
SHAPES_TRIED = 64  # of those with the least bound on memory


def explain_empty(problem: Problem) -> Exception:
    """No legal strategy at all: the constraint that excludes them, and the values that it may take."""
    devices = problem.cluster.devices
    where = f"{problem.graph.name} on {devices} devices with batch.global = {problem.global_batch}"
    for key, value in problem.constraints.items():
        space = build_space(_without(problem, (key,)))
        allowed = _values(space, key) if len(space.shapes) and space.counts().any() else ()
        if allowed:
            return UserError(
                f"{key} = {_show(value)}: no legal strategy for {where} and the other constraints; "
                f"{key} may be {', '.join(allowed[:VALUES_SHOWN])}"
            )
    if problem.constraints:
        keys = ", ".join(f"{key} = {_show(value)}" for key, value in problem.constraints.items())
        free = build_space(replace(problem, constraints={}))
        if len(free.shapes):
            return UserError(f"no legal strategy for {where} has {keys} together; drop some of these")
    batches = [d for d in divisors(devices) if d > 1]
    nearest = devices * max(1, round(problem.global_batch / devices))
    return InfeasiblePlan(
        f"no mesh of all {devices} devices divides the model's heads, its {len(problem.graph.repeated_positions)} "
        f"repeated blocks and the global batch of {problem.global_batch}; try batch.global = {nearest}, or fix every "
        f"mesh size to use fewer devices ({', '.join(map(str, batches[:-1][:VALUES_SHOWN])) or 1})"
    )


def explain_infeasible(outer: Outer, check: Callable[[], None] = lambda: None) -> InfeasiblePlan:
    """Nothing fits in memory: the least that any strategy needs, and what would fit. `check` is called before each
    change that is tried, and raises `Stopped` where no time is left for it."""
    problem = outer.problem
    closest = _closest(outer)
    needed = closest.found_bytes
    excess = max(needed - outer.capacity_bytes, 0.0) / GIB
    smallest = (
        f"the smallest strategy needs {needed / GIB:.4g} GiB per device"
        if closest.least_bytes > needed * (1 - TOLERANCE)
        else f"the smallest strategy found needs {needed / GIB:.4g} GiB per device, none less than "
        f"{closest.least_bytes / GIB:.4g} GiB"
    )
    filled = _devices_filled(problem)
    alone = (
        f"; parameters, gradients and optimizer state alone fill {filled:,} such devices"
        if filled > problem.cluster.devices
        else ""
    )
    device = problem.cluster.device
    told = ", ".join(f"{key} = {_show(value)}" for key, value in problem.constraints.items())
    given = f" with {told}" if told else ""
    return InfeasiblePlan(
        f"memory of {device.name}{given}: {smallest}; {outer.capacity_bytes / GIB:.4g} GiB are there ({device.memory_bytes / GIB:.4g} GiB less "
        f"{device.reserve_bytes / GIB:.3g} GiB reserve), {excess:.3g} GiB too few{alone}",
        excess_gib=excess,
        relaxations=tuple({r.change: r for r in _found(outer, check)}.values()),
    )


def _found(outer: Outer, check: Callable[[], None]) -> Iterator[Relaxation]:
    """The relaxations, as far as the time goes."""
    with suppress(Stopped, KeyboardInterrupt):
        yield from _relaxations(outer, check)


@dataclass(frozen=True, slots=True, kw_only=True)
class Closest:
    """Bytes per device of the smallest strategy found, and what none goes below."""

    found_bytes: float
    least_bytes: float


def _closest(outer: Outer) -> Closest:
    """The strategy with the least bound on its memory: it does not fit, but nothing is much nearer."""
    unlimited = build_outer(outer.problem, outer.space, outer.chain, outer.book, UNLIMITED_BYTES)
    rows = np.argsort(unlimited.bounds.memory_bytes, kind="stable")[:SHAPES_TRIED]
    strategy = smallest(unlimited, rows)
    assert strategy is not None, "a space without variants has been told apart before"
    found = evaluate(outer.book.expander, strategy)

    def check(frontier: Frontier) -> None:
        if frontier.work >= CLOSEST_WORK:
            raise Stopped

    least = replace(unlimited, problem=replace(outer.problem, objective=Objective.MEMORY))
    frontier = Frontier(outer=least, check=check, dives=0)
    frontier.consider(found)
    with suppress(Stopped):
        frontier.run()
    needed = frontier.value[0]
    return Closest(found_bytes=needed, least_bytes=min(needed, frontier.bound()[0]))


def _some(outer: Outer) -> Evaluation | None:
    """A strategy that fits, after a short search."""

    def check(frontier: Frontier) -> None:
        if frontier.incumbent is not None or len(frontier.seen) >= SIMULATED or frontier.work >= TRIED_WORK:
            raise Stopped

    frontier = Frontier(outer=outer, check=check)
    with suppress(Stopped):
        frontier.run()
    return frontier.incumbent


def _relaxations(outer: Outer, check: Callable[[], None]) -> Iterator[Relaxation]:
    problem = outer.problem
    fixed = chosen_by_user(problem.constraints)
    tried: list[tuple[str, ...]] = [(key,) for key in fixed]
    if len(tried) > 1:
        tried.append(fixed)
    for keys in tried:
        check()
        found = _try(_without(problem, keys), outer.book.expander)
        if found is not None:
            changes = [_change(key, problem.constraints[key], found.strategy) for key in keys]
            yield _relaxation("; ".join(filter(None, changes)) or f"{keys[0]} left free", found)
    check()
    yield from _on_the_host(problem, outer.book.expander)
    found_devices = list(_more_devices(problem, "", check))
    if not found_devices and problem.constraints:
        found_devices = list(_more_devices(replace(problem, constraints={}), " and no constraint", check))
    yield from found_devices


def _on_the_host(problem: Problem, expander: Expander) -> Iterator[Relaxation]:
    """The optimizer state, then the activations too, kept on the host."""
    for keys in OFFLOADS:
        if any(key in problem.constraints for key in keys):
            continue
        kept = replace(problem, constraints={**problem.constraints, **dict.fromkeys(keys, 1.0)})
        found = _try(kept, expander)
        if found is not None:
            yield _relaxation(" and ".join(f"{key} = 1" for key in keys) + " (on the host)", found)
            return


def state_of_model_bytes(problem: Problem) -> float:
    """Parameters, their gradients and the optimizer state on devices, each held once: what all devices together hold
    at least, however they share it."""
    execution, away = problem.execution, problem.constraints.get("offload.optimizer", 0.0)
    stepped = optimizer_bytes_per_parameter(execution) * (1.0 - float(str(away)))
    graph = problem.graph
    held = graph.parameter_count * dtype_bytes(execution.param_dtype)
    return held + graph.trainable_count * (dtype_bytes(execution.grad_dtype) + stepped)


def _devices_filled(problem: Problem) -> int:
    """Devices that the state of the model fills without anything else."""
    return ceil(state_of_model_bytes(problem) / max(capacities(problem)))


def _more_devices(problem: Problem, besides: str, check: Callable[[], None]) -> Iterator[Relaxation]:
    """The problem on twice, four times … as many nodes, with its batch or with one that grows alike, until it fits;
    from where the devices hold the model's state at all."""
    if problem.cluster.network is not None:  # nobody can say how more nodes would be joined
        return
    least = ceil(_devices_filled(problem) / problem.cluster.devices)
    first = max((least - 1).bit_length(), 1)
    for doublings in range(first, first + DOUBLINGS_TRIED):
        times = 2**doublings
        if times > MOST_TIMES_DEVICES:
            return
        more = _with_devices(problem, times)
        for batch in (problem.global_batch, problem.global_batch * times):
            check()
            found = _try(_with_batch(more, batch), None)
            if found is not None:
                larger = "" if batch == problem.global_batch else f" and batch.global = {batch}"
                change = (
                    f"{more.cluster.devices} devices instead of {problem.cluster.devices}{larger}{besides}"
                )
                yield _relaxation(change, found)
                return


def _with_batch(problem: Problem, batch: int) -> Problem:
    """The problem with another batch, where the user named one too."""
    named = {"batch.global": batch} if "batch.global" in problem.constraints else {}
    return replace(problem, global_batch=batch, constraints={**problem.constraints, **named})


def _try(problem: Problem, expander: Expander | None) -> Evaluation | None:
    outer = outer_of(problem, expander)
    return _some(outer) if outer is not None else None


def _with_devices(problem: Problem, times: int) -> Problem:
    """The problem on a cluster with more nodes, or with a fuller node where one holds few of its box's devices."""
    cluster = problem.cluster
    group = cluster.groups[0]
    if len(cluster.groups) == 1 and group.nodes == 1:
        usual = max(group.device.devices_per_node, group.devices_per_node)
        per_node = min(group.devices_per_node * times, usual)
        nodes = -(-group.devices_per_node * times // per_node)
        return replace(problem, cluster=grown(cluster, nodes, per_node))
    groups = tuple(replace(g, nodes=g.nodes * times) for g in cluster.groups)
    *inner, last = cluster.levels
    levels = (*inner, replace(last, size=max(last.size, cluster.devices * times)))
    return replace(problem, cluster=replace(cluster, groups=groups, levels=levels))


def _without(problem: Problem, keys: tuple[str, ...]) -> Problem:
    return replace(problem, constraints={k: v for k, v in problem.constraints.items() if k not in keys})


def _change(key: str, value: object, strategy: Strategy) -> str:
    section, _, name = key.partition(".")
    found = getattr(getattr(strategy, section), name, None) if section != "tensor" else None
    if found is None or found == value:
        return ""
    return f"{key} = {_show(found)} instead of {_show(value)}"


def _relaxation(change: str, found: Evaluation) -> Relaxation:
    return Relaxation(change=change, step_time_s=found.step_time_s, peak_memory_gib=found.peak_bytes / GIB)


def _values(space: Space, key: str) -> tuple[str, ...]:
    """Values of a key that occur in a space."""
    shapes = space.shapes.take(space.counts() > 0)
    section, _, name = key.partition(".")
    columns: Mapping[str, object] = {
        **{f"mesh.{n}": getattr(shapes, n) for n in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")},
        "batch.micro": shapes.micro,
    }
    if key in columns:
        return tuple(str(v) for v in np.unique(np.asarray(columns[key])))
    if key == "recompute.mode":
        return tuple(MODES[v] for v in np.unique(shapes.recompute))
    if key == "shard.sequence_parallel":
        return tuple("true" if v else "false" for v in np.unique(shapes.sequence_parallel))
    if key == "pipeline.schedule":
        return tuple(dict.fromkeys(SCHEDULES[s] for s, _ in space.schedules))
    if key == "pipeline.virtual_stages":
        return tuple(dict.fromkeys(str(v) for _, v in space.schedules))
    if key == "shard.zero":
        return tuple(map(str, space.zeros))
    del section, name
    return ("left out",)


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(str, value))}]"
    return str(value)
