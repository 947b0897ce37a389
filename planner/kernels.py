"""`eager` or `compiled`: the kernels whose best plan is worth more, what compiling takes counted over the run's steps.

A problem that names `kernels` is planned once for each of them, with the constraints that each needs. The better plan is the
one of least

    objective(seconds of a step + seconds to compile / steps)

where nobody said how many steps the run has, compiling counts for nothing. The bound is the least of both searches', raised
alike, so that a proof covers both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.errors import UserError
from autoparallel.planner.outcome import GIB, Alternative, InfeasiblePlan, PlanResult, SearchTimeout
from autoparallel.planner.problem import Problem, Value

KEY = "execution.kernels"
COMPILED = "compiled"
TOLERANCE = 1e-6  # of the gap of a proof, as the searches'
# Seconds in which torch.compile makes an operator of a block, both passes; equal blocks are compiled once. Kind: measured.
# Source: torch 2.13's Inductor, C++ code, two busy cores: twelve layers of Llama 29 s (55 calls in each), of GPT-2 41 s (76;
# two layers take as long). A first run in a fresh process took 135 s: once on a machine, not counted.
COMPILE_S_PER_OPERATOR = 0.5
Search = Callable[[Problem], PlanResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The best plan with one kind of kernels, and its value with what compiling adds."""

    kernels: str
    result: PlanResult
    value: Value
    optimum: float  # of the search's best, where something simpler was chosen
    compile_s: float

    @property
    def bound(self) -> float:
        """What no plan with these kernels is worth less than."""
        return self.optimum * (1.0 - self.result.gap)


def compile_s(graph: ModelGraph) -> float:
    """Seconds to compile the repeated blocks of a model before its first step: each kind of them once."""
    kinds = dict.fromkeys(link.block for link in graph.chain if link.repeated)
    return COMPILE_S_PER_OPERATOR * sum(len(graph.blocks[kind].operators) for kind in kinds)


def plan_kernels(problem: Problem, search: Search, quietly: Search) -> PlanResult:
    """The better of the plans with each of `problem.kernels`. Where none has a plan, raises what `search` raises with the first; where
    one may have none it is searched `quietly`, without advice that nobody would read."""
    found, errors = list[_Found](), list[Exception]()
    first: Problem | None = None
    for kernels, needed in problem.kernels.items():
        if any(problem.constraints.get(key, value) != value for key, value in needed.items()):
            continue
        own = _with_kernels(problem, kernels, needed)
        first = first or own
        try:
            found.append(_judged(own, kernels, quietly(own)))
        except (InfeasiblePlan, SearchTimeout, UserError) as error:
            errors.append(error)
    if not found:
        if first is not None and isinstance(errors[0], InfeasiblePlan):
            search(first)
        raise errors[0]
    best = min(found, key=lambda one: one.value)
    bound = min(one.bound for one in found)
    optimum = min(one.optimum for one in found)
    gap = max(1.0 - bound / optimum, 0.0) if optimum > 0 else 0.0
    open_ = any(isinstance(error, SearchTimeout) for error in errors)  # others have no plan, which is known
    proved = gap <= TOLERANCE and not open_ and all(one.result.status == "optimal" for one in found)
    rejected = tuple(_rejected(one, best) for one in found if one is not best)
    return replace(
        best.result,
        status="optimal" if proved else "feasible",
        gap=0.0 if proved else gap,
        lower_bound_s=min(one.result.lower_bound_s for one in found),
        candidates=sum(one.result.candidates for one in found),
        pruned=sum(one.result.pruned for one in found),
        alternatives=(*rejected, *best.result.alternatives),
        space=tuple(replace(one, how="searched") if one.key == KEY else one for one in found[0].result.space),
    )


def _with_kernels(problem: Problem, kernels: str, needed: Mapping[str, object]) -> Problem:
    return replace(
        problem,
        kernels={},
        execution=replace(problem.execution, kernels=kernels),
        constraints={**problem.constraints, **needed},
    )


def _judged(problem: Problem, kernels: str, result: PlanResult) -> _Found:
    takes_s = compile_s(problem.graph) if kernels == COMPILED else 0.0
    each_s = takes_s / problem.steps if problem.steps else 0.0
    prediction = result.prediction
    peak, devices = prediction.peak_bytes, result.strategy.mesh.devices
    value = problem.value_of(prediction.step_time_s + each_s, peak, devices)
    optimum_s = result.optimum_s or prediction.step_time_s
    optimum = problem.value_of(optimum_s + each_s, peak, devices)[0]
    return _Found(kernels=kernels, result=result, value=value, optimum=optimum, compile_s=takes_s)


def _rejected(other: _Found, best: _Found) -> Alternative:
    prediction = other.result.prediction
    seconds, chosen_s = prediction.step_time_s, best.result.prediction.step_time_s
    words = (
        f"{100 * abs(seconds / chosen_s - 1):.1f} % {'longer' if seconds >= chosen_s else 'shorter'} a step"
    )
    if other.kernels == COMPILED and seconds < chosen_s:
        words += f", but some {other.compile_s:.0f} s to compile first"
    return Alternative(
        kind=f"{other.kernels} kernels",
        strategy=other.result.strategy,
        step_time_s=seconds,
        peak_memory_gib=prediction.peak_bytes / GIB,
        feasible=True,
        reason=words,
        proved=other.result.status == "optimal",
        value=other.value,
    )
