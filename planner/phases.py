"""`plan --phases`: where a change of strategy between two phases of training pays, the change itself counted.

A file's `[[phase]]` entries say what changes from which step on (the global batch, which compression is used …). All else may
change there, too. The best strategy of each phase is found by `plan`'s search; each of these may also be kept in the other
phases, with the keys that these ask for. A dynamic programme over phases takes the sequence of least total seconds:

    sum over phases of (steps * seconds of a step + seconds of the change at its beginning)

so that a change that gains less than it costs is not made. No sequence takes less than the phases' lower bounds together.
A change costs, between strategies that differ in more than `[grad_sync]`, the whole state of parameters and optimizer sent to
every device once (as `runtime/checkpoints/in_memory.py` does it), and always new process groups; where error feedback begins,
the steps after which it has passed on what it was given, counted as lost: 1 / ratio for top-k (its contraction, Karimireddy et
al. 2019), one for other biased methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autoparallel.costmodel.compression import parse_method
from autoparallel.costmodel.prediction import Prediction
from autoparallel.errors import UserError
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.expand.state import dtype_bytes, optimizer_bytes_per_parameter
from autoparallel.planner.outcome import PlanResult
from autoparallel.planner.problem import Problem
from autoparallel.planner.recovery import patient
from autoparallel.planner.score import completed, score
from autoparallel.planner.strategy.lengths import SEQ_LEN, graph_at
from autoparallel.planner.strategy.phases import differences, only_synchronisation, starts, strategy_at
from autoparallel.planner.strategy.types import AXES, Phase, Strategy

# Seconds to make one process group on every rank. Kind: estimate; torch.distributed.new_group is a rendezvous by a store.
GROUP_S = 0.05
Search = Callable[[Problem], PlanResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePrice:
    """What the steps of one phase cost by a strategy that says what each has."""

    from_step: int
    seq_len: int
    prediction: Prediction


def phase_prices(expander: Expander, strategy: Strategy) -> tuple[PhasePrice, ...]:
    """Every phase of a strategy, with the sequences that it has; () where there are none. Raises UserError where one cannot run."""
    found = []
    for step in starts(strategy) if strategy.phases else ():
        own = strategy_at(strategy, step)
        try:
            prediction = score(expander.graph, expander.cluster, own)
        except UserError as error:
            raise UserError(
                f"from step {step}: {error}; or have all phases planned together: --phases --steps N"
            ) from error
        tokens = graph_at(expander.graph, own.batch.seq_len).tokens_per_sample
        found.append(PhasePrice(from_step=step, seq_len=tokens, prediction=prediction))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """One phase of a run."""

    from_step: int
    steps: int
    strategy: Strategy
    step_time_s: float
    change_s: float  # at its beginning


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasesResult:
    """The phases of a run, and how far they are proved: no run with these phases takes less than `bound_s`."""

    first: PlanResult  # with the strategy of all phases
    phases: tuple[PhasePlan, ...]
    total_s: float
    bound_s: float
    unchanged_s: float | None  # were only what the file asks for changed; None where that does not fit


def plan_phases(problem: Problem, steps: int, search: Search) -> PhasesResult:
    """The best strategies of the problem's `[[phase]]` entries over so many steps. Raises what `search` raises, and UserError
    where there are no phases or they begin after the last step."""
    given = problem.constraints.get("phase", ())
    assert isinstance(given, tuple)
    if not given:
        raise UserError(
            "--phases: the strategy file has no [[phase]] entry; say there what changes from which step on"
        )
    if given[-1].from_step > steps:
        raise UserError(
            f"[[phase]] from_step = {given[-1].from_step} is after the last of --steps {steps}; give more steps"
        )
    problems = _problems(problem, given)
    begins = (1, *(phase.from_step for phase in given), steps + 1)
    lengths = [stop - first for first, stop in pairwise(begins)]
    results = [search(one) for one in problems]
    best = [result.strategy for result in results]
    rows = [_row(one, best, given[:number]) for number, one in enumerate(problems)]
    total_s, picks = _sequence(problem, rows, lengths)
    phases = tuple(
        PhasePlan(from_step=begins[n], steps=lengths[n], strategy=rows[n][p][0], step_time_s=rows[n][p][1], change_s=_change(
            problem, rows[n - 1][picks[n - 1]], rows[n][p]) if n else 0.0)
        for n, p in enumerate(picks)
    )  # fmt: skip
    bound_s = sum(length * result.lower_bound_s for length, result in zip(lengths, results, strict=True))
    strategy = replace(phases[0].strategy, phases=tuple(_entries(phases)))
    if "recovery.timeout_s" not in problem.constraints:
        strategy = patient(Expander(problem.graph, problem.cluster), strategy)
    return PhasesResult(
        first=replace(results[picks[0]] if picks[0] == 0 else results[0], strategy=strategy), phases=phases,
        total_s=total_s, bound_s=bound_s, unchanged_s=_unchanged(problem, rows, lengths),
    )  # fmt: skip


def _problems(problem: Problem, given: Sequence[Phase]) -> list[Problem]:
    """The problem of each phase: the file's keys, and those of the phases that have begun."""
    constraints = {k: v for k, v in problem.constraints.items() if k != "phase"}
    found = [replace(problem, constraints=constraints)]
    for phase in given:
        constraints = {**constraints, **dict(phase.keys)}
        batch, tokens = constraints.get("batch.global", problem.global_batch), constraints.get(SEQ_LEN, 0)
        assert isinstance(batch, int)
        assert isinstance(tokens, int)
        graph = graph_at(problem.graph, tokens)
        found.append(replace(problem, constraints=constraints, global_batch=batch, graph=graph))
    return found


Row = list[tuple[Strategy, float]]  # strategies that a phase may have, and seconds of their steps


def _row(problem: Problem, best: Sequence[Strategy], begun: Sequence[Phase]) -> Row:
    """Every phase's best strategy with this phase's keys, as far as it is legal, fits and is allowed; in the same places."""
    found: Row = []
    expander = Expander(graph=problem.graph, cluster=problem.cluster)
    for strategy in best:
        keys = {k: v for phase in begun for k, v in phase.keys}
        keys |= {"batch.global": problem.global_batch, SEQ_LEN: problem.constraints.get(SEQ_LEN, 0)}
        try:
            own = strategy_at(replace(strategy, phases=(Phase(from_step=2, keys=tuple(keys.items())),)), 2)
            own = completed(expander, own)
            prediction = score(problem.graph, problem.cluster, own, expander)
        except UserError:
            found.append((strategy, float("inf")))
            continue
        fits = prediction.feasible and not problem.is_refused(own)
        found.append((own, prediction.step_time_s if fits else float("inf")))
    return found


def _sequence(problem: Problem, rows: Sequence[Row], lengths: Sequence[int]) -> tuple[float, list[int]]:
    """The picks of least total seconds, by dynamic programming; of equals the first."""
    best = [(lengths[0] * seconds, [n]) for n, (_, seconds) in enumerate(rows[0])]
    for before, row, length in zip(rows, rows[1:], lengths[1:], strict=False):
        best = [
            min(
                (total + length * one[1] + _change(problem, before[n], one), [*picks, place])
                for n, (total, picks) in enumerate(best)
            )
            for place, one in enumerate(row)
        ]
    return min(best)


def _unchanged(problem: Problem, rows: Sequence[Row], lengths: Sequence[int]) -> float | None:
    """Total seconds of the first phase's strategy with nothing changed but what is asked for."""
    total = sum(length * row[0][1] for row, length in zip(rows, lengths, strict=True))
    total += sum(_change(problem, a[0], b[0]) for a, b in pairwise(rows))
    return total if total < float("inf") else None


def _change(problem: Problem, before: tuple[Strategy, float], after: tuple[Strategy, float]) -> float:
    """Seconds that a change costs; see the module's docstring."""
    one, other = before[0], after[0]
    if one == other:
        return 0.0
    groups = 2 + sum(getattr(other.mesh, axis) > 1 for axis in AXES)
    seconds = GROUP_S * groups
    if not only_synchronisation(one, other):
        execution, cluster = other.execution, problem.cluster
        each = dtype_bytes(execution.param_dtype) + optimizer_bytes_per_parameter(execution)
        far = min((level.bytes_per_s for level in cluster.levels), default=float("inf"))
        seconds += problem.graph.parameter_count * each / far
    methods = {m for m in other.grad_sync.compression if m not in one.grad_sync.compression}
    lost = [
        1.0 / parsed.amount if parsed.name == "topk" else 1.0
        for parsed in map(parse_method, sorted(methods))
        if parsed.biased
    ]
    return float(seconds + (max(lost) * after[1] if lost else 0.0))


def _entries(phases: Sequence[PhasePlan]) -> list[Phase]:
    """What the strategy file says of the later phases."""
    found = []
    for before, phase in pairwise(phases):
        if keys := differences(before.strategy, phase.strategy):
            found.append(Phase(from_step=phase.from_step, keys=keys))
    return found
