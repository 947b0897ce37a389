"""The command line. Starts without torch: every command imports what it needs when it runs."""

from __future__ import annotations

import os
import sys

import typer

from autoparallel.cli_calibrate import calibrate
from autoparallel.cli_dryrun import dryrun
from autoparallel.cli_errors import INTERRUPTED
from autoparallel.cli_graph import graph
from autoparallel.cli_plan import plan, score
from autoparallel.cli_profile import profile
from autoparallel.cli_replan import replan
from autoparallel.cli_run import run
from autoparallel.cli_show import export, profiles, report
from autoparallel.cli_watch import watch
from autoparallel.cli_whatif import whatif

app = typer.Typer(
    name="autoparallel",
    help="Plan how to train a PyTorch model on a cluster, prove the plan under its cost model, and show why.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)
app.command(
    no_args_is_help=True, context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False}
)(run)
for command in (
    plan,
    score,
    whatif,
    report,
    dryrun,
    export,
    profile,
    calibrate,
    profiles,
    graph,
    watch,
    replan,
):
    app.command(no_args_is_help=command is not profiles)(command)


def _version(wanted: bool) -> None:
    if wanted:
        from autoparallel import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _global(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version."
    ),
) -> None:
    pass


def main() -> None:
    """Entry point of the `autoparallel` script."""
    try:
        app()
    except KeyboardInterrupt:  # before or after a command; inside one, the command says how it ended
        print("interrupted", file=sys.stderr)
        _leave(INTERRUPTED)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        _leave(ended.code or 0)


def _leave(status: int) -> None:
    """End the process. Tearing torch and transformers down takes a second in which nothing more happens."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        sys.exit(status)  # groups are left first (runtime/ranks/leaving.py)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # the reader has gone: `autoparallel profiles | head`
        status = status or 1
    os._exit(status)
