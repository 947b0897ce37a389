"""`whatif`: plan many cases, compare them on one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoparallel.cli_errors import NOTHING_FITS, exits
from autoparallel.cli_plan import (
    AllowLossy,
    GlobalBatch,
    JsonFlag,
    LossyMethods,
    Model,
    ModelArgs,
    ObjectiveOption,
    PartialStrategy,
    SeqLen,
    Settings,
    print_json,
    split_words,
)

if TYPE_CHECKING:
    from autoparallel.inputs import Request


Clusters = Annotated[
    list[str] | None,
    typer.Option(
        "--cluster", metavar="CLUSTER", help="A cluster to plan on. Repeatable. Of a run: its record's."
    ),
]
Without = Annotated[
    int | None,
    typer.Option(
        "--without", min=0, metavar="RANK", help="MODEL is the folder of a run: what if it had not this rank?"
    ),
]


@exits
def whatif(
    model: Model,
    clusters: Clusters = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="REPORT.html", help="Where the page goes.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary", metavar="KEY=V1,V2,…", help="A strategy key, seq_len or global_batch. Repeatable."
        ),
    ] = None,
    strategy: PartialStrategy = None,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    settings: Settings = None,
    model_args: ModelArgs = None,
    allow_lossy: AllowLossy = False,
    lossy_methods: LossyMethods = None,
    objective: ObjectiveOption = None,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", min=0.0, metavar="SECONDS", help="For each case.")
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(
            "--tokens", min=1, metavar="N", help="Tokens to train on (1e12): how long, at what price."
        ),
    ] = None,
    without: Without = None,
    json_: JsonFlag = False,
) -> None:
    """Plan for several clusters or values of a key; compare. Or, for a run, what leaving a rank out would give."""
    from autoparallel.errors import UserError
    from autoparallel.inputs import Request, check_finite

    if without is not None:
        _tell_without(model, without, clusters or (), time_limit, json_=json_)
        return
    if not clusters:
        raise UserError(
            "--cluster is missing: name one to plan on (`autoparallel profiles` lists them), or several"
        )
    check_finite("--tokens", tokens)
    check_finite("--time-limit", time_limit)
    base = Request(
        model=model,
        cluster=clusters[0],
        strategy=strategy,
        seq_len=seq_len,
        global_batch=global_batch,
        settings=settings or (),
        model_args=model_args or (),
        allow_lossy=allow_lossy,
        lossy=split_words(lossy_methods),
        objective=objective,
    )
    run_whatif(base, clusters, vary or (), output, time_limit, tokens=tokens, json_=json_)


def run_whatif(
    base: Request,
    clusters: Sequence[str],
    vary: Sequence[str],
    output: Path | None,
    time_limit_s: float | None,
    *,
    tokens: float | None = None,
    json_: bool,
) -> None:
    """Plan every case, compare, tell."""
    from autoparallel.answer import outcome_table
    from autoparallel.cli_progress import stderr_console, working
    from autoparallel.cli_words import print_outcomes
    from autoparallel.inputs import files_of
    from autoparallel.planner.strategy.write import check_writable, write_text
    from autoparallel.report.compare import render_comparison
    from autoparallel.whatif import cases, run_cases

    console = stderr_console()
    if output:
        check_writable(output, read=[*files_of(base), *clusters])
    found = cases(base, clusters, vary)
    with working(console, "planning") as say:
        outcomes = run_cases(found, time_limit_s=time_limit_s, say=say)
    rows = [outcome_table(outcome, tokens) for outcome in outcomes]
    print_outcomes(console, rows)
    if output:
        write_text(output, render_comparison(base.model, rows, tokens))
        console.print(f"comparison written to {output}", markup=False)
    if json_:
        print_json({"model": base.model, "cases": rows})
    if not any(row["feasible"] for row in rows):
        raise typer.Exit(NOTHING_FITS)


def _tell_without(
    folder: str, rank: int, clusters: Sequence[str], time_limit_s: float | None, *, json_: bool
) -> None:
    """What leaving a rank out of a run would give."""
    from autoparallel.cli_progress import stderr_console
    from autoparallel.errors import UserError
    from autoparallel.without import without

    if len(clusters) > 1:
        raise UserError("--without is about one run on one cluster: give --cluster once, or leave it out")
    console, named = stderr_console(), clusters[0] if clusters else None
    found = without(
        Path(folder),
        rank,
        named,
        time_limit_s=time_limit_s,
        say=lambda text: console.print(text, markup=False),
    )
    console.print(str(found), markup=False)
    if json_:
        print_json(found.table())
