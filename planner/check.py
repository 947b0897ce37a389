"""A checker without a solver: is this strategy what the planner says it is?"""

from __future__ import annotations

from collections.abc import Iterator

from autoparallel.costmodel.compression import is_lossy
from autoparallel.costmodel.prediction import Prediction
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.expand.tables import find_tables, rule_of
from autoparallel.planner.problem import Problem
from autoparallel.planner.score import score
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.types import Strategy

# Relative difference between two walks over the same program. Kind: formula: floating-point sums.
SAME = 1e-9


def constraint_problems(problem: Problem, strategy: Strategy) -> list[str]:
    """Keys that the user fixed and the strategy does not have so."""
    return list(_violated(problem, strategy))


def _violated(problem: Problem, strategy: Strategy) -> Iterator[str]:
    for key, wanted in problem.constraints.items():
        section, _, name = key.partition(".")
        if section == "tensor":
            continue  # the expander keeps these, and refuses what it cannot keep
        if section == "embedding":
            yield from _misplaced(problem, strategy)
            continue
        part = getattr(strategy, section)
        found = getattr(part, f"{name}_" if name == "global" else name)
        same = list(found) == list(wanted) if isinstance(wanted, (list, tuple)) else found == wanted
        if not same:
            yield f"{key} = {found!r}, but {wanted!r} was asked for"
    if strategy.batch.global_ != problem.global_batch:
        yield f"batch.global = {strategy.batch.global_}, but {problem.global_batch} was asked for"
    if strategy.execution != problem.execution:
        yield "execution differs from what was asked for"
    yield from _lossy_problems(problem, strategy)


def _lossy_problems(problem: Problem, strategy: Strategy) -> Iterator[str]:
    """Compression that nobody allowed, of gradients and of gathered parameters."""
    weights = strategy.grad_sync.weights
    if is_lossy(weights) and "grad_sync.weights" not in problem.constraints:
        if not problem.allow_lossy:
            yield f"parameters gathered as {weights}, which nobody allowed"
        elif problem.lossy and weights not in problem.lossy:
            yield f"parameters gathered as {weights}, but {', '.join(problem.lossy)} was allowed"
    lossy = any(map(is_lossy, strategy.grad_sync.compression))
    if lossy and not problem.allow_lossy and "grad_sync.compression" not in problem.constraints:
        yield "lossy compression that nobody allowed"
    elif lossy and problem.lossy and "grad_sync.compression" not in problem.constraints:
        others = sorted({m for m in strategy.grad_sync.compression if is_lossy(m)} - set(problem.lossy))
        if others:
            yield f"compression by {', '.join(others)}, but {', '.join(problem.lossy)} was allowed"


def _misplaced(problem: Problem, strategy: Strategy) -> Iterator[str]:
    """Tables that are not where the user's rules have them."""
    given = problem.constraints["embedding"]
    assert isinstance(given, tuple)
    for table in find_tables(problem.graph):
        wanted, found = (rule_of(rules, table.module) for rules in (given, strategy.embedding))
        tier = (found.tier if found else None) or "device"
        if wanted is None:
            continue
        if wanted.tier not in (None, tier):
            yield f"{table.module} is in the tier {tier}, but {wanted.tier} was asked for"
        if wanted.hot_rows is not None and tier != "device" and found:
            hot, asked = (min(rule.hot_rows or 0, table.rows) for rule in (found, wanted))
            if hot != asked:
                yield f"{table.module} has {hot} hot rows, but {asked} were asked for"


def plan_problems(
    problem: Problem, strategy: Strategy, prediction: Prediction, laid_out: Expander | None = None
) -> list[str]:
    """Everything that is wrong with a plan: illegal, not what the user fixed, priced differently by an expander
    that knows nothing of the search, or too large. From `laid_out` it takes the order of the actions alone."""
    found = strategy_problems(problem.graph, problem.cluster, strategy)
    found += constraint_problems(problem, strategy)
    if found:
        return found
    fresh = Expander(graph=problem.graph, cluster=problem.cluster)
    if laid_out is not None:
        fresh.lay_out(strategy, laid_out)
    again = score(problem.graph, problem.cluster, strategy, fresh)
    if abs(again.step_time_s - prediction.step_time_s) > SAME * prediction.step_time_s:
        found.append(f"a step of {again.step_time_s} s, not {prediction.step_time_s} s")
    if again.peak_bytes != prediction.peak_bytes:
        found.append(f"a peak of {again.peak_bytes} bytes, not {prediction.peak_bytes}")
    if again.excess_bytes > 0:
        found.append(f"{again.peak_bytes} bytes do not fit in {again.capacity_bytes:.0f}")
    if again.host_excess_bytes > 0:
        found.append(f"{again.host_bytes} bytes on a host do not fit in {again.host_capacity_bytes:.0f}")
    return found


def check_plan(
    problem: Problem, strategy: Strategy, prediction: Prediction, laid_out: Expander | None = None
) -> None:
    """Stop before a wrong plan leaves the planner: that is a bug of ours."""
    problems = plan_problems(problem, strategy, prediction, laid_out)
    assert not problems, f"the plan is not what it claims: {'; '.join(problems)}\n{strategy}"
