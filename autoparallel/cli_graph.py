"""`graph`: what was captured of a model, as a table, as code, as a page, as a drawing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoparallel.cli_errors import exits
from autoparallel.cli_plan import ModelArgs, SeqLen
from autoparallel.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from autoparallel.costmodel.graph import ModelGraph


@exits
def graph(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="hf:CONFIG, FILE.py:NAME, package.module:NAME, or a saved GRAPH.json.",
        ),
    ],
    code: Annotated[
        bool,
        typer.Option(
            "--code", help="Print forward and backward of one micro-batch as torch.fx code, every layer."
        ),
    ] = False,
    dot: Annotated[bool, typer.Option("--dot", help="Print the distinct blocks as Graphviz's DOT.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="PAGE.html", help="Write a page: shapes, FLOPs, bytes and saved activations."
        ),
    ] = None,
    seq_len: SeqLen = None,
    micro_batch: Annotated[
        int, typer.Option("--micro-batch", min=1, metavar="N", help="Samples that sizes are told for.")
    ] = 1,
    model_args: ModelArgs = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the totals of each block as JSON on standard output.")
    ] = False,
) -> None:
    """Show what is captured of a model: its blocks, or its training step as torch.fx code."""
    from autoparallel.cli_progress import stderr_console, working
    from autoparallel.inputs import parse_model_args
    from autoparallel.planner.strategy.write import check_writable

    if code + dot + json_ > 1:
        raise UserError("--code, --dot and --json each write to standard output: choose one")
    if html:
        check_writable(html, read=[Path(model.removeprefix("hf:"))])
    console = stderr_console()
    arguments = parse_model_args(model_args or ())
    if code:
        with working(console, f"tracing {model}"):
            text = _code(model, arguments, seq_len, micro_batch)
        print(text, end="")
        if html is None:
            return
    doing = ["building it, and what it is fed"]
    with working(console, f"reading {model}", lambda: doing[-1]):
        captured = _captured(model, arguments, seq_len, doing.append)
    _show(console, captured, micro_batch, html=html, dot=dot, json_=json_)


def _show(
    console: Console, captured: ModelGraph, micro_batch: int, *, html: Path | None, dot: bool, json_: bool
) -> None:
    from autoparallel.cli_plan import print_json
    from autoparallel.planner.strategy.write import write_text
    from autoparallel.report.graph import graph_dot, render_graph

    for warning in captured.warnings:
        console.print(f"warning: {warning}", markup=False)
    if html:
        write_text(html, render_graph(captured, micro_batch))
        console.print(f"page written to {html}", markup=False)
    if dot:
        print(graph_dot(captured, micro_batch), end="")
    elif json_:
        print_json(_answer(captured, micro_batch))
    elif html is None:
        _print(console, captured, micro_batch)


def _code(model: str, arguments: Any, seq_len: int | None, micro_batch: int) -> str:
    if _is_saved(model):
        raise UserError(f"{model}: a saved graph has no code any more; give the model itself")
    from autoparallel.planner.capture import trace
    from autoparallel.planner.capture.load import load_model
    from autoparallel.planner.capture.show import step_code

    loaded = load_model(model, model_args=arguments, seq_len=seq_len)
    return step_code(trace(loaded.module, loaded.example_inputs, micro_batch=micro_batch))


def _captured(model: str, arguments: Any, seq_len: int | None, say: Callable[[str], None]) -> ModelGraph:
    if _is_saved(model):
        from autoparallel.inputs import read_saved_graph

        if seq_len is not None or arguments:
            raise UserError(f"{model} is a saved graph: --seq-len and --model-arg mean nothing for it")
        return read_saved_graph(model)
    from autoparallel.planner.capture import capture
    from autoparallel.planner.capture.load import load_model

    loaded = load_model(model, model_args=arguments, seq_len=seq_len)
    captured = capture(loaded.module, loaded.example_inputs, name=loaded.name, say=say)
    gc.freeze()  # what stays until the end need not be looked at again
    return replace(captured, warnings=(*loaded.warnings, *captured.warnings))


def _is_saved(model: str) -> bool:
    return model.endswith(".json") and not model.startswith("hf:")


def _answer(captured: ModelGraph, micro_batch: int) -> dict[str, Any]:
    """What `--json` prints: the model, and for each distinct block what one of it does."""
    from dataclasses import asdict

    from autoparallel.costmodel.graph_json import graph_hash
    from autoparallel.report.graph import block_rows, total_work

    rows = block_rows(captured, micro_batch)
    return {
        "model": {"name": captured.name, "parameters": captured.parameter_count, "graph_hash": graph_hash(captured)},
        "micro_batch": micro_batch,
        "tokens_per_sample": captured.tokens_per_sample,
        "total": asdict(total_work(rows)),
        "blocks": [
            {
                "name": row.block.name, "where": row.where, "times": row.times,
                "operators": len(row.block.operators), "parameters": row.parameters, **asdict(row.work),
            }
            for row in rows
        ],
    }  # fmt: skip


def _print(console: Console, captured: ModelGraph, micro_batch: int) -> None:
    from rich.table import Table

    from autoparallel.report.graph import block_rows, bytes_words, flops_words, total_work
    from autoparallel.report.numbers import count

    rows = block_rows(captured, micro_batch)
    tokens = f", {captured.tokens_per_sample:,} tokens a sample" if captured.tokens_per_sample > 1 else ""
    title = (
        f"{captured.name}: {count(captured.parameter_count)} parameters; micro-batch {micro_batch}{tokens}"
    )
    console.print(title, style="bold", markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("block", "where"):
        table.add_column(column, overflow="fold")
    for column in ("times", "operators", "parameters", "forward", "backward", "moved", "saved"):
        table.add_column(column, justify="right")
    for row in rows:
        work = row.work
        table.add_row(
            row.block.name, row.where, f"{row.times:,}", str(len(row.block.operators)), count(row.parameters),
            flops_words(work.forward_flops), flops_words(work.backward_flops),
            bytes_words(work.moved_bytes), bytes_words(work.saved_bytes),
        )  # fmt: skip
    work = total_work(rows)
    table.add_row(
        "all", "", "", "", count(captured.parameter_count), flops_words(work.forward_flops),
        flops_words(work.backward_flops), bytes_words(work.moved_bytes), bytes_words(work.saved_bytes),
        style="bold",
    )  # fmt: skip
    console.print(table)
