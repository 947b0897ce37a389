"""The rows of the cases and the table at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.random_problems.answers import Answer
from benchmarks.random_problems.cases import Case
from benchmarks.random_problems.verdicts import VIOLATIONS, Finding, Grade


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A case, its answer, and what was found of it."""

    case: Case
    answer: Answer
    findings: tuple[Finding, ...] = ()
    tried: Counter[str] = field(default_factory=Counter)

    @property
    def repeat(self) -> str:
        """The command that shows it again."""
        return f"python -m benchmarks.random_problems --seed {self.case.seed} --only {self.case.number}"

    def told(self) -> str:
        """One line."""
        a = self.answer
        head = f"{self.case.number:4d} {a.status:<13} "
        if a.found:
            head += f"{a.step_time_s:10.4g} s  gap {a.gap:6.2%} "
        head += f" cpu {a.cpu_s:6.2f} s  near {a.near_s:5.2f} s  {self.case.told}"
        counts = Counter(str(one.grade) for one in self.findings)
        return head + "".join(f"\n       {n} x {grade}" for grade, n in counts.items())

    def details(self) -> list[str]:
        """A line for each finding."""
        return [
            f"{one.grade}: {one.law}, {100 * one.better:.3g} % better: {one.told}"
            if one.better
            else f"{one.grade}: {one.law}: {one.told}"
            for one in self.findings
        ]

    def as_json(self) -> dict[str, Any]:
        answer = asdict(self.answer)
        answer["strategy"] = repr(self.answer.strategy)
        return {
            "case": self.case.told, "family": self.case.model.family, "kind": self.case.cluster.kind, "repeat": self.repeat,
            "seed": self.case.seed, "number": self.case.number, "answer": answer, "tried": dict(self.tried),
            "findings": [asdict(one) for one in self.findings],
        }  # fmt: skip


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of them is not above; 0 of nothing."""
    ordered = sorted(values)
    return (
        ordered[min(len(ordered) - 1, max(0, -(-int(len(ordered) * share * 1000) // 1000) - 1))]
        if ordered
        else 0.0
    )


def table(rows: Sequence[Row]) -> list[str]:
    """Violations, what was proved, and how long it took, beside what is asked of a hundred cases."""
    status = Counter(row.answer.status for row in rows)
    answered = [row for row in rows if row.answer.status in ("optimal", "feasible", "nothing found")]
    found = [row for row in answered if row.answer.found]
    cpu = [row.answer.cpu_s for row in rows if row.answer.cpu_s]
    near = [row.answer.near_s for row in found]

    def cases_with(*grades: Grade, status: tuple[str, ...] = (), laws: tuple[str, ...] = ()) -> int:
        return sum(
            any(f.grade in grades and (not laws or f.law in laws) for f in row.findings)
            for row in rows
            if not status or row.answer.status in status
        )

    def share(gap: float) -> str:
        proved = sum(row.answer.found and row.answer.gap <= gap for row in answered)
        return f"{proved} of {len(answered)}" + (f" ({proved / len(answered):.0%})" if answered else "")

    tried = sum((row.tried for row in rows), Counter[str]())
    lines = [
        f"{len(rows)} cases: " + ", ".join(f"{n} {name}" for name, n in status.most_common()),
        f"tried: {tried['keys']} constrained plans, {tried['strategies']} strategies ({tried['fit']} fit, "
        f"{tried['skipped']} too long to simulate, {tried['ended early']} cases ended early)",
        "cases with                                                          found   asked",
        f"  a broken law, called optimal                                      {cases_with(Grade.BROKEN, status=('optimal',)):5}       0",
        f"  a broken law, other answers (nothing fits, price, own key)        {cases_with(Grade.BROKEN, status=('feasible', 'infeasible', 'nothing found')):5}       0",
        f"  something below the stated bound                                  {cases_with(Grade.OUTSIDE):5}       0",
        f"  a constrained plan more than 1 % better, not called optimal       {cases_with(Grade.COUNTED, laws=('key',)):5}     <= 3",
        f"  a drawn strategy more than 1 % better, not called optimal         {cases_with(Grade.COUNTED, laws=('strategy',)):5}",
        f"  a crash or no answer in time                                      {cases_with(Grade.CRASHED, Grade.CUT) + status['crashed'] + status['cut']:5}       0",
        f"  something better on fewer devices                                 {cases_with(Grade.FEWER):5}",
        f"proved to 2 %: {share(0.02)}, asked 85 %; to 5 %: {share(0.05)}, asked 95 %",
    ]
    if cpu:
        lines.append(
            f"CPU from a saved graph: median {median(cpu):.1f} s, 95th percentile {percentile(cpu, 0.95):.1f} s, worst "
            f"{max(cpu):.1f} s; asked 4, 15, 30"
        )
    if near:
        lines.append(
            f"wall-clock until within 2 % of the final plan: median {median(near):.1f} s, 95th percentile "
            f"{percentile(near, 0.95):.1f} s, worst {max(near):.1f} s"
        )
    return lines


def violations(rows: Sequence[Row]) -> list[str]:
    """Each with the command that shows it again."""
    lines = []
    for row in rows:
        bad = [one for one in row.findings if one.grade in VIOLATIONS or one.grade is Grade.COUNTED]
        if bad or row.answer.status in ("crashed", "cut"):
            lines.append(f"{row.repeat}   # {row.answer.status}: {row.case.told}")
            if row.answer.status == "crashed":
                lines.append(f"    crashed: {row.answer.message}")
            lines += [
                f"    {text}" for text in Row(case=row.case, answer=row.answer, findings=tuple(bad)).details()
            ]
    return lines
