"""`plan` where embedding tables may stand in tiers: the better of two searches, under the lower of their bounds.

One search has every table on the devices, whole or sharded with `mesh.tp`, and all meshes (`planner/search/search.py`);
the other has them in tiers, with data parallelism alone (`planner/search/tiers/search.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from math import inf
from typing import Protocol

from autoparallel.costmodel.host_memory import host_capacity_bytes
from autoparallel.costmodel.prediction import Prediction
from autoparallel.errors import UserError
from autoparallel.planner.check import check_plan
from autoparallel.planner.embedding.options import classes_of, given_rules, without_tables
from autoparallel.planner.embedding.search import Placed, PlacementSearch
from autoparallel.planner.embedding.terms import Catalogue
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.expand.tables import find_tables, rule_of
from autoparallel.planner.explain.reasons import alternative
from autoparallel.planner.explain.result import proof_of
from autoparallel.planner.outcome import (
    GIB,
    Alternative,
    Explored,
    InfeasiblePlan,
    PlanResult,
    SearchTimeout,
)
from autoparallel.planner.problem import NOTHING, Problem, Value, objective_value
from autoparallel.planner.score import score
from autoparallel.planner.search.driver import Stopped
from autoparallel.planner.search.evaluate import TOLERANCE
from autoparallel.planner.strategy.types import Strategy

ON_DEVICES = "embedding tables on the devices, as other parameters"
SHARDED, SERVED, HOT = (
    "embedding tables sharded over all devices", "embedding tables on parameter servers",
    "other hot rows of embedding tables",
)  # fmt: skip


class OnDevices(Protocol):
    """Plans a problem with every table on the devices, where it may be better than a `rival`; `tell`: whether to look for what would
    fit where nothing does."""

    def __call__(self, bare: Problem, rival: Value, *, tell: bool) -> PlanResult: ...


def plan_tiers(
    problem: Problem,
    expander: Expander | None,
    on_devices: OnDevices,
    check: Callable[[PlacementSearch], None],
) -> PlanResult:
    """The best strategy with tables in tiers or on the devices. `on_devices` plans a problem without tiers; `check` is
    called before every step of the other search, which is the smaller one, and comes first. Raises as `plan` does."""
    expander = expander or Expander(graph=problem.graph, cluster=problem.cluster)
    classes = classes_of(problem)
    search = PlacementSearch(
        problem=problem, expander=expander, classes=classes, catalogue=Catalogue.of(problem, expander, classes),
        check=check,
    )  # fmt: skip
    ended = False
    with suppress(Stopped, KeyboardInterrupt):
        search.run()
        ended = True
    devices, error = _devices(problem, without_tables(problem), search.value, on_devices)
    if search.best is None and devices is None:
        if error is None:
            raise _nothing(problem, search, ended=ended)
        on_devices(without_tables(problem), NOTHING, tell=True)  # says why
        raise error
    open_ = error.bound if isinstance(error, SearchTimeout) else inf
    return _answer(problem, expander, devices, search, open_)


def _devices(
    problem: Problem, bare: Problem, rival: Value, on_devices: OnDevices
) -> tuple[PlanResult | None, Exception | None]:
    """The plan with every table on the devices, where the user allows that and it fits."""
    rules = (rule_of(given_rules(problem), table.module) for table in find_tables(problem.graph))
    if any(rule is not None and rule.tier not in (None, "device") for rule in rules):
        return None, None
    try:
        return on_devices(bare, rival, tell=False), None
    except (InfeasiblePlan, SearchTimeout, UserError) as error:
        return None, error


def _nothing(problem: Problem, search: PlacementSearch, *, ended: bool) -> Exception:
    """Why no strategy with tables in tiers was found."""
    if not search.candidates:
        meshes = ", ".join(f"{k} = {v}" for k, v in problem.constraints.items() if k.startswith("mesh."))
        return UserError(
            f"[[embedding]]: tables in tiers need one pipeline rank, mesh.tp = 1 and mesh.cp = 1, but {meshes or 'no mesh'} "
            f"leaves none for batch.global = {problem.global_batch}; drop one of them"
        )
    if not ended:
        return SearchTimeout("no strategy found in the time given; allow more, or fix some keys")
    device = problem.cluster.device
    room = (device.memory_bytes - device.reserve_bytes) / GIB
    host = host_capacity_bytes(problem.cluster) / GIB
    return InfeasiblePlan(
        f"memory, with [[embedding]] as asked for: {room:.4g} GiB of each {device.name} and {host:.4g} GiB of "
        "each host are too few; let tables move to another tier, or use more nodes"
    )


def _answer(
    problem: Problem, expander: Expander, devices: PlanResult | None, search: PlacementSearch, open_: float
) -> PlanResult:
    """The better of both, with the other among what was rejected. Nothing that neither has found is below `open_`."""
    if devices is not None and objective_value(problem, devices.prediction) < search.value:
        strategy = devices.strategy
    else:
        assert search.best is not None
        strategy = search.best.strategy
    prediction = score(problem.graph, problem.cluster, strategy, expander)
    check_plan(problem, strategy, prediction)
    value = objective_value(problem, prediction)
    search.value = min(search.value, value)
    least = min(value[0], open_, search.bound()[0] if search.may_win(search.bound()) else value[0])
    if devices is not None:
        least = min(least, objective_value(problem, devices.prediction)[0] * (1 - devices.gap))
    optimal = least >= value[0] * (1 - TOLERANCE)
    proof = proof_of(problem, prediction.step_time_s, value[0], least, optimal=optimal)
    seen = devices.explored if devices is not None else ()
    solved = devices.candidates - devices.pruned if devices is not None else 0
    candidates = search.candidates + (devices.candidates if devices is not None else 0)
    return PlanResult(
        strategy=strategy,
        prediction=prediction,
        status=proof.status,
        lower_bound_s=proof.lower_bound_s,
        gap=proof.gap,
        candidates=candidates,
        pruned=max(candidates - solved - search.opened, 0),
        seconds=0.0,
        alternatives=_alternatives(problem, expander, strategy, prediction, devices, search),
        explored=(*seen, *(_explored(one) for one in search.seen)),
        constraints=devices.constraints if devices is not None else (),
        tradeoffs=devices.tradeoffs if devices is not None and strategy == devices.strategy else (),
    )


def _explored(one: Placed) -> Explored:
    found = one.prediction
    return Explored(
        step_time_s=found.step_time_s, peak_memory_gib=found.peak_bytes / GIB, feasible=found.feasible,
        label=kind_of(one.strategy),
    )  # fmt: skip


def kind_of(strategy: Strategy) -> str:
    """Which kind of placement a strategy is."""
    tiers = {rule.tier for rule in strategy.embedding}
    if "parameter-server" in tiers:
        return SERVED
    return SHARDED if "sharded" in tiers else ON_DEVICES


def _alternatives(
    problem: Problem,
    expander: Expander,
    strategy: Strategy,
    chosen: Prediction,
    devices: PlanResult | None,
    search: PlacementSearch,
) -> tuple[Alternative, ...]:
    """The best seen of each other kind, best first."""
    found: dict[str, Alternative] = {}
    for kind, one in _others(strategy, devices, search):
        if one != strategy and kind not in found:
            found[kind] = alternative(problem, kind, one, chosen, expander)
    return tuple(sorted(found.values(), key=lambda a: a.rank))


def _others(
    strategy: Strategy, devices: PlanResult | None, search: PlacementSearch
) -> Iterator[tuple[str, Strategy]]:
    """Kinds of strategies besides the chosen one, the best of each first."""
    if devices is not None:
        # The search that has to beat another one ends soon: a rival of what it found may be better.
        better = [
            one
            for one in devices.alternatives
            if one.feasible and one.step_time_s < devices.prediction.step_time_s
        ]
        best = min(better, key=lambda one: one.rank, default=None)
        yield ON_DEVICES, devices.strategy if best is None else best.strategy
        yield from ((other.kind, other.strategy) for other in devices.alternatives)
    for one in sorted(search.seen, key=lambda one: (not one.prediction.feasible, one.value)):
        kind = kind_of(one.strategy)
        if kind != kind_of(strategy):
            yield kind, one.strategy
        elif one.strategy.embedding != strategy.embedding:
            yield HOT, one.strategy
