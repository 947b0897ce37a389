"""`autoparallel watch`: how a run is doing, from its record."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoparallel.cli_errors import exits

if TYPE_CHECKING:
    from rich.console import Group

    from autoparallel.runtime.monitor.record import Record
    from autoparallel.runtime.monitor.slow_links import LinkHistory, SlowLink

_MOST_RANKS = 16


@exits
def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN/", help="The folder of a run that Trainer records.")],
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object, and end.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, metavar="SECONDS", help="Look so often.")] = 2.0,
) -> None:
    """Show a run: its last step, the slowest ranks, and where it differs from its plan."""
    from rich.console import Console
    from rich.live import Live

    from autoparallel.cli_plan import print_json
    from autoparallel.runtime.monitor.record import read_record

    if json_:
        print_json(summary(read_record(folder)))
        return
    if once:
        Console(stderr=True).print(_shown(read_record(folder)))
        return
    with Live(_shown(read_record(folder)), console=Console(stderr=True), auto_refresh=False) as live:
        while True:
            time.sleep(every)
            live.update(_shown(read_record(folder)), refresh=True)


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """The run in numbers: what `--json` prints."""
    from autoparallel.runtime.monitor.bandwidths import ADVICE, bandwidths
    from autoparallel.runtime.monitor.differences import gaps, step_time_s
    from autoparallel.runtime.monitor.record import skipped_steps
    from autoparallel.runtime.monitor.stragglers import stragglers

    record = records[-1]
    history, slow = links_of(record)
    collectives = bandwidths(record)
    below = [
        {
            "kind": one.name,
            "predicted_s": one.priced_s,
            "measured_s": one.seconds,
            "words": f"{one}: {ADVICE}",
        }
        for one in collectives
        if one.far_below
    ]
    measured, predicted = step_time_s(record), (record.start.get("predicted") or {}).get("step_time_s")
    return {
        "starts": len(records),
        "world": record.start["world"],
        "last": record.steps[-1] if record.steps else None,
        "skipped": len(skipped_steps(records)),
        "step_time_s": measured,
        "predicted_step_time_s": predicted,
        "efficiency": predicted / measured if predicted and measured else None,
        "differences": [
            {"kind": g.kind, "predicted_s": g.predicted_s, "measured_s": g.measured_s, "words": str(g)}
            for g in gaps(record)
        ]
        + below,
        "collectives": [asdict(one) for one in collectives],
        "stragglers": [
            {"rank": s.rank, "share": s.share, "costs_s": s.costs_s, "words": str(s)}
            for s in stragglers([step["computing_s"] for step in record.steps], record.start["stages"])
        ],
        "links": {
            "bytes_per_s": history.rates(),
            "slow": [
                {
                    "where": s.where,
                    "ranks": s.ranks,
                    "bytes_per_s": s.bytes_per_s,
                    "costs_s": s.costs_s,
                    "words": str(s),
                }
                for s in slow
            ],
        },
        "said": [entry["text"] for one in records for entry in one.said][-5:],
    }


def links_of(record: Record) -> tuple[LinkHistory, list[SlowLink]]:
    """What the links of a start passed, and those that are slow now."""
    from autoparallel.runtime.monitor.slow_links import RECENT, LinkHistory, Passed
    from autoparallel.runtime.monitor.stragglers import communicating_s

    history = LinkHistory(int(record.start.get("shape", "1x1").partition("x")[2]))
    slow: list[SlowLink] = []
    usual_s = median([communicating_s(step) for step in record.steps[-RECENT:]]) if record.steps else 0.0
    for entry in record.links:
        history.add(Passed(pair=(a, b), size=size, seconds=s) for a, b, size, s in entry["passed"])
        slow = history.slow(usual_s)
    return history, slow


def _shown(records: Sequence[Record]) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from autoparallel.report.numbers import times
    from autoparallel.runtime.monitor.record import skipped_words
    from autoparallel.runtime.monitor.slow_links import rate_text

    found = summary(records)
    last = found["last"]
    head = f"{times(found['world'], 'process', 'processes')}, started {times(found['starts'], 'time')}"
    left_out = [words] if (words := skipped_words(records)) else []
    if last is None:
        return Group(*(Text(line) for line in (f"{head}; no step is done yet", *left_out)))
    head += f"; step {last['step']}, loss {last['loss']:.6g}, {last['seconds']:.4g} s"
    if found["efficiency"] is not None:
        head += f"; {100 * found['efficiency']:.0f} % of the predicted speed ({found['predicted_step_time_s']:.4g} s a step)"
    table = Table("rank", "computing", "communicating", "waiting", "memory")
    ranks = sorted(range(found["world"]), key=lambda r: -last["computing_s"][r])[:_MOST_RANKS]
    for rank in ranks:
        spent = [f"{last[key][rank]:.4g} s" for key in ("computing_s", "communicating_s", "waiting_s")]
        table.add_row(str(rank), *spent, f"{last['memory_bytes'][rank] / 2**30:.2f} GiB")
    lines = [
        *(_collective(one) for one in found["collectives"]),
        *left_out,
        *(one["words"] for one in (*found["stragglers"], *found["links"]["slow"], *found["differences"])),
    ]
    if rates := found["links"]["bytes_per_s"]:
        passed = ", ".join(f"{rate_text(rate)} {kind}" for kind, rate in rates.items())
        lines.append(f"a message passes at {passed}, each way")
    return Group(Text(head), table, *(Text(line) for line in (*lines, *found["said"])))


def _collective(one: Mapping[str, Any]) -> str:
    """`all_reduce over infiniband: 12 a step, 0.25 GB in 0.021 s, 12 GB/s; 14 GB/s priced`."""
    from autoparallel.report.numbers import gigabytes, seconds
    from autoparallel.runtime.monitor.slow_links import rate_text

    parts = []
    if one["count"] is None:
        parts.append("none yet")
    else:
        took = (
            ""
            if one["seconds"] is None
            else f" in {seconds(one['seconds'])}, {rate_text(one['bytes_per_s'])}"
        )
        parts.append(f"{one['count']} a step, {gigabytes(one['sent_bytes'])}{took}")
    if one["priced_bytes_per_s"]:
        parts.append(f"{rate_text(one['priced_bytes_per_s'])} priced")
    return f"{one['op']} over {one['level']}: {'; '.join(parts)}"
