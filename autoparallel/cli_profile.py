"""`autoparallel profile`: measure this machine and write its device profile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoparallel.cli_errors import exits

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from autoparallel.costmodel.fit_collectives import OverlapSample
    from autoparallel.profiles.hardware import Device

# More of the cores than this wanted by others is busy, and more than this of the time in turn is disturbed. Kind: formula: what
# one background process of a desktop takes, and twice the scatter of measured times.
BUSY, DISTURBED = 0.25, 1.1
CPU_BASE = "cpu-gloo"
FALLBACK = "a100-sxm-80gb"  # of accelerators that no shipped profile is for: their constants until measured


@exits
def profile(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="PROFILE.toml", help="Where the profile goes.")
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions: half a minute.")] = False,
    name: Annotated[
        str | None, typer.Option("--name", help="The device's name (default: the file's).")
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            metavar="DEVICE",
            help="A shipped profile or a file: what is not measured is taken from it (default: by the hardware's name).",
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option("--threads", min=1, help="Threads that a process computes with, on a CPU.")
    ] = 1,
    kernels: Annotated[
        Path | None,
        typer.Option(
            "--kernels",
            metavar="TABLE.csv",
            help="Measure nothing: make the device of this table of kernels.",
        ),
    ] = None,
    save_kernels: Annotated[
        Path | None,
        typer.Option("--save-kernels", metavar="TABLE.csv", help="Write what was measured as such a table."),
    ] = None,
) -> None:
    """Measure this machine: kernels, the optimizer and, under torchrun, collectives.

    The written file is a device: plan for it with --cluster PROFILE.toml:NODESxPER_NODE.
    """
    from autoparallel.cli_progress import stderr_console
    from autoparallel.errors import UserError
    from autoparallel.planner.strategy.write import check_writable

    check_writable(output, read=[kernels] if kernels else [])
    console = stderr_console()
    if kernels is None:
        if save_kernels:
            check_writable(save_kernels)
        run_profile(
            output, name or output.stem, like,
            quick=quick, threads=threads, console=console, save_kernels=save_kernels,
        )  # fmt: skip
    elif save_kernels:
        raise UserError(
            "--save-kernels writes what is measured, and --kernels measures nothing; leave one out"
        )
    else:
        run_table(kernels, output, name or output.stem, like, console=console)


def run_table(kernels: Path, output: Path, name: str, like: str | None, *, console: Console) -> None:
    """A device of a table of measured kernels."""
    from autoparallel.costmodel.fit_table import fit_table
    from autoparallel.costmodel.kernel_table import read_kernel_table
    from autoparallel.errors import UserError
    from autoparallel.profiles.likest import device_of_hardware
    from autoparallel.profiles.load import load_device

    rows = read_kernel_table(kernels)
    gpus = sorted({row.gpu for row in rows})
    if len(gpus) > 1:
        raise UserError(f"{kernels}: kernels of {', '.join(gpus)}; a device is one of them: split the table")
    base_name = like or device_of_hardware(gpus[0])
    if base_name is None:
        raise UserError(
            f"{kernels}: no shipped profile is for `{gpus[0]}`; say with --like DEVICE which is nearest, or give a device "
            "file with its memory, peaks and box"
        )
    base = load_device(base_name)
    device = fit_table(base, rows, source=f"{kernels.name}, kernels of {gpus[0] or base_name}")
    said = f"Made by `autoparallel profile --kernels {kernels.name}`, on top of `{base_name}`."
    changed = write_profile(output, base_name, named(device, name), said)
    print_profile(console, base, device, changed)
    console.print(
        f"profile written to {output}; `autoparallel calibrate` corrects it on measured steps", markup=False
    )


def write_profile(output: Path, base_name: str, device: Device, said: str) -> tuple[str, ...]:
    """The device as a file of what differs from the base or is the base's own; the keys that differ."""
    from autoparallel.profiles.load import load_device, own_constants
    from autoparallel.profiles.write import changed_keys, device_file, write_device

    architecture, own = own_constants(base_name)
    changed = changed_keys(load_device(base_name), device)
    table = device_file(device, architecture, {*changed, *(f"constants.{key}" for key in own)})
    write_device(output, table, said)
    return changed


def run_profile(
    output: Path,
    name: str,
    like: str | None,
    *,
    quick: bool,
    threads: int,
    console: Console,
    save_kernels: Path | None = None,
) -> None:
    """Measure, fit, write, tell. Under torchrun every rank calls it; rank 0 writes."""
    from autoparallel.costmodel.fit_collectives import Machine, fit_collectives, fit_overlap
    from autoparallel.costmodel.fit_device import fit_device
    from autoparallel.costmodel.kernel_table import kernel_table
    from autoparallel.planner.strategy.write import write_text
    from autoparallel.profiles.load import load_device
    from autoparallel.runtime.profiling import measure_machine
    from autoparallel.runtime.profiling.collectives import measure_collectives
    from autoparallel.runtime.profiling.overlap import measure_overlap
    from autoparallel.runtime.profiling.start import processes
    from autoparallel.runtime.profiling.timing import on_accelerator, use_threads

    use_threads(threads)
    with processes() as world:
        base_name = like or base_of_hardware()
        base = load_device(base_name)
        device = base
        if world.rank == 0:
            with bar(console, "kernels") as tell:
                found = measure_machine(quick=quick, tell=tell)
            by = f"{found.threads} thread{'s' * (found.threads > 1)} of " if found.threads else ""
            source = f"autoparallel profile on {by}{found.hardware}, {found.software}"
            warn(console, busy_words(found.load, os.cpu_count() or 1))
            device = fit_device(base, found.samples, source=source, own_peaks=not on_accelerator())
            if save_kernels:
                write_text(save_kernels, kernel_table(found.samples, found.hardware, source))
        world.wait()
        if world.size > 1:
            silent = world.rank > 0
            with bar(console, "collectives", silent=silent) as tell:
                collectives = measure_collectives(world.per_node, quick=quick, tell=tell)
                # Processes that share cores take from each other by a rule of their own (`shared_device`).
                own_cores = not base.cores or world.per_node <= (os.cpu_count() or base.cores)
                overlap = measure_overlap(quick=quick) if own_cores else None
            machine = Machine(nodes=world.size // world.per_node, per_node=world.per_node)
        if world.rank > 0:
            return
        if world.size > 1:
            where = f"{source}, {world.backend} over {world.size} processes"
            device = fit_collectives(device, collectives, machine, source=where)
            if overlap:
                warn(console, disturbed_words(overlap))
                device = fit_overlap(device, overlap, source=where)
    said = f"Written by `autoparallel profile`, on top of `{base_name}`.\n{source}."
    changed = write_profile(output, base_name, named(device, name), said)
    print_profile(console, base, device, changed)
    console.print(
        f"profile written to {output}; plan with --cluster {output}:1x{max(world.size, 1)}", markup=False
    )


def busy_words(load: float, cores: int) -> str:
    """What other work on the machine means for what was measured; "" where there is next to none."""
    if load <= BUSY * cores:
        return ""
    return (
        f"warning: this machine was busy before anything was measured (load {load:.1f} on {cores} cores): overlap, collectives "
        "and launches come out too slow; profile it again when it is idle"
    )


def disturbed_words(overlap: OverlapSample) -> str:
    """Computing and communicating at once never takes longer than one after the other, but for other work."""
    in_turn_s = overlap.compute_s + overlap.collective_s
    if overlap.both_s <= DISTURBED * in_turn_s:
        return ""
    return (
        f"warning: computing and communicating at once took {overlap.both_s / in_turn_s:.2f} times as long as one after the "
        "other: other work was in the way, and overlap.comm_slowdown is too large; profile again when the machine is idle"
    )


def warn(console: Console, words: str) -> None:
    """Words in yellow, where there are any."""
    if words:
        console.print(words, markup=False, style="yellow")


def named(device: Device, name: str) -> Device:
    """The device under another name, with the cores of this machine where it had cores."""
    from dataclasses import replace

    return replace(device, name=name, cores=(os.cpu_count() or device.cores) if device.cores else 0)


def base_of_hardware() -> str:
    """The shipped profile of this machine's devices, or the one to start from where there is none."""
    from autoparallel.profiles.likest import device_of_hardware
    from autoparallel.runtime.profiling.measure import hardware_name
    from autoparallel.runtime.profiling.timing import on_accelerator

    if not on_accelerator():
        return CPU_BASE
    return device_of_hardware(hardware_name()) or FALLBACK


def bar(console: Console, title: str, *, silent: bool = False) -> _Bar:
    """A progress bar on standard error."""
    return _Bar(console, title, silent)


class _Bar:
    """Shows how far measuring is; the `tell` that it yields takes (done, of, what is next)."""

    def __init__(self, console: Console, title: str, silent: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.fields[title]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self.progress = Progress(*columns, console=console, disable=silent)
        self.task = self.progress.add_task("", total=None, title=title)

    def __enter__(self) -> Callable[[int, int, str], None]:
        self.progress.start()
        return self._tell

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def _tell(self, done: int, of: int, what: str) -> None:
        self.progress.update(self.task, completed=done, total=of, description=what)


def print_profile(console: Console, base: Device, device: Device, changed: tuple[str, ...]) -> None:
    """What was fitted and how well, as two tables."""
    from rich.table import Table

    fits = Table("measured", "samples", "mean error", "nine of ten within", title="how well the fit says it")
    for family, r in device.residuals.items():
        fits.add_row(
            family,
            str(r.samples),
            f"{100 * r.mean_absolute_error:.1f} %",
            f"{100 * r.p90_absolute_error:.1f} %",
        )
    console.print(fits)
    values = Table("constant", "before", "now", title="what changed")
    for key in changed:
        constant = key.removeprefix("constants.")
        if constant in device.constants:
            values.add_row(constant, f"{base.constants[constant]:.4g}", f"{device.constants[constant]:.4g}")
    if values.row_count:
        console.print(values)
