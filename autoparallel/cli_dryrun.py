"""`dryrun`: what a strategy's lowered model holds and sends, beside what was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoparallel.cli_errors import DIFFERS, exits

if TYPE_CHECKING:
    from rich.console import Console

    from autoparallel.dryrun import DryRun, Pair, RankComparison


@exits
def dryrun(
    strategy: Annotated[
        Path, typer.Argument(metavar="STRATEGY.toml", help="A file that plan wrote.", show_default=False)
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="The model, where the file names a saved graph."),
    ] = None,
    step: Annotated[
        int,
        typer.Option(
            "--step", min=1, metavar="N", help="The step whose phase is lowered (default: the first)."
        ),
    ] = 1,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the answer as one JSON object on standard output.")
    ] = False,
) -> None:
    """Lower every distinct rank of a plan without memory or processes, and compare it with the prediction; where they
    differ the exit status is 4."""
    from autoparallel.cli_plan import print_json
    from autoparallel.cli_progress import stderr_console, working
    from autoparallel.dryrun import dry_run_answer, dry_run_file

    console = stderr_console()
    with working(console, f"lowering {strategy}"):
        found = dry_run_file(strategy, model, step)
    _print(console, found)
    if json_:
        print_json(dry_run_answer(found))
    if found.findings:
        raise typer.Exit(DIFFERS)


NOT_COMPILED = 'A dry run does not compile: peaks are those of eager kernels, beside what the same strategy is priced at with kernels = "eager".'


def _print(console: Console, found: DryRun) -> None:
    from rich.table import Table

    from autoparallel.labels import strategy_label
    from autoparallel.report.numbers import times

    devices = found.strategy.mesh.devices
    console.print(f"{found.model} on {times(devices, 'device')}", style="bold", markup=False)
    console.print(f"  strategy      {strategy_label(found.strategy)}", markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("pipeline rank", "", "lowered", "predicted", "difference"):
        table.add_column(column, justify="left" if column in ("pipeline rank", "") else "right")
    for rank in found.ranks:
        _rows(table, rank)
    console.print(table)
    if found.strategy.execution.kernels == "compiled":
        console.print(NOT_COMPILED, markup=False)
    for one in found.findings:
        console.print(f"error: {one.text}", markup=False, style="red")
    if not found.findings:
        console.print("What runs is what was priced.", markup=False)


def _rows(table: object, rank: RankComparison) -> None:
    from rich.table import Table

    from autoparallel.dryrun import Pair
    from autoparallel.report.numbers import gib, significant

    assert isinstance(table, Table)
    name = str(rank.rank)
    for what, pair in rank.held_bytes.items():
        words = "optimizer state" if what == "optimizer" else what
        shown = (gib(value / 2**30) for value in (pair.lowered, pair.predicted))
        table.add_row(name, words, *shown, _difference(pair))
        name = ""
    if rank.peak is not None:
        pair = Pair(lowered=rank.peak.bytes, predicted=rank.predicted_peak_bytes)
        shown = (gib(value / 2**30) for value in (pair.lowered, pair.predicted))
        where = rank.peak.module or "the model itself"
        words = f"peak, in {rank.peak.action} of {where}" if rank.peak.action else "peak: it holds nothing"
        table.add_row("", words, *shown, _difference(pair))
    if rank.compiled_peak_bytes is not None:
        table.add_row(
            "", "peak of compiled kernels", "", gib(rank.compiled_peak_bytes / 2**30), "not looked at"
        )
    if rank.gathered_bytes:
        table.add_row("", "gathered at the end of a forward pass", gib(rank.gathered_bytes / 2**30), "", "")
    for axis, pair in rank.sent_bytes.items():
        shown = (f"{significant(value / 1e9)} GB" for value in (pair.lowered, pair.predicted))
        table.add_row("", f"sent over {axis} in a step", *shown, _difference(pair))


def _difference(pair: Pair) -> str:
    if pair.lowered == pair.predicted:
        return "none"
    if not pair.predicted:
        return "not predicted"
    share = pair.lowered / pair.predicted - 1.0
    return f"{100 * share:+.1f} %" if abs(share) >= 0.0005 else "<0.1 %"
