"""`report`, `export` and `profiles`: commands that show what is already there."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoparallel.cli_errors import exits

if TYPE_CHECKING:
    from rich.console import Console

    from autoparallel.costmodel.prediction import Span
    from autoparallel.profiles import Cluster, Device
    from autoparallel.profiles.stacks import Stack


@exits
def report(
    strategy: Annotated[
        Path,
        typer.Argument(
            metavar="STRATEGY.toml|RUN/",
            help="A file that plan wrote, or the folder of a run that Trainer records.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="REPORT.html", help="Where the page goes.")
    ],
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="TRACE.json", help="The timelines for Perfetto (ui.perfetto.dev), too."
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML page about a plan, or about how a run does against its plan."""
    from autoparallel.answer import read_timeline
    from autoparallel.cli_progress import stderr_console
    from autoparallel.planner.strategy.file import read_strategy_file
    from autoparallel.planner.strategy.write import check_writable, write_text
    from autoparallel.report.page import render_report
    from autoparallel.report.perfetto import trace as trace_of

    check_writable(output, read=[] if strategy.is_dir() else [strategy])
    if trace is not None:
        check_writable(trace, read=[output] if strategy.is_dir() else [output, strategy])
    if strategy.is_dir():
        page, timelines = _of_run(strategy)
    else:
        file = read_strategy_file(strategy)
        page = render_report(file)
        timelines = {"predicted": read_timeline(file.predicted.get("timeline", {}))}
    write_text(output, page)
    console = stderr_console()
    console.print(f"report written to {output}", markup=False)
    if trace is not None:
        write_text(trace, trace_of(timelines))
        console.print(f"timelines written to {trace}: open it in ui.perfetto.dev", markup=False)


def _of_run(folder: Path) -> tuple[str, dict[str, tuple[Span, ...]]]:
    """The page of a run, and its timelines by name."""
    from autoparallel.answer import read_timeline
    from autoparallel.report.run import measured_spans, predicted_timeline, render_run
    from autoparallel.runtime.monitor.record import read_record

    records = read_record(folder)
    found = {
        "predicted": read_timeline(predicted_timeline(records[-1])),
        "measured": measured_spans(records[-1]),
    }
    return render_run(str(folder), records), found


@exits
def profiles(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A device, cluster or software stack to show.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print as JSON on standard output.")] = False,
) -> None:
    """List the devices, clusters and software stacks that ship, or show one with the source of every figure."""
    from autoparallel.cli_plan import print_json
    from autoparallel.profiles import cluster_names, device_names
    from autoparallel.profiles.stacks import stack_names

    if name is None:
        if json_:
            print_json(
                {
                    "devices": list(device_names()),
                    "clusters": list(cluster_names()),
                    "stacks": list(stack_names()),
                }
            )
        else:
            _list()
        return
    thing = _named(name)
    if json_:
        print_json(_as_dict(thing))
    else:
        _show(thing)


def _named(name: str) -> Device | Cluster | Stack:
    from autoparallel.profiles import cluster_names, device_names, load_cluster, load_device
    from autoparallel.profiles.stacks import load_stack, stack_names

    if name in stack_names():
        return load_stack(name)
    if name in device_names():
        return load_device(name)
    if name in cluster_names() or ":" in name or Path(name).exists():
        return load_cluster(name)
    return load_device(name)  # raises, with the nearest name


def _as_dict(thing: Device | Cluster | Stack) -> dict[str, Any]:
    from autoparallel.profiles import Cluster, cluster_to_dict
    from autoparallel.profiles.convert import device_to_dict
    from autoparallel.profiles.stacks import Stack

    if isinstance(thing, Stack):
        return asdict(thing)
    return cluster_to_dict(thing) if isinstance(thing, Cluster) else device_to_dict(thing)


def _list() -> None:
    from rich.table import Table

    from autoparallel.cli_progress import stderr_console
    from autoparallel.profiles import cluster_names, device_names, load_cluster, load_device
    from autoparallel.profiles.stacks import load_stack, stack_names
    from autoparallel.report.numbers import bandwidth, gib, significant
    from autoparallel.report.words import cluster_words

    console = stderr_console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("device", "memory", "dense peak", "memory bandwidth", "usual box"):
        table.add_column(column)
    for name in device_names():
        device = load_device(name)
        dtype = (
            "bf16"
            if "bf16" in device.peak_flops
            else max(device.peak_flops, key=device.peak_flops.__getitem__)
        )
        table.add_row(
            name,
            gib(device.memory_bytes / 1024**3),
            f"{significant(device.peak_flops[dtype] / 1e12)} Tflop/s {dtype}",
            bandwidth(device.hbm_bytes_per_s),
            f"{device.devices_per_node} per node, {' + '.join(level.name for level in device.levels)}",
        )
    console.print(table)
    console.print()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("cluster", "devices"):
        table.add_column(column)
    for name in cluster_names():
        table.add_row(name, cluster_words(load_cluster(name)))
    console.print(table)
    console.print()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("stack", "software (execution.stack)"):
        table.add_column(column)
    for name in stack_names():
        table.add_row(name, load_stack(name).says)
    console.print(table)
    console.print("\nDEVICE:NODESxPER_NODE is a cluster too (h100-sxm:2x8).", markup=False)


def _show(thing: Device | Cluster | Stack) -> None:
    from rich.table import Table

    from autoparallel.cli_progress import stderr_console
    from autoparallel.profiles import Cluster
    from autoparallel.profiles.stacks import Stack
    from autoparallel.report.figures import cluster_figures, device_figures
    from autoparallel.report.words import cluster_words

    console = stderr_console()
    if isinstance(thing, Stack):
        _show_stack(console, thing)
        return
    if isinstance(thing, Cluster):
        title, figures = f"{thing.name}: {cluster_words(thing)}", cluster_figures(thing)
    else:
        title, figures = thing.name, device_figures(thing)
    console.print(title, style="bold", markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("figure", "value", "kind", "source"):
        table.add_column(column, overflow="fold", justify="right" if column == "value" else "left")
    for figure in figures:
        table.add_row(figure.name, figure.value, figure.kind, figure.source)
    console.print(table)
    if isinstance(thing, Cluster):
        console.print("Devices in full: autoparallel profiles DEVICE", markup=False)


def _show_stack(console: Console, stack: Stack) -> None:
    from rich.table import Table

    console.print(f"{stack.name}: {stack.says}", style="bold", markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("key", "value", "source"):
        table.add_column(column, overflow="fold")
    for section, found in (("execution", stack.execution), ("runs", stack.runs)):
        for key, said in found.items():
            value = ", ".join(map(str, said.value)) if isinstance(said.value, tuple) else str(said.value)
            unless = f" (not in {', '.join(said.unless_dtype)})" if said.unless_dtype else ""
            table.add_row(f"{section}.{key}", f"{value}{unless}", said.source)
    console.print(table)


@exits
def export(
    strategy: Annotated[
        Path, typer.Argument(metavar="STRATEGY.toml", help="A file that plan wrote.", show_default=False)
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="torchtitan|megatron|deepspeed|accelerate|torchrun|slurm|kubernetes|slurm-elastic|jobset|trainjob",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where it goes (default: standard output)."),
    ] = None,
    min_nodes: Annotated[
        int | None,
        typer.Option(
            "--min-nodes",
            min=1,
            metavar="N",
            help="jobset, trainjob: the run goes on with so few (default: all).",
        ),
    ] = None,
    near: Annotated[
        list[str] | None,
        typer.Option(
            "--near",
            metavar="LABEL",
            help="jobset, trainjob: nodes that share it are preferred; repeat it, nearest first (default: the zone).",
        ),
    ] = None,
) -> None:
    """Write a plan as another framework's configuration, or as a file that launches it."""
    from autoparallel.cli_progress import stderr_console
    from autoparallel.exports import Pods, plan_of
    from autoparallel.exports import export as exported
    from autoparallel.planner.strategy.file import read_strategy_file
    from autoparallel.planner.strategy.write import check_writable, write_text

    if output:
        check_writable(output, read=[strategy])
    pods = Pods(min_nodes=min_nodes, near=tuple(near or Pods().near))
    made = exported(plan_of(read_strategy_file(strategy), pods), to)
    console = stderr_console()
    if output:
        write_text(output, made.text)
        console.print(f"{to} written to {output}", markup=False)
    else:
        print(made.text, end="", flush=True)
    for item in made.unsaid:
        console.print(f"not said there, {to} has no setting for it: {item}", markup=False, style="yellow")
