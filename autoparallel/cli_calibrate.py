"""`autoparallel calibrate`: correct a device profile from measured step times."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoparallel.cli_errors import exits

if TYPE_CHECKING:
    from rich.console import Console

    from autoparallel.costmodel.calibrate import Calibration
    from autoparallel.measured import Measured
    from autoparallel.profiles.hardware import Device

FEWEST_ROWS = 1


@exits
def calibrate(
    profile: Annotated[
        str,
        typer.Argument(metavar="PROFILE.toml", help="The device profile: a file, or a shipped one's name."),
    ],
    measured: Annotated[
        Path,
        typer.Option(
            "--measured",
            metavar="ROWS.csv|RUN/",
            help="Columns strategy (a file) and step_time_s; model, cluster (NxM), seq_len where the file does not say. Or the folder of a run.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="PROFILE.toml", help="Where the corrected profile goes.")
    ],
) -> None:
    """Correct a profile from measured step times; say what they tell, what not, and which run to measure next."""
    from autoparallel.cli_progress import stderr_console, working
    from autoparallel.costmodel.calibrate import calibrate as fit
    from autoparallel.errors import UserError
    from autoparallel.measured import predictions, read_measured
    from autoparallel.planner.strategy.write import check_writable
    from autoparallel.profiles.load import load_device, own_constants
    from autoparallel.profiles.write import changed_keys, device_file, write_device

    check_writable(output, read=[measured])
    console = stderr_console()
    device = load_device(profile)
    runs = read_measured(measured, device, lambda text: console.print(text, markup=False))
    if len(runs) < FEWEST_ROWS:
        what = "starts with enough steps (four at least)" if measured.is_dir() else "rows"
        raise UserError(f"{measured}: {len(runs)} {what}; at least {FEWEST_ROWS} is needed")
    with working(console, f"fitting {len(runs)} measured steps"):
        result = fit(
            device, predictions(runs), [r.step_time_s for r in runs], source=f"calibrated on {measured.name}"
        )
    print_calibration(console, runs, result)
    with working(console, "what to measure next"):
        said = next_words(runs, result.device)
    console.print(said, markup=False)
    architecture, own = own_constants(profile)
    kept = {*(f"constants.{key}" for key in own), *changed_keys(device, result.device)}
    table = device_file(result.device, architecture, kept)
    write_device(output, table, f"`{profile}`, calibrated on {len(runs)} measured steps of {measured.name}.")
    console.print(f"profile written to {output}", markup=False)


def print_calibration(console: Console, runs: tuple[Measured, ...], result: Calibration) -> None:
    """What changed, and how the residuals fell."""
    from rich.table import Table

    from autoparallel.costmodel.calibrate import UNTOLD
    from autoparallel.report.numbers import times

    rows = Table("run", "measured", "before", "after", "held out", title="errors of the predicted step")
    for i, run in enumerate(runs):
        rows.add_row(
            run.name,
            f"{run.step_time_s:.4g} s",
            f"{100 * result.errors_before[i]:+.1f} %",
            f"{100 * result.errors_after[i]:+.1f} %",
            f"{100 * result.errors_held_out[i]:+.1f} %",
        )
    console.print(rows)
    parts = Table("part", "found", "known to", "was", title="what the steps tell")
    for one in result.learnt:
        word = "faster" if one.factor > 1 else "slower"
        moved = (
            "little"
            if one.left > UNTOLD
            else f"{100 * abs(one.factor - 1):.1f} % {word} than the profile said"
        )
        parts.add_row(one.says, moved, f"±{100 * one.after:.0f} %", f"±{100 * one.before:.0f} %")
    console.print(parts)
    if untold := [one.says for one in result.learnt if one.left > UNTOLD]:
        console.print(f"not told by these steps: {', '.join(untold)}", markup=False)
    means = [
        sum(map(abs, errors)) / len(errors)
        for errors in (result.errors_before, result.errors_after, result.errors_held_out)
    ]
    console.print(
        f"mean error: {100 * means[0]:.1f} % before, {100 * means[1]:.1f} % after; {100 * means[2]:.1f} % on rows held out of the fit "
        f"({times(len(runs), 'row')})",
        markup=False,
    )


def next_words(runs: tuple[Measured, ...], device: Device) -> str:
    """Which run near those that were measured would tell most about all of them."""
    from autoparallel.costmodel.calibrate import most_telling
    from autoparallel.measured import near, slopes_of

    candidates = near(runs, device)
    if not candidates:
        return "measure next: any run unlike these (another model, micro-batch or number of nodes)"
    wanted = slopes_of((*runs, *(run for _, run in candidates)), device)
    best, share = most_telling(device.posterior, wanted[len(runs) :], wanted)
    return f"measure next: {candidates[best][0]}; it would take {100 * share:.0f} % of what is left unknown of such runs"
