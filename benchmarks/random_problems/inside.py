"""The parts of a case that run in a process of their own: `plan SEED NUMBER OUT`, `laws SEED NUMBER OUT ANSWER EFFORT`."""

from __future__ import annotations

import json
import pickle
import sys
from collections import Counter
from pathlib import Path
from random import Random

from autoparallel.costmodel.graph_json import graph_from_json
from autoparallel.planner.problem import Problem
from benchmarks.random_problems.answers import Answer, answer, isolated
from benchmarks.random_problems.bounded import against_bounds
from benchmarks.random_problems.cases import draw_case
from benchmarks.random_problems.graphs import graph_path
from benchmarks.random_problems.laws import Effort, against_strategies, claims, with_keys
from benchmarks.random_problems.verdicts import Finding, Grade

Laws = tuple[list[Finding], Counter[str]]


def plan_case(seed: int, number: int) -> Answer:
    """Plan the case from its saved graph."""
    case = draw_case(seed, number)
    return answer(case.problem(graph_from_json(graph_path(case.model).read_text(encoding="utf-8"))))


def judge(problem: Problem, given: Answer, *, seed: str, effort: Effort) -> Laws:
    """Everything found of an answer, and how much was tried."""
    found, tried = list(claims(problem, given)), Counter[str]()
    if given.status not in ("optimal", "feasible", "infeasible", "nothing found"):
        return found, tried

    def drawn() -> Laws:
        count = Counter[str]()
        told = list(against_strategies(problem, given, Random(f"{seed}/strategies"), effort, count))
        told += against_bounds(problem, Random(f"{seed}/bounds"), effort.bounds, effort.most_cpu_s, count)
        return told, count

    result, _, cut = isolated(drawn, effort.most_cpu_s * 3 + 60)
    if result is None:
        told = "drawn strategies: no answer"
        found.append(Finding(law="strategy", grade=Grade.CUT if cut else Grade.CRASHED, told=told))
    else:
        found += result[0]
        tried += result[1]
    found += with_keys(problem, given, Random(f"{seed}/keys"), effort, tried)
    return found, tried


def main() -> None:
    what, seed, number, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    if what == "plan":
        out.write_bytes(pickle.dumps(plan_case(seed, number)))
        return
    case = draw_case(seed, number)
    graph = graph_from_json(graph_path(case.model).read_text(encoding="utf-8"))
    given = pickle.loads(Path(sys.argv[5]).read_bytes())
    effort = Effort(**json.loads(sys.argv[6]))
    out.write_bytes(pickle.dumps(judge(case.problem(graph), given, seed=f"{seed}/{number}", effort=effort)))


if __name__ == "__main__":
    main()
