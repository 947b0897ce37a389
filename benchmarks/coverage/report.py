"""The tables of `docs/coverage.md`, from the results of a run."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
MOST_NAMES = 12  # of models with one cause

# What keeps a model from being captured, by what is said of it; the first that fits.
CAUSES = (
    ("a package is missing that the model needs", r"requires the \w+ library|ImportError"),
    (
        "does not build from its own default configuration",
        r"cannot be built|not a valid|transformers \S+ has no",
    ),
    ("no example is known of what it is fed", r"no example is known|is not known"),
    ("calls as many operators as there are samples", r"other operators with a batch|one by one|other dims"),
    (
        "a part looks at the values of its data, and is run for real or refused",
        r"values of a tensor|run for real|nonzero",
    ),
    ("no answer within the time", r"no answer within"),
    ("fails on the examples it is given", r""),
)

NOT_RUNNING = "does not run with its own defaults either, on a CPU and with real tensors"


def fails_itself(result: Result) -> bool:
    """Whether it was shown that the model fails with real tensors as it does on the meta device (`defaults.py`)."""
    return "fails_itself" in result


def cause(result: Result) -> str:
    """Why a model counts as not captured."""
    if fails_itself(result):
        return NOT_RUNNING
    return next(name for name, pattern in CAUSES if re.search(pattern, result.get("why", "")))


def is_out_of_scope(result: Result) -> bool:
    """Whether there is nothing to capture: it does not build here."""
    return not result["ok"] and cause(result) in {CAUSES[0][0], CAUSES[1][0]}


def is_idle(result: Result) -> bool:
    """Whether parts of a captured model are not reached by the example inputs."""
    return any("not used with the example inputs" in warning for warning in result.get("warnings", ()))


def summary(results: Iterable[Result]) -> str:
    """The tables, as Markdown."""
    by_step: dict[str, list[Result]] = {}
    for result in results:
        by_step.setdefault(result["step"], []).append(result)
    lines = ["| step | models | fulfilled | share |", "|---|---|---|---|"]
    for label, tried, fulfilled in _steps(by_step):
        if tried:
            lines.append(f"| {label} | {tried} | {fulfilled} | {fulfilled / tried:.0%} |")
    lines += ["", *_seconds(by_step.get("capture", [])), "", *_causes(by_step.get("capture", []))]
    return "\n".join([*lines, "", *_differences(by_step.get("exact", []))])


def _steps(by_step: Mapping[str, Sequence[Result]]) -> Iterable[tuple[str, int, int]]:
    built = [r for r in by_step.get("capture", ()) if not is_out_of_scope(r)]
    found = [r for r in built if r["ok"]]
    yield "captured without running for real, parameters equal", len(built), len(found)
    running = [r for r in built if not fails_itself(r)]
    yield "… of those that run with their own defaults", len(running), len(found)
    yield "captured so that every parameter is reached", len(built), sum(not is_idle(r) for r in found)
    exact = [r for r in by_step.get("exact", ()) if r.get("ran")]
    for name, key in (
        ("FLOPs equal to `flop_counter`", "flops"),
        ("saved bytes equal to an eager run on a CPU", "saved"),
    ):
        yield name, len(exact), sum(r[key][0] == r[key][1] for r in exact if key in r)
    composed = [r for r in exact if "composed" in r]
    alike = sum(r["saved"][0] == r["saved"][1] for r in composed)
    yield "… where a CPU has other kernels than those that are priced", len(composed), alike
    captured = {r["model"] for r in found}
    planned = [r for r in by_step.get("plan", ()) if r["model"] in captured]
    yield "of those captured, planned on 8 and on 64 devices", len(planned), sum(r["ok"] for r in planned)
    ranked = [r for r in by_step.get("ranks", ()) if r.get("ran")]
    yield (
        "two processes equal one, or refused before anything starts",
        len(ranked),
        sum(r["ok"] for r in ranked),
    )
    outcomes = Counter(outcome for r in ranked for outcome in r["outcomes"])
    yield "… strategies equal", outcomes.total(), outcomes["equal"]
    yield "… strategies refused", outcomes.total(), outcomes["refused"]


def _seconds(results: Sequence[Result]) -> list[str]:
    seconds = [r["seconds"] for r in results if r["ok"]]
    if not seconds:
        return []
    return [f"Seconds of those captured: median {statistics.median(seconds):.1f}, worst {max(seconds):.0f}."]


def _causes(results: Sequence[Result]) -> list[str]:
    failed = [r for r in results if not r["ok"]]
    lines = ["| not captured because it | models | which |", "|---|---|---|"]
    for name, count in Counter(map(cause, failed)).most_common():
        names = sorted(r["model"].partition(":")[2] for r in failed if cause(r) == name)
        rest = f" and {count - MOST_NAMES} more" if count > MOST_NAMES else ""
        lines.append(f"| {name} | {count} | {', '.join(names[:MOST_NAMES])}{rest} |")
    return lines


def _differences(results: Sequence[Result]) -> list[str]:
    differ = [r for r in results if r.get("ran") and not r["ok"]]
    if not differ:
        return []
    lines = ["| model | differs from torch by |", "|---|---|"]
    return lines + [f"| {r['model'].partition(':')[2]} | {r['why']} |" for r in differ]
