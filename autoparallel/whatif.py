"""What if: the same model planned on several clusters, and with several values of some keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.errors import UserError
from autoparallel.inputs import Checked, Request, check_request, computed_in, load_graph, make_problem
from autoparallel.planner.explain.choice import WITHIN
from autoparallel.planner.outcome import InfeasiblePlan, PlanResult, SearchTimeout
from autoparallel.planner.plan import plan
from autoparallel.profiles import Cluster

# Above this many plans a what-if takes minutes: more likely a typo than a wish.
MOST_CASES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request of a what-if, and what is particular to it: ("cluster", …), then each varied key."""

    request: Request
    settings: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a case: a plan, or why there is none."""

    case: Case
    cluster: Cluster
    graph: ModelGraph
    result: PlanResult | None
    reason: str = ""


def cases(base: Request, clusters: Sequence[str], vary: Sequence[str]) -> tuple[Case, ...]:
    """Every cluster with every combination of the varied keys. Raises UserError.

    A key is one of the strategy file ("mesh.tp=1,2,4"; values are separated by commas outside brackets), or
    `seq_len` or `global_batch`.
    """
    axes = [[("cluster", name) for name in dict.fromkeys(clusters)]]
    for item in vary:
        key, equals, text = item.partition("=")
        values = split_values(text)
        if not equals or not key or not all(values):
            raise UserError(f"--vary {item}: write KEY=V1,V2,…, for example mesh.tp=1,2,4")
        axes.append([(key.strip(), value) for value in dict.fromkeys(values)])
    found = tuple(Case(request=_request(base, settings), settings=settings) for settings in product(*axes))
    if len(found) > MOST_CASES:
        raise UserError(
            f"--cluster and --vary make {len(found)} cases; at most {MOST_CASES} are planned at once"
        )
    return found


def split_values(text: str) -> list[str]:
    """`1,2,4` at its commas, but not at those inside brackets: `[2, 2],[1, 3]` are two values."""
    values, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            values.append(text[start:i].strip())
            start = i + 1
    return [*values, text[start:].strip()]


def _request(base: Request, settings: tuple[tuple[str, str], ...]) -> Request:
    changed = base
    for key, value in settings:
        if key == "cluster":
            changed = replace(changed, cluster=value)
        elif key in ("seq_len", "global_batch"):
            if not value.isdigit() or int(value) < 1:
                raise UserError(f"--vary {key}={value}: a whole number of at least 1 is needed")
            number = int(value)
            if key == "seq_len":
                changed = replace(changed, seq_len=number)
            else:
                changed = replace(changed, global_batch=number)
        else:
            changed = replace(changed, settings=(*changed.settings, f"{key}={value}"))
    return changed


def run_cases(
    found: Sequence[Case], *, time_limit_s: float | None, say: Callable[[str], None]
) -> tuple[Outcome, ...]:
    """Plan every case. All requests are checked before the first is planned; a model is captured once per
    sequence length and dtype. A case without a plan says why instead of ending the others."""
    checked = [_checked(case) for case in found]
    graphs: dict[tuple[int | None, str], ModelGraph] = {}
    outcomes = []
    for i, (case, request) in enumerate(zip(found, checked, strict=True)):
        say(f"case {i + 1} of {len(found)}: {', '.join(f'{k} {v}' for k, v in case.settings)}")
        key = request.seq_len, computed_in(request.constraints)
        if key not in graphs:
            graphs[key] = load_graph(request)
        outcomes.append(_outcome(case, request, graphs[key], time_limit_s))
    return tuple(outcomes)


def _checked(case: Case) -> Checked:
    """The case's request, read; what is wrong with a varied key is told of `--vary`."""
    try:
        return check_request(case.request)
    except UserError as error:
        varied = tuple(f"--set {key}" for key, _ in case.settings)
        if str(error).startswith(varied):
            raise UserError(str(error).replace("--set", "--vary", 1)) from None
        raise


def _outcome(case: Case, checked: Checked, graph: ModelGraph, time_limit_s: float | None) -> Outcome:
    reason, result = "", None
    try:
        result = plan(make_problem(checked, graph), time_limit_s=time_limit_s, progress=None, within=WITHIN)
    except (InfeasiblePlan, SearchTimeout, UserError) as error:
        # A varied value that cannot be (mesh.tp = 3) is an answer too.
        reason = str(error)
    return Outcome(case=case, cluster=checked.cluster, graph=graph, result=result, reason=reason)
