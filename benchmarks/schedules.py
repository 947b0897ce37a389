"""The schedule simulator alone, against published step times: `python benchmarks/schedules.py`.

Stage times were profiled by the authors of Zero Bubble Pipeline Parallelism (arXiv:2401.10241, appendix D), so that
nothing but the schedule is predicted. Three things are compared per row:

- authors: their own computed step, micro_batches * (F + I + W) / (1 - bubble rate) with the rates of their table 5;
- measured: their measured step (from the throughput of table 4), where printed;
- ours: messages beside the computation (what their computation assumes), and in line with it on the sender
  (`blocking_sends`: what the Megatron-LM fork that they measured does).

What remains below the measured step (3 to 6 %) is not in the profiled times: they are averages over stages, while
the slowest stage (the one with the vocabulary) sets the pace, and the step ends with the optimizer.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autoparallel.costmodel.stage_cost import StageCost, phase
from autoparallel.costmodel.timetable import pipeline_times, prepare
from autoparallel.planner.expand.schedules import build_schedule

ROWS = Path(__file__).parent / "published" / "zero_bubble_stage_times.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published configuration; seconds of one rank and micro-batch, all its chunks together."""

    model: str
    schedule: str
    ranks: int
    virtual_stages: int
    micro_batches: int
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    message_s: float
    authors_step_s: float
    measured_step_s: float | None


def read_rows(path: Path = ROWS) -> tuple[Row, ...]:
    """The rows of the data file."""
    found = []
    with path.open() as file:
        for row in csv.DictReader(file):
            times = [
                float(row[f"{name}_ms"]) / 1e3 for name in ("forward", "backward_input", "backward_weight")
            ]
            micro_batches = int(row["micro_batches"])
            found.append(
                Row(
                    model=row["model"],
                    schedule=row["schedule"],
                    ranks=int(row["ranks"]),
                    virtual_stages=int(row["virtual_stages"]),
                    micro_batches=micro_batches,
                    forward_s=times[0],
                    backward_input_s=times[1],
                    backward_weight_s=times[2],
                    message_s=float(row["message_ms"]) / 1e3,
                    authors_step_s=micro_batches * sum(times) / (1.0 - float(row["authors_bubble_rate"])),
                    measured_step_s=float(row["measured_step_s"]) if row["measured_step_s"] else None,
                )
            )
    return tuple(found)


def simulated_step_s(row: Row, *, blocking_sends: bool) -> float:
    """The step of equal stages with the profiled times, a chunk taking its share of a rank's."""
    chunks = row.virtual_stages
    weight = phase({"backward": row.backward_weight_s / chunks})
    both = phase({"backward": (row.backward_input_s + row.backward_weight_s) / chunks})
    cost = StageCost(
        forward=phase({"forward": row.forward_s / chunks}),
        backward=both,
        backward_input=phase({"backward": row.backward_input_s / chunks}),
        backward_weight=weight,
        last_backward=both,
        last_backward_weight=weight,
        step=phase({}),
        send_s=row.message_s,
    )
    ranks = build_schedule(row.schedule, row.ranks, chunks, row.micro_batches)
    timetable = prepare(ranks, blocking_sends=blocking_sends)
    return pipeline_times(timetable, [cost] * (row.ranks * chunks)).step_time_s


def main() -> None:
    """Print every row, and the mean errors."""
    head = ("model", "schedule", "p", "v", "m", "authors s", "ours", "measured s", "ours, blocking")
    print("{:<10} {:<17} {:>3} {:>2} {:>4} {:>10} {:>8} {:>11} {:>15}".format(*head))
    to_authors, to_measured = [], []
    for row in read_rows():
        ours = simulated_step_s(row, blocking_sends=False) / row.authors_step_s - 1.0
        to_authors.append(ours)
        line = f"{row.model:<10} {row.schedule:<17} {row.ranks:>3} {row.virtual_stages:>2} {row.micro_batches:>4}"
        line += f" {row.authors_step_s:>10.3f} {ours:>+8.2%}"
        if row.measured_step_s is not None:
            blocking = simulated_step_s(row, blocking_sends=True) / row.measured_step_s - 1.0
            to_measured.append(blocking)
            line += f" {row.measured_step_s:>11.3f} {blocking:>+15.2%}"
        print(line)
    for name, errors in (("authors' computation", to_authors), ("measured", to_measured)):
        mean, worst = sum(map(abs, errors)) / len(errors), max(errors, key=abs)
        print(f"against {name}: {len(errors)} rows, mean absolute error {mean:.2%}, worst {worst:+.2%}")


if __name__ == "__main__":
    main()
