"""Captures, checks and plans other people's models: `python -m benchmarks.coverage capture|exact|plan|ranks|report`.

Results are added to a file of JSON lines, so that a run that was cut goes on where it stopped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.coverage import report, steps
from benchmarks.coverage.models import Entry, library_entries, transformers_entries
from benchmarks.coverage.work import Result, run_alone

STEPS: dict[str, Callable[[Entry], Result]] = {
    "capture": steps.captured,
    "exact": steps.exact,
    "plan": steps.planned,
    "ranks": steps.ranked,
}


def entries() -> list[Entry]:
    """All models, in the order of their names."""
    return [*transformers_entries(), *library_entries()]


def read(path: Path) -> dict[tuple[str, str], Result]:
    """The last result of each model and step."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(row["model"], row["step"]): row for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.coverage", description=__doc__)
    parser.add_argument("step", choices=[*STEPS, "report"])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--only", default="", help="models whose name matches this regular expression")
    parser.add_argument(
        "--seed", type=int, help="go through the models in the order drawn with it, not by name"
    )
    parser.add_argument("--models", type=int, help="so many of them, the first in that order")
    parser.add_argument("--third", action="store_true", help="a third of the models, drawn by their names")
    parser.add_argument("--limit-s", type=float, default=60.0, help="seconds for one model")
    parser.add_argument("--again", choices=["no", "failed", "all"], default="no")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = read(options.results)
    if options.step == "report":
        print(report.summary(known.values()))
        return
    chosen = [entry for entry in entries() if re.search(options.only, entry.key)]
    if options.seed is not None:
        random.Random(options.seed).shuffle(chosen)
    for entry in chosen[: options.models]:
        before = known.get((entry.key, options.step))
        done = before is not None and (options.again == "no" or (options.again == "failed" and before["ok"]))
        drawn = not options.third or random.Random(entry.key).random() < 1 / 3
        if done or not drawn:
            continue
        found = run_alone(partial(STEPS[options.step], entry), options.limit_s)
        row = {"model": entry.key, "architecture": entry.architecture, "step": options.step} | found
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{entry.key:40} {'ok ' if row['ok'] else 'NOT'} {row['seconds']:6.1f} s {row.get('why', '')[:110]}",
            flush=True,
        )


# What every model imports is imported once, before there are processes of their own.
importlib.import_module("autoparallel.planner.capture.huggingface")
importlib.import_module("transformers.models.llama.modeling_llama")
importlib.import_module("transformers.models.clip.modeling_clip")
if __name__ == "__main__":
    main()
