"""No strategy: which constraint binds, by how much, and the nearest changes that would give one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from autoparallel.costmodel.host_memory import host_capacity_bytes
from autoparallel.errors import UserError
from autoparallel.planner.explain.alternatives import smallest
from autoparallel.planner.explain.constraints import without
from autoparallel.planner.explain.relaxations import (
    devices_filled,
    optimizer_offloaded,
    relaxations,
    shown,
)
from autoparallel.planner.outcome import GIB, InfeasiblePlan
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.search.bounds.outer import Outer, build_outer
from autoparallel.planner.search.driver import Search, after
from autoparallel.planner.search.evaluate import TOLERANCE, Evaluation, evaluate
from autoparallel.planner.search.space.build import SCHEDULES, Space, build_space
from autoparallel.planner.search.space.meshes import divisors
from autoparallel.planner.search.space.shapes import MODES
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.stacks import PLAIN

# Work (`Search.work`, about milliseconds) that goes into the smallest strategy: bounds on memory are close.
# Kind: formula.
CLOSEST_WORK = 800.0
VALUES_SHOWN = 8
UNLIMITED_BYTES = float(2**60)
SHAPES_TRIED = 64  # of those with the least bound on memory


def explain_empty(problem: Problem) -> Exception:
    """No legal strategy at all: the constraint that excludes them, and the values that it may take."""
    devices = problem.cluster.devices
    where = f"{problem.graph.name} on {devices} devices with batch.global = {problem.global_batch}"
    stack = problem.execution.stack
    if stack != PLAIN:
        free = build_space(replace(problem, execution=replace(problem.execution, stack=PLAIN)))
        if len(free.shapes) and free.counts().any():
            has = ", ".join(problem.runs.schedules or ())
            return UserError(
                f'execution.stack = "{stack}": no strategy that it has{f" (schedules: {has})" if has else ""} is legal for '
                f"{where}; fix pipeline.schedule, shard.zero or shard.sequence_parallel to go beyond it, or name another stack"
            )
    for key, value in problem.constraints.items():
        space = build_space(without(problem, (key,)))
        allowed = _values(space, key) if len(space.shapes) and space.counts().any() else ()
        if allowed:
            return UserError(
                f"{key} = {shown(value)}: no legal strategy for {where} and the other constraints; "
                f"{key} may be {', '.join(allowed[:VALUES_SHOWN])}"
            )
    if problem.constraints:
        keys = ", ".join(f"{key} = {shown(value)}" for key, value in problem.constraints.items())
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
    problem, closest = outer.problem, _closest(outer)
    told = ", ".join(f"{key} = {shown(value)}" for key, value in problem.constraints.items())
    given = f" with {told}" if told else ""
    found, on_devices = closest.found, closest.found.peak_bytes - outer.capacity_bytes
    of_hosts = found.host_excess_bytes > 0 >= on_devices
    lacking = _hosts_lack(found, given) if of_hosts else _devices_lack(outer, closest, given)
    return InfeasiblePlan(
        lacking,
        excess_gib=max(on_devices, found.host_excess_bytes, 0.0) / GIB,
        relaxations=tuple({r.change: r for r in relaxations(outer, check)}.values()),
    )


def _devices_lack(outer: Outer, closest: Closest, given: str) -> str:
    problem, device = outer.problem, outer.problem.cluster.device
    needed, have = closest.found.peak_bytes / GIB, outer.capacity_bytes / GIB
    least = closest.least_bytes / GIB
    text = f"memory of {device.name}{given}: the smallest strategy "
    if least > needed * (1 - TOLERANCE):
        text += f"needs {needed:.4g} GiB per device"
    else:
        text += f"found needs {needed:.4g} GiB per device, none less than {least:.4g} GiB"
    text += (
        f"; {have:.4g} GiB are there ({device.memory_bytes / GIB:.4g} GiB less {device.reserve_bytes / GIB:.3g} GiB "
        f"reserve), {max(needed - have, 0.0):.3g} GiB too few"
    )
    filled = devices_filled(problem)
    if filled > problem.cluster.devices:
        state = "" if optimizer_offloaded(problem) else ", with the optimizer state,"
        text += f"; parameters and gradients{state} alone fill {filled:,} such devices"
    asked = any(key.startswith("offload.") for key in problem.constraints)
    if not asked and not host_capacity_bytes(problem.cluster):
        text += "; nothing was offloaded, as the cluster does not state how much memory every host has (host.memory_bytes)"
    return text


def _hosts_lack(found: Evaluation, given: str) -> str:
    held, have = found.host_bytes / GIB, found.host_capacity_bytes / GIB
    return (
        f"memory of the hosts{given}: what is offloaded takes {held:.4g} GiB of each node's, {have:.4g} GiB are there, "
        f"{held - have:.3g} GiB too few"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Closest:
    """The smallest strategy found, and the bytes per device that none goes below."""

    found: Evaluation
    least_bytes: float


def _closest(outer: Outer) -> Closest:
    """The strategy with the least bound on its memory: it does not fit, but nothing is much nearer."""
    unlimited = build_outer(outer.problem, outer.space, outer.chain, outer.book, UNLIMITED_BYTES)
    found = [evaluate(outer.book.expander, strategy) for strategy in _smallest_of_each_offload(unlimited)]
    if not found:
        why = outer.space.refused.why
        raise UserError(
            f"nothing that the constraints allow runs{f': {why}' if why else ''}; drop some of these"
        )
    least = replace(unlimited, problem=replace(outer.problem, objective=Objective.MEMORY))
    search = Search(outer=least, check=after(CLOSEST_WORK), starts=0)
    search.consider(*found)
    search.ended()
    if search.incumbent is None:  # whatever is offloaded, as the user asks, is too much for the hosts
        least_host = min(found, key=lambda one: one.host_bytes)
        return Closest(found=least_host, least_bytes=float(least_host.peak_bytes))
    return Closest(found=search.incumbent, least_bytes=min(search.value[0], search.bound()[0]))


def _smallest_of_each_offload(unlimited: Outer) -> Iterator[Strategy]:
    """Of each way to offload the strategy that needs least memory of the devices: what needs least of all may be too
    much for the hosts."""
    shapes, order = unlimited.space.shapes, np.argsort(unlimited.bounds.memory_bytes, kind="stable")
    settings = np.stack([shapes.optimizer_offloaded, shapes.activations_offloaded], axis=1)[order]
    for setting in np.unique(settings, axis=0):
        strategy = smallest(unlimited, order[(settings == setting).all(axis=1)][:SHAPES_TRIED])
        if strategy is not None:
            yield strategy


def _values(space: Space, key: str) -> tuple[str, ...]:
    """Values of a key that occur in a space."""
    shapes = space.shapes.take(space.counts() > 0)
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
        return tuple(str(zero) for zero in space.zeros if space.zero_fits(shapes, zero).any())
    return ("left out",)
