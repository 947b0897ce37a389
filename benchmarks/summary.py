"""What is said of predictions against measurements: errors by source, order within groups, what fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from math import exp
from statistics import mean, median

from autoparallel.costmodel.confidence import COVERAGE, KNOWN, QUANTILE

TIE = 0.01  # two measured times closer than this are not ordered: sources repeat a run within a few percent
NEAR_BEST = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One row, predicted and measured."""

    id: str
    source: str
    group: str
    outcome: str
    predicted_s: float
    measured_s: float | None
    feasible: bool
    predicted_gib: float
    measured_gib: float | None
    memory_kind: str
    fits_judged: bool = True  # whether its memory is that of the strategy it is scored as
    mfu: float = 0.0  # predicted

    @property
    def error(self) -> float | None:
        """Relative error of the step time; positive when predicted too slow."""
        return None if self.measured_s is None else self.predicted_s / self.measured_s - 1


def quantile(values: Sequence[float], q: float) -> float:
    """Nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def error_summary(errors: Sequence[float]) -> dict[str, float]:
    """Mean absolute error, 95th percentile, bias and median of relative errors."""
    sizes = [abs(e) for e in errors]
    return {
        "rows": len(errors),
        "mean_absolute_error": mean(sizes),
        "p95_absolute_error": quantile(sizes, 0.95),
        "bias": mean(errors),
        "median_absolute_error": median(sizes),
    }


def interval_summary(rows: Sequence[Scored]) -> dict[str, float]:
    """Steps against the narrowest interval that predictions state (`costmodel.confidence`: known devices, nothing rests on links),
    each source counting alike: its width (0.1: a tenth either way), the share of the measured steps within it, and the width within which nine of ten are."""
    timed = by(lambda r: r.source, [r for r in rows if r.measured_s and r.outcome == "ok"])
    off = sorted(
        (max(r.predicted_s / r.measured_s, r.measured_s / r.predicted_s) - 1, 1 / len(group))
        for group in timed.values()
        for r in group
        if r.measured_s
    )
    stated = exp(QUANTILE * KNOWN) - 1
    reached = list(accumulate(weight / len(timed) for _, weight in off))
    return {
        "stated": stated,
        "covered": sum(weight for width, weight in off if width <= stated) / max(1, len(timed)),
        "nine_of_ten": next(
            (width for (width, _), share in zip(off, reached, strict=True) if share >= COVERAGE), 0.0
        ),
    }


def kendall_tau(rows: Sequence[Scored]) -> float | None:
    """Kendall's tau of predicted against measured step time, pairs that measure equal left out."""
    agree = total = 0
    for a, b in combinations(rows, 2):
        assert a.measured_s is not None
        assert b.measured_s is not None
        if abs(a.measured_s / b.measured_s - 1) <= TIE:
            continue
        total += 1
        agree += 1 if (a.predicted_s < b.predicted_s) == (a.measured_s < b.measured_s) else -1
    return agree / total if total else None


def picks_near_best(rows: Sequence[Scored]) -> bool:
    """Whether the strategy predicted fastest measured within 3 % of the fastest."""
    pick = min(rows, key=lambda r: r.predicted_s)
    best = min(r.measured_s for r in rows if r.measured_s is not None)
    return pick.measured_s is not None and pick.measured_s <= (1 + NEAR_BEST) * best


def order_summary(rows: Sequence[Scored]) -> dict[str, float]:
    """Order of strategies within the groups that have at least two measured rows."""
    groups = by(lambda r: r.group, [r for r in rows if r.group and r.outcome == "ok" and r.measured_s])
    taus = [t for g in groups.values() if len(g) > 1 and (t := kendall_tau(g)) is not None]
    picks = [picks_near_best(g) for g in groups.values() if len(g) > 1]
    if not taus:
        return {"groups": 0}
    return {
        "groups": len(picks),
        "kendall_tau": mean(taus),
        "fastest_within_3_percent": mean(1.0 if p else 0.0 for p in picks),
    }


def fit_summary(rows: Sequence[Scored]) -> dict[str, float]:
    """How well runs that died are told from runs that did not."""
    rows = [r for r in rows if r.fits_judged]
    died = [r for r in rows if r.outcome == "oom"]
    ran = [r for r in rows if r.outcome == "ok"]
    wrong = sum(r.feasible for r in died) + sum(not r.feasible for r in ran)
    return {
        "oom_rows": len(died),
        "ok_rows": len(ran),
        "accuracy": 1 - wrong / max(1, len(rows)),
        "oom_called_feasible": sum(r.feasible for r in died) / max(1, len(died)),
        "ok_called_infeasible": sum(not r.feasible for r in ran) / max(1, len(ran)),
    }


def memory_summary(rows: Sequence[Scored]) -> dict[str, dict[str, float]]:
    """Relative errors of peak memory by how it was measured."""
    measured = [r for r in rows if r.measured_gib]
    return {
        kind: error_summary([r.predicted_gib / r.measured_gib - 1 for r in group if r.measured_gib])
        for kind, group in by(lambda r: r.memory_kind, measured).items()
    }


def by(key: Callable[[Scored], str], rows: Sequence[Scored]) -> dict[str, list[Scored]]:
    """Rows grouped by `key`, in order of first appearance."""
    groups: dict[str, list[Scored]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return dict(groups)


def summarise(rows: Sequence[Scored]) -> dict[str, object]:
    """Per source and overall; the overall errors are means over sources, so that large sources do not rule."""
    sources = {}
    for source, group in by(lambda r: r.source, rows).items():
        errors = [r.error for r in group if r.error is not None and r.outcome == "ok"]
        sources[source] = {
            **(error_summary(errors) if errors else {"rows": 0}),
            "order": order_summary(group),
            "fit": fit_summary(group),
            "memory": memory_summary(group),
        }
    with_time = [s for s in sources.values() if s["rows"]]
    keys = ("mean_absolute_error", "p95_absolute_error", "bias")
    all_errors = [r.error for r in rows if r.error is not None and r.outcome == "ok"]
    return {
        "sources": sources,
        "overall": {
            "mean_over_sources": {k: mean(float(s[k]) for s in with_time) for k in keys} if with_time else {},  # type: ignore[arg-type]
            "over_rows": error_summary(all_errors) if all_errors else {},
            "interval": interval_summary(rows),
            "order": order_summary(rows),
            "fit": fit_summary(rows),
            "memory": memory_summary(rows),
        },
    }
