"""`autoparallel replan`: whether another plan would now be better for a run, and have the run take it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoparallel.cli_errors import exits
from autoparallel.cli_plan import JsonFlag


@exits
def replan(
    folder: Annotated[Path, typer.Argument(metavar="RUN/", help="The folder of a run that Trainer records.")],
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="CLUSTER",
            help="What the run is on, by other figures (default: by its record).",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, metavar="N", help="The step that the run ends after.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="STRATEGY.toml", help="Where the plan goes.")
    ] = None,
    take: Annotated[
        bool,
        typer.Option(
            "--take", help="Where it is better: the run saves, and goes on under it when it is started again."
        ),
    ] = False,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", min=0.0, metavar="SECONDS", help="For the search.")
    ] = None,
    json_: JsonFlag = False,
) -> None:
    """Plan again for a run, with a profile that its record corrects; say whether to switch, and after how many steps that pays."""
    from autoparallel.cli_plan import print_json
    from autoparallel.cli_progress import stderr_console, working
    from autoparallel.inputs import check_finite
    from autoparallel.planner.strategy.write import check_writable, write_strategy
    from autoparallel.proposal import propose
    from autoparallel.replan import NEXT

    check_finite("--time-limit", time_limit)
    if output:
        check_writable(output, read=[])
    console = stderr_console()
    with working(console, "planning again"):
        found = propose(
            folder,
            cluster,
            until=steps,
            time_limit_s=time_limit,
            say=lambda text: console.print(text, markup=False),
        )
    console.print(str(found), markup=False)
    taken = folder / NEXT if take and found.better else None
    for path in filter(None, (output, taken)):
        write_strategy(path, found.strategy, {}, {}, {})
        console.print(f"strategy written to {path}", markup=False)
    if json_:
        print_json(found.table())
