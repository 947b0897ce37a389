"""Draws problems, plans them and holds the answers to their laws: `python -m benchmarks.random_problems --seed S --cases N`."""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

from autoparallel.costmodel.graph_json import graph_from_json
from benchmarks.random_problems.answers import Answer, run_command
from benchmarks.random_problems.cases import Case, draw_case
from benchmarks.random_problems.graphs import CaptureFailed, ensure_graph, graph_path
from benchmarks.random_problems.laws import Effort
from benchmarks.random_problems.summary import Row, table, violations
from benchmarks.random_problems.verdicts import VIOLATIONS, Finding, Grade
from benchmarks.random_problems.weak import least_bounds

INSIDE = ("-m", "benchmarks.random_problems.inside")
TWICE_EVERY = 4  # of so many cases one is planned twice


def plan_case(case: Case, folder: Path, limit_s: float) -> Answer:
    """The answer of a fresh process that plans from the saved graph."""
    out = folder / "answer"
    out.unlink(missing_ok=True)
    run = run_command([*INSIDE, "plan", str(case.seed), str(case.number), str(out)], limit_s)
    if run.cut:
        return Answer(status="cut", cpu_s=run.cpu_s, message=f"no answer within {limit_s:.0f} s")
    if not out.exists():
        told = " | ".join(run.output.decode(errors="replace").strip().splitlines()[-3:])
        return Answer(status="crashed", cpu_s=run.cpu_s, message=f"exit status {run.code}: {told}")
    answer: Answer = pickle.loads(out.read_bytes())
    return replace(answer, cpu_s=run.cpu_s)


def judge_case(case: Case, given: Answer, folder: Path, effort: Effort) -> tuple[list[Finding], Counter[str]]:
    """What a fresh process finds of the answer."""
    source, out = folder / "given", folder / "found"
    source.write_bytes(pickle.dumps(given))
    out.unlink(missing_ok=True)
    command = [
        *INSIDE,
        "laws",
        str(case.seed),
        str(case.number),
        str(out),
        str(source),
        json.dumps(asdict(effort)),
    ]
    run = run_command(command, 8 * effort.limit_s + 600)
    if out.exists():
        found, tried = pickle.loads(out.read_bytes())
        return found, tried
    told = " | ".join(run.output.decode(errors="replace").strip().splitlines()[-3:])
    return [
        Finding(law="claims", grade=Grade.CUT if run.cut else Grade.CRASHED, told=f"the laws: {told}")
    ], Counter()


def twice(case: Case, given: Answer, folder: Path, limit_s: float) -> list[Finding]:
    """Whether a second process gives the same answer."""
    again = plan_case(case, folder, limit_s)
    keys = ("status", "strategy", "step_time_s", "lower_bound_s")
    other = [key for key in keys if getattr(again, key) != getattr(given, key)]
    if not other:
        return []
    told = "; ".join(f"{key} {getattr(given, key)} and {getattr(again, key)}" for key in other)
    return [Finding(law="twice", grade=Grade.BROKEN, told=told)]


def run_case(case: Case, arguments: argparse.Namespace) -> Row:
    """Plan the case and judge the answer."""
    try:
        ensure_graph(case.model)
    except CaptureFailed as error:
        return Row(case=case, answer=Answer(status="not captured", message=str(error)))
    effort = Effort(
        keys=arguments.keys, draws=arguments.draws, moves=arguments.moves, limit_s=arguments.time_limit,
        left_out=tuple(arguments.leave_out),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder, findings, tried = Path(name), list[Finding](), Counter[str]()
        given = plan_case(case, folder, arguments.time_limit)
        if arguments.laws:
            if case.number % TWICE_EVERY == 0 or len(arguments.only) == 1:
                findings += twice(case, given, folder, arguments.time_limit)
            found, tried = judge_case(case, given, folder, effort)
            findings += found
    return Row(case=case, answer=given, findings=tuple(findings), tried=tried)


def weak_bounds(case: Case) -> list[str]:
    """How far strategies of the case's least bounds are above these."""
    try:
        ensure_graph(case.model)
    except CaptureFailed as error:
        return [f"     not captured: {error}"]
    graph = graph_from_json(graph_path(case.model).read_text(encoding="utf-8"))
    return [f"     {one.told()}" for one in least_bounds(case.problem(graph))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument(
        "--only", type=int, action="append", default=[], help="only the case of this number (repeatable)"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--laws", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--time-limit", type=float, default=180.0, help="seconds after which a plan is cut")
    usual = Effort()
    parser.add_argument("--keys", type=int, default=usual.keys, help="further keys fixed, a case")
    parser.add_argument("--draws", type=int, default=usual.draws, help="strategies drawn at random, a case")
    parser.add_argument("--moves", type=int, default=usual.moves, help="strategies beside the plan, a case")
    parser.add_argument(
        "--leave-out", action="append", default=[], metavar="KEY", help="a key that no drawn strategy varies"
    )
    parser.add_argument("--list", action="store_true", help="draw the cases and stop")
    parser.add_argument(
        "--weak", action="store_true", help="instead: how far strategies of the least bounds are above these"
    )
    arguments = parser.parse_args()
    rows = []
    for number in arguments.only or range(arguments.cases):
        case = draw_case(arguments.seed, number)
        if arguments.list:
            print(f"{number:4d} {case.cluster.kind:<9} {case.told}")
            continue
        if arguments.weak:
            print("\n".join([f"{number:4d} {case.told}", *weak_bounds(case)]), flush=True)
            continue
        rows.append(run_case(case, arguments))
        print(rows[-1].told(), flush=True)
        if arguments.only or rows[-1].answer.status in ("crashed", "not captured"):
            print(
                "\n".join(f"       {text}" for text in (*rows[-1].details(), rows[-1].answer.message) if text)
            )
        if arguments.json:
            arguments.json.write_text(
                json.dumps([row.as_json() for row in rows], indent=2) + "\n", encoding="utf-8"
            )
    if rows:
        print("\n".join(["", *table(rows), "", *violations(rows)]))
        sys.exit(any(one.grade in VIOLATIONS for row in rows for one in row.findings))


if __name__ == "__main__":
    main()
