"""What would fit where nothing does: constraints left out, state on the host, more devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import ceil

from autoparallel.costmodel.host_memory import host_capacity_bytes
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.expand.state import dtype_bytes, optimizer_bytes_per_parameter
from autoparallel.planner.explain.constraints import chosen_by_user, without
from autoparallel.planner.outcome import GIB, Relaxation
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.outer import Outer, outer_of
from autoparallel.planner.search.driver import Search, Stopped
from autoparallel.planner.search.evaluate import Evaluation
from autoparallel.planner.search.partition.unlike import capacities
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.parts import grown

SIMULATED = 4  # partitions simulated for each relaxation: enough to show that one fits
# Work (`Search.work`, about milliseconds) that goes into each relaxation: a first strategy that fits is found at once
# or hardly at all. Kind: formula.
TRIED_WORK = 500.0
MOST_TIMES_DEVICES = 1024
DOUBLINGS_TRIED = (
    5  # of the devices that the model's state fills: beyond, something else is in the way. Kind: formula
)
OFFLOADS = (("offload.optimizer",), ("offload.optimizer", "offload.activations"))


def relaxations(outer: Outer, check: Callable[[], None]) -> Iterator[Relaxation]:
    """The relaxations, as far as the time goes."""
    with suppress(Stopped, KeyboardInterrupt):
        yield from _relaxations(outer, check)


def _some(outer: Outer) -> Evaluation | None:
    """A strategy that fits, after a short search."""

    def check(search: Search) -> None:
        if search.incumbent is not None or len(search.seen) >= SIMULATED or search.work >= TRIED_WORK:
            raise Stopped

    search = Search(outer=outer, check=check)
    search.ended()
    return search.incumbent


def _relaxations(outer: Outer, check: Callable[[], None]) -> Iterator[Relaxation]:
    problem = outer.problem
    fixed = chosen_by_user(problem.constraints)
    tried: list[tuple[str, ...]] = [(key,) for key in fixed]
    if len(tried) > 1:
        tried.append(fixed)
    for keys in tried:
        check()
        found = _try(without(problem, keys), outer.book.expander)
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
    """Parameters, their gradients and what optimizer state cannot be on the hosts, each held once: what all devices
    together hold at least, however they share it."""
    execution, graph = problem.execution, problem.graph
    stepped = optimizer_bytes_per_parameter(execution) * (1.0 - optimizer_offloaded(problem))
    held = graph.parameter_count * dtype_bytes(execution.param_dtype)
    return held + graph.trainable_count * (dtype_bytes(execution.grad_dtype) + stepped)


def optimizer_offloaded(problem: Problem) -> float:
    """The share of the optimizer state that may be on the hosts."""
    if "offload.optimizer" in problem.constraints:
        return float(problem.fixed.offload.optimizer or 0.0)
    return 1.0 if host_capacity_bytes(problem.cluster) > 0 else 0.0


def devices_filled(problem: Problem) -> int:
    """Devices that the state of the model fills without anything else."""
    return ceil(state_of_model_bytes(problem) / max(capacities(problem)))


def _more_devices(problem: Problem, besides: str, check: Callable[[], None]) -> Iterator[Relaxation]:
    """The problem on twice, four times … as many nodes, with its batch or with one that grows alike, until it fits;
    from where the devices hold the model's state at all."""
    if problem.cluster.network is not None:  # nobody can say how more nodes would be joined
        return
    least = ceil(devices_filled(problem) / problem.cluster.devices)
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


def _change(key: str, value: object, strategy: Strategy) -> str:
    section, _, name = key.partition(".")
    found = getattr(getattr(strategy, section), name, None) if section != "tensor" else None
    if found is None or _plain(found) == _plain(value):
        return ""
    return f"{key} = {shown(found)} instead of {shown(value)}"


def _plain(value: object) -> object:
    """No compression at all is said in several ways: nothing, or "none" on each level."""
    return () if isinstance(value, tuple) and all(one == "none" for one in value) else value


def _relaxation(change: str, found: Evaluation) -> Relaxation:
    return Relaxation(change=change, step_time_s=found.step_time_s, peak_memory_gib=found.peak_bytes / GIB)


def shown(value: object) -> str:
    """A value as the strategy file spells it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(str, value))}]"
    return str(value)
