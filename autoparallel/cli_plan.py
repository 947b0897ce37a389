"""`plan` and `score`: one machine, two endings."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoparallel.cli_errors import exits
from autoparallel.cli_phases import checked_steps

if TYPE_CHECKING:
    from rich.console import Console

    from autoparallel.costmodel.graph import ModelGraph
    from autoparallel.costmodel.prediction import Prediction
    from autoparallel.inputs import Checked, Request
    from autoparallel.planner.expand.expander import Expander
    from autoparallel.planner.outcome import PlanResult
    from autoparallel.planner.strategy.types import Strategy

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="hf:PATH (a config.json or its folder), FILE.py:NAME, package.module:NAME, or a saved GRAPH.json.",
        show_default=False,
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="CLUSTER",
        help="A cluster file, a shipped cluster's name, or DEVICE:NODESxPER_NODE.",
    ),
]
PartialStrategy = Annotated[
    Path | None,
    typer.Option("--strategy", metavar="PARTIAL.toml", help="Keys that are in this file stay as they are."),
]
SeqLen = Annotated[
    int | None,
    typer.Option("--seq-len", min=1, metavar="N", help="Tokens per sequence (default: the model's own)."),
]
GlobalBatch = Annotated[
    int | None,
    typer.Option(
        "--global-batch", min=1, metavar="N", help="Sequences per optimizer step (default: one per device)."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Fix one strategy key, e.g. mesh.tp=8. Repeatable."),
]
ModelArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--model-arg", metavar="K=V", help="Passed to the callable that builds the model. Repeatable."
    ),
]
AllowLossy = Annotated[
    bool, typer.Option("--allow-lossy", help="Compression that changes numbers may be chosen.")
]
LossyMethods = Annotated[
    str | None,
    typer.Option(
        "--lossy-methods", metavar="METHOD,...",
        help="As --allow-lossy, of these methods: fp16, bf16, fp8, int8, int4, int2, sign, topk:RATIO, powersgd:RANK.",
    ),
]  # fmt: skip
ObjectiveOption = Annotated[
    str | None,
    typer.Option("--objective", metavar="time|cost|memory", help="What to minimise (default: time)."),
]
TimeLimit = Annotated[
    float | None,
    typer.Option("--time-limit", min=0.0, metavar="SECONDS", help="End the search after that long."),
]
JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print the answer as one JSON object on standard output.")
]
Runnable = Annotated[
    bool, typer.Option("--runnable", help="Choose only what auto_parallelize runs in this version.")
]
SaveGraph = Annotated[
    Path | None, typer.Option("--save-graph", metavar="GRAPH.json", help="Keep the captured model graph.")
]
Explain = Annotated[
    bool,
    typer.Option("--explain", help="Say why: what was rejected, and what each constraint costs."),
]
EmbedCluster = Annotated[
    bool,
    typer.Option(
        "--embed-cluster", help="Write every figure of the cluster into the strategy file, shipped ones too."
    ),
]


Within = Annotated[
    float,
    typer.Option(
        "--within", min=0.0, max=50.0, metavar="PERCENT",
        help="Of plans that are no more than so much slower than the optimum, choose the simplest; 0 is the optimum.",
    ),
]  # fmt: skip
WITHIN_PERCENT = 2.0  # as `planner.explain.choice.WITHIN`

SLOW_MODEL = (
    "still reading the model: every operator that its forward pass calls is noted, and a loop over the sequence in "
    "Python calls many; a shorter --seq-len is read sooner, and --save-graph keeps what was read"
)


Phases = Annotated[
    bool,
    typer.Option(
        "--phases",
        help="Plan the [[phase]] entries of the strategy file: where a change pays, itself counted.",
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        min=1,
        metavar="N",
        help="Optimizer steps of the whole run, for --phases; with --runnable compiling counts over them.",
    ),
]


@exits
def plan(
    model: Model,
    cluster: ClusterOption,
    strategy: PartialStrategy = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="STRATEGY.toml", help="Where the strategy goes.")
    ] = None,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    settings: Settings = None,
    model_args: ModelArgs = None,
    allow_lossy: AllowLossy = False,
    lossy_methods: LossyMethods = None,
    objective: ObjectiveOption = None,
    runnable: Runnable = False,
    time_limit: TimeLimit = None,
    json_: JsonFlag = False,
    save_graph: SaveGraph = None,
    explain: Explain = False,
    embed_cluster: EmbedCluster = False,
    within: Within = WITHIN_PERCENT,
    phases: Phases = False,
    steps: Steps = None,
) -> None:
    """Find the best strategy that fits, prove it, and write it; of nearly equal ones the simplest."""
    from autoparallel.inputs import Request, check_finite

    started = time.monotonic()
    check_finite("--time-limit", time_limit)
    request = Request(
        model=model,
        cluster=cluster,
        strategy=strategy,
        seq_len=seq_len,
        global_batch=global_batch,
        settings=settings or (),
        model_args=model_args or (),
        allow_lossy=allow_lossy,
        lossy=split_words(lossy_methods),
        objective=objective,
        runnable=runnable,
        steps=steps,
    )
    run_plan(
        request, output, save_graph, time_limit, json_=json_, explain=explain, started=started,
        embed_cluster=embed_cluster, within=within / 100.0, steps=checked_steps(steps, phases=phases, runnable=runnable),
    )  # fmt: skip


@exits
def score(
    model: Model,
    cluster: ClusterOption,
    strategy: Annotated[
        Path | None,
        typer.Option(
            "--strategy", metavar="FILE.toml", help="The strategy; keys that are missing are chosen."
        ),
    ] = None,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    settings: Settings = None,
    model_args: ModelArgs = None,
    allow_lossy: AllowLossy = False,
    objective: ObjectiveOption = None,
    time_limit: TimeLimit = None,
    json_: JsonFlag = False,
    save_graph: SaveGraph = None,
) -> None:
    """Price a strategy, whether it fits or not."""
    from autoparallel.inputs import Request, check_finite

    check_finite("--time-limit", time_limit)
    request = Request(
        model=model,
        cluster=cluster,
        strategy=strategy,
        seq_len=seq_len,
        global_batch=global_batch,
        settings=settings or (),
        model_args=model_args or (),
        allow_lossy=allow_lossy,
        objective=objective,
    )
    run_score(request, save_graph, time_limit, json_=json_)


def split_words(text: str | None) -> tuple[str, ...]:
    """The words of a list with commas."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def captured(request: Request, save_graph: Path | None, console: Console) -> tuple[Checked, ModelGraph]:
    """Check every input, capture the model, keep its graph if asked."""
    from autoparallel.cli_progress import hinted, working
    from autoparallel.costmodel.graph_json import graph_to_json
    from autoparallel.inputs import check_request, files_of
    from autoparallel.planner.strategy.write import check_writable, write_text
    from autoparallel.startup import begun_capture, import_planner

    if save_graph:
        check_writable(save_graph, read=files_of(request))
    checked = check_request(request)
    with begun_capture(checked) as begun:  # before there is a thread that shows how it goes
        import_planner()
        with working(console, f"reading {request.model}", begun.doing), hinted(console, SLOW_MODEL):
            graph = begun.wait()
    for warning in graph.warnings:
        console.print(f"warning: {warning}", markup=False, style="yellow")
    if save_graph:
        write_text(save_graph, graph_to_json(graph))
    return checked, graph


def search(
    checked: Checked,
    graph: ModelGraph,
    time_limit_s: float | None,
    console: Console,
    *,
    explain: bool = False,
    advise: bool = True,
    expander: Expander | None = None,
    within: float = WITHIN_PERCENT / 100.0,
) -> PlanResult:
    """Plan with the progress shown."""
    from autoparallel.cli_progress import progress_text, working
    from autoparallel.inputs import make_problem
    from autoparallel.planner.plan import plan as plan_problem
    from autoparallel.planner.side_by_side import usable_processes

    problem = make_problem(checked, graph)
    with working(console, "searching") as say:
        return plan_problem(
            problem,
            time_limit_s=time_limit_s,
            progress=lambda progress: say(progress_text(progress, problem.objective)),
            explain=explain,
            advise=advise,
            expander=expander,
            processes=usable_processes(),
            within=within,
        )


def run_plan(
    request: Request,
    output: Path | None,
    save_graph: Path | None,
    time_limit_s: float | None,
    *,
    json_: bool,
    explain: bool,
    started: float,
    embed_cluster: bool = False,
    within: float = WITHIN_PERCENT / 100.0,
    steps: int | None = None,
) -> None:
    """Capture, search, write, tell; `steps` of the whole run where phases are planned."""
    from autoparallel.cli_progress import stderr_console
    from autoparallel.inputs import files_of
    from autoparallel.planner.strategy.write import check_writable, write_strategy

    console = stderr_console()
    if output:
        check_writable(output, read=files_of(request))
    checked, graph = captured(request, save_graph, console)  # which imports what follows on the way
    from autoparallel.answer import plan_answer, predicted_table, problem_table, search_table, stamped
    from autoparallel.cli_phases import say_first_alone, search_phases
    from autoparallel.cli_words import print_explanation, print_plan
    from autoparallel.costmodel.graph_json import graph_hash
    from autoparallel.inputs import make_problem
    from autoparallel.planner.default_batch import better_batch
    from autoparallel.planner.expand.expander import Expander

    capture_s = time.monotonic() - started
    expander, stated = Expander(graph=graph, cluster=checked.cluster), make_problem(checked, graph)
    if steps is not None:
        result = search_phases(stated, steps, time_limit_s, console)
    else:
        result = search(
            checked, graph, time_limit_s, console, explain=explain, expander=expander, within=within
        )
        say_first_alone(console, checked.constraints)
    problem = problem_table(
        stated,
        model=request.model,
        model_args=checked.model_args,
        hash_=graph_hash(graph),
        embed_cluster=embed_cluster,
    )
    predicted = predicted_table(expander, result.strategy, result.prediction)
    given = "batch.global" in stated.constraints or time_limit_s is not None
    found = search_table(result, stated, None if given else better_batch(stated, result))
    if output:
        told = stamped(predicted, result.strategy, problem, found)
        write_strategy(output, result.strategy, problem, told, found)
    print_plan(console, checked.cluster, result.strategy, predicted, found)
    if explain:
        print_explanation(console, checked.cluster, result.strategy, predicted, found)
    kept = f"strategy written to {output}" if output else "(give -o FILE to keep the strategy)"
    console.print(kept, markup=False)
    if json_:
        seconds = {"capture": capture_s, "search": result.seconds, "total": time.monotonic() - started}
        print_json(plan_answer(result, predicted, found, seconds))


def run_score(request: Request, save_graph: Path | None, time_limit_s: float | None, *, json_: bool) -> None:
    """Capture, fill in what is missing, price, tell."""
    from autoparallel.cli_progress import stderr_console

    console = stderr_console()
    checked, graph = captured(request, save_graph, console)  # which imports what follows on the way
    from autoparallel.answer import predicted_table, score_answer
    from autoparallel.cli_words import print_score
    from autoparallel.planner.expand.expander import Expander

    expander = Expander(graph=graph, cluster=checked.cluster)
    strategy, prediction = scored(checked, expander, time_limit_s, console)
    predicted = predicted_table(expander, strategy, prediction)
    print_score(console, checked.cluster, strategy, predicted)
    if json_:
        print_json(score_answer(strategy, predicted))


def scored(
    checked: Checked, expander: Expander, time_limit_s: float | None, console: Console
) -> tuple[Strategy, Prediction]:
    """The strategy, completed where keys are missing, and its prediction, whether it fits or not."""
    from autoparallel.errors import UserError
    from autoparallel.inputs import make_problem, roomy
    from autoparallel.planner.outcome import InfeasiblePlan
    from autoparallel.planner.score import score as price
    from autoparallel.planner.strategy.file import missing_keys, strategy_from_constraints

    graph, cluster = expander.graph, checked.cluster
    constraints = {"batch.global": make_problem(checked, graph).global_batch, **checked.constraints}
    if not missing_keys(constraints):
        name = str(checked.request.strategy or "--set")
        strategy = strategy_from_constraints(constraints, name=name)
        try:
            return strategy, price(graph, cluster, strategy, expander)
        except UserError as error:
            raise UserError("\n".join(f"{name}: {line}" for line in str(error).splitlines())) from None
    try:
        result = search(checked, graph, time_limit_s, console, advise=False, expander=expander)
        return result.strategy, result.prediction
    except InfeasiblePlan:
        # Nothing fits: the best strategy if memory were no limit, priced on the real cluster.
        strategy = search(roomy(checked), graph, time_limit_s, console).strategy
        return strategy, price(graph, cluster, strategy, expander)


def print_json(answer: Mapping[str, Any]) -> None:
    """One object on standard output."""
    json.dump(answer, sys.stdout, indent=2)
    sys.stdout.write("\n")
    sys.stdout.flush()
