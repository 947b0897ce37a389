"""`plan --phases`: the phases of a run, and what changing between them gains."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from autoparallel.planner.outcome import PlanResult
    from autoparallel.planner.problem import Problem


def checked_steps(steps: int | None, *, phases: bool, runnable: bool) -> int | None:
    """The steps of a run whose phases are planned; None where none are. Raises UserError for one without the other."""
    from autoparallel.errors import UserError

    if phases != (steps is not None) and not (runnable and not phases):
        raise UserError(
            "--phases and --steps N go together: a change pays where enough steps come after it; give both"
        )
    return steps if phases else None


def say_first_alone(console: Console, constraints: Mapping[str, object]) -> None:
    """Say after a search without `--phases` that of several phases the first was searched."""
    from autoparallel.planner.strategy.lengths import phases_of

    if steps := [phase.from_step for phase in phases_of(constraints)]:
        console.print(
            f"only the first phase was searched (steps 1 to {steps[0] - 1}): the [[phase]] entries change what they name, and nothing "
            "else is chosen for them; --phases --steps N plans each",
            markup=False, style="yellow",
        )  # fmt: skip


def search_phases(problem: Problem, steps: int, time_limit_s: float | None, console: Console) -> PlanResult:
    """Plan every phase, and say what was found."""
    from autoparallel.cli_progress import working
    from autoparallel.labels import strategy_label
    from autoparallel.planner.phases import plan_phases
    from autoparallel.planner.plan import plan

    with working(console, "searching"):
        found = plan_phases(problem, steps, lambda one: plan(one, time_limit_s=time_limit_s))
    for phase in found.phases:
        change = f", {phase.change_s:.3g} s for the change" if phase.change_s else ""
        console.print(
            f"from step {phase.from_step}: {strategy_label(phase.strategy)}, {phase.step_time_s:.4g} s a step{change}",
            markup=False,
        )
    apart = 1.0 - found.bound_s / found.total_s
    kept = (
        f"; without changes that nobody asks for {found.unchanged_s:.4g} s"
        if found.unchanged_s is not None
        else ""
    )
    console.print(
        f"{steps} steps take {found.total_s:.4g} s{kept}; no phases of these keys take less than {found.bound_s:.4g} s "
        f"({100 * apart:.1f} % less)", markup=False,
    )  # fmt: skip
    return found.first
