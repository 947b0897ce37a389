"""How long planning takes: `python benchmarks/planning.py [--case NAME …] [--json OUT.json] [--plot OUT.html]`.

Every case runs in a process of its own, imports included, because that is what a user waits for. The time is split
into import, capture (or reading the saved graph), bounds (space, prices, bounds of the shapes), solve (the search
and its alternatives) and, measured from outside, the whole. Growth cases give the curves over depth and devices.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
CONFIGS = "examples/configs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a cluster, and the most seconds it may take; `saved` plans from a graph captured before."""

    name: str
    model: str
    cluster: str
    limit_s: float
    saved: bool = False
    layers: int = 0  # the graph grown to so many blocks
    curve: str = ""


def _curves() -> list[Case]:
    deep = [
        Case(name=f"gpt, {n} layers", model=f"hf:{CONFIGS}/gpt2.json", cluster="h100-sxm:8x8", limit_s=10.0, saved=True,
             layers=n, curve="layers")
        for n in (12, 100, 1000)
    ]  # fmt: skip
    wide = [
        Case(name=f"llama-3.1-8b, {8 * n} devices", model=f"hf:{CONFIGS}/llama-3.1-8b.json", cluster=f"h100-sxm:{n}x8",
             limit_s=10.0, saved=True, curve="devices")
        for n in (8, 128, 8192)
    ]  # fmt: skip
    return [*deep, *wide]


def cases() -> tuple[Case, ...]:
    """The cases that planning is held to, cold and from saved graphs, and the growth curves."""
    table = [
        ("llama-3.1-8b", f"hf:{CONFIGS}/llama-3.1-8b.json", "h100-sxm:1x8", 6.0, 2.0),
        ("llama-3.1-405b", f"hf:{CONFIGS}/llama-3.1-405b.json", "h100-sxm:2048x8", 10.0, 4.0),
        ("deepseek-v3", f"hf:{CONFIGS}/deepseek-v3.json", "h100-sxm:256x8", 15.0, 0.0),
        ("resnet-50", "examples/resnet.py:resnet50", "a100-sxm-80gb:4x8", 10.0, 0.0),
        ("dlrm", "examples/dlrm.py:dlrm", "a100-sxm-80gb:4x8", 10.0, 0.0),
    ]
    found = [Case(name=n, model=m, cluster=c, limit_s=limit) for n, m, c, limit, _ in table]
    found += [
        Case(name=f"{n}, saved graph", model=m, cluster=c, limit_s=limit, saved=True)
        for n, m, c, _, limit in table
        if limit
    ]
    return (*found, *_curves())


def graph_path(case: Case, folder: Path) -> Path:
    """Where the graph of a case is kept."""
    return folder / f"{Path(case.model.rpartition(':')[2]).stem}-{case.layers}.json"


def capture_graph(case: Case) -> Any:
    """Capture the model of a case (imports torch)."""
    from autoparallel.planner.capture import capture
    from autoparallel.planner.capture.load import load_model

    loaded = load_model(case.model, model_args={}, seq_len=None)
    return capture(loaded.module, loaded.example_inputs, name=loaded.name)


def save_graph(case: Case, folder: Path) -> None:
    """Capture and keep the graph of a case, grown to its number of blocks."""
    from autoparallel.costmodel.graph_json import graph_to_json

    graph = capture_graph(case)
    if case.layers:
        first, *_, last = graph.repeated_positions
        middle = tuple(replace(graph.chain[first], path=f"layers.{i}") for i in range(case.layers))
        graph = replace(graph, chain=(*graph.chain[:first], *middle, *graph.chain[last + 1 :]))
    graph_path(case, folder).write_text(graph_to_json(graph), encoding="utf-8")


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Plan one case in this process, which has imported nothing yet; seconds by phase."""
    started = time.perf_counter()
    from autoparallel.costmodel.graph_json import graph_from_json
    from autoparallel.planner.plan import plan
    from autoparallel.planner.problem import Problem
    from autoparallel.planner.search.bounds.outer import outer_of
    from autoparallel.planner.side_by_side import usable_processes
    from autoparallel.profiles.load import load_cluster

    imported = time.perf_counter()
    if case.saved:
        graph = graph_from_json(graph_path(case, folder).read_text(encoding="utf-8"))
    else:
        graph = capture_graph(case)
    captured = time.perf_counter()
    cluster = load_cluster(case.cluster)
    problem = Problem(graph=graph, cluster=cluster, global_batch=cluster.devices)
    result = plan(problem, processes=usable_processes())
    planned = time.perf_counter()
    outer_of(
        problem, processes=usable_processes()
    )  # once more, alone: what of the plan's time went into prices and bounds
    bounds_s = time.perf_counter() - planned
    return {
        "import_s": imported - started,
        "capture_s": captured - imported,
        "bounds_s": bounds_s,
        "solve_s": max(planned - captured - bounds_s, 0.0),
        "status": result.status,
        "gap": result.gap,
        "step_time_s": result.prediction.step_time_s,
        "candidates": result.candidates,
        "whole_without_remeasuring_s": planned - started,
    }


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case in a fresh process; `total_s` includes starting Python."""
    if case.saved and not graph_path(case, folder).exists():
        save_graph(case, folder)
    started = time.perf_counter()
    command = [sys.executable, __file__, "--inside", case.name, "--graphs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    outside_s = time.perf_counter() - started
    if done.returncode:
        return {"name": case.name, "error": done.stderr.strip().splitlines()[-1:]}
    found: dict[str, Any] = json.loads(done.stdout)
    found["total_s"] = outside_s - found["bounds_s"]  # the bounds were measured a second time
    return {"name": case.name, "limit_s": case.limit_s, "curve": case.curve, **found}


def show(row: dict[str, Any]) -> str:
    """One line of the table."""
    if "error" in row:
        return f"{row['name']:<34} failed: {' '.join(row['error'])}"
    parts = " ".join(
        f"{row[key]:8.2f}" for key in ("import_s", "capture_s", "bounds_s", "solve_s", "total_s")
    )
    late = "  LATE" if row["total_s"] > row["limit_s"] else ""
    return f"{row['name']:<34}{parts} {row['limit_s']:7.1f}  {row['status']:<9}{row['gap']:7.2%}{late}"


def write_plot(rows: list[dict[str, Any]], path: Path) -> None:
    """The growth curves: seconds over layers and over devices, one page."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for curve in ("layers", "devices"):
        points = [r for r in rows if r.get("curve") == curve]
        at = [int("".join(ch for ch in r["name"].rpartition(",")[2] if ch.isdigit())) for r in points]
        figure.add_trace(go.Scatter(x=at, y=[r["total_s"] for r in points], name=curve, mode="lines+markers"))
    figure.update_layout(xaxis={"type": "log", "title": "layers or devices"}, yaxis_title="seconds to plan")
    figure.write_html(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", default=[], help="only cases whose name contains this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--graphs", type=Path, default=ROOT / "benchmarks" / ".graphs", help="saved graphs")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        case = next(c for c in cases() if c.name == arguments.inside)
        print(json.dumps(run_case(case, arguments.graphs)), flush=True)
        os._exit(0)  # as the command ends: without tearing torch down
    arguments.graphs.mkdir(parents=True, exist_ok=True)
    print(
        f"{'case':<34}{'import':>8} {'capture':>8} {'bounds':>8} {'solve':>8} {'total':>8} {'limit':>7}  status      gap"
    )
    rows = []
    for case in cases():
        if not arguments.case or any(word in case.name for word in arguments.case):
            rows.append(measure(case, arguments.graphs))
            print(show(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if arguments.plot:
        write_plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
