"""From what a user names (a model, a cluster, a strategy file, options) to a `Problem`.

Cheap inputs are checked first: nobody waits for a capture to hear of a typo. `torch` is imported only where
the model is not a saved graph.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.costmodel.graph_json import graph_from_json, graph_hash
from autoparallel.errors import UserError
from autoparallel.labels import sample_word
from autoparallel.model_errors import in_the_models_words
from autoparallel.planner.expand.local import TENSOR_DTYPE
from autoparallel.planner.money import unpriced
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.strategy.file import (
    ProblemRecord,
    StrategyFile,
    apply_settings,
    merge_constraints,
    parse_strategy,
    read_strategy_file,
)
from autoparallel.planner.strategy.legal import constraint_problems
from autoparallel.planner.strategy.lengths import SEQ_LEN, phase_lengths, phases_of
from autoparallel.planner.strategy.stacks import OWN_STACK, STACK, told, with_stack
from autoparallel.planner.strategy.types import Execution
from autoparallel.profiles import Cluster, load_cluster
from autoparallel.profiles.hardware import Device
from autoparallel.profiles.record import cluster_hash, differing, recorded_hash
from autoparallel.runtime.capabilities.models import check_devices
from autoparallel.runtime.capabilities.table import limits
from autoparallel.runtime.limits import graph_limits, kernels_to_choose, refuser

UNLIMITED_BYTES = 2.0**60  # an exbibyte: more than any model trained, and far from overflowing an integer


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked, as typed."""

    model: str
    cluster: str
    strategy: Path | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    settings: Sequence[str] = ()
    model_args: Sequence[str] = ()
    allow_lossy: bool = False
    lossy: Sequence[str] = ()
    objective: str | None = None
    runnable: bool = False
    steps: int | None = None  # of the whole run


def files_of(request: Request) -> tuple[str, ...]:
    """The files that a request may name, besides the strategy: what must not be written over."""
    file, _, name = request.model.rpartition(":")  # FILE.py:NAME
    return (request.cluster, request.model, request.model.removeprefix("hf:"), *([file] if name else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A request whose files and options were read and agree with each other; the model is still to come."""

    request: Request
    cluster: Cluster
    constraints: Mapping[str, object]
    record: ProblemRecord | None
    seq_len: int | None
    model_args: Mapping[str, str]
    objective: Objective

    @property
    def is_saved_graph(self) -> bool:
        """Whether the model is a graph captured before: it is read without torch."""
        return self.request.model.endswith(".json") and not self.request.model.startswith("hf:")


def check_request(request: Request) -> Checked:
    """Read everything but the model. Raises UserError."""
    cluster = load_cluster(request.cluster)
    file = read_strategy_file(request.strategy) if request.strategy else None
    constraints: Mapping[str, object] = file.constraints if file else {}
    if request.global_batch is not None:
        given = parse_strategy({"batch": {"global": request.global_batch}}, name="--global-batch")
        constraints = merge_constraints(constraints, given.constraints, name="--global-batch:")
    constraints = apply_settings(constraints, request.settings)
    if request.runnable:
        constraints = {STACK: OWN_STACK, **constraints}
        constraints = merge_constraints(
            constraints, limits(with_stack(constraints), said=True), name="--runnable:"
        )
    record = file.problem if file else None
    if file and record:
        _check_record(file, record, request, cluster)
    seq_len = _seq_len(request, constraints, record)
    objective = _objective(request.objective or (record.objective if record else None) or Objective.TIME)
    if objective is Objective.COST:
        _check_prices(request.cluster, cluster)
    return Checked(
        request=request,
        cluster=cluster,
        constraints=constraints,
        record=record,
        seq_len=seq_len,
        model_args=parse_model_args(request.model_args, record),
        objective=objective,
    )


def _seq_len(request: Request, constraints: Mapping[str, object], record: ProblemRecord | None) -> int | None:
    """Tokens per sequence of the first step; None where nobody says."""
    planned = record.seq_len if record and record.seq_len != 1 else None  # 1: its samples are no sequences
    stated = constraints.get(SEQ_LEN)
    assert isinstance(stated, int | None)
    for other, where in ((request.seq_len, "--seq-len"), (planned, "[problem] seq_len =")):
        if stated is not None and other not in (None, stated):
            raise UserError(f"{SEQ_LEN} = {stated} contradicts {where} {other}; change one of them")
    return request.seq_len or stated or planned


def _objective(word: str) -> Objective:
    if word not in list(Objective):
        raise UserError(f"--objective {word}: use one of {', '.join(Objective)}")
    return Objective(word)


def _check_prices(spec: str, cluster: Cluster) -> None:
    """A cost without prices would be device-seconds, which nobody asked for."""
    if not (missing := unpriced(cluster)):
        return
    names = ", ".join(dict.fromkeys(missing))
    how = (
        f"add price_per_device_hour to its [[group]] of {names}"
        if Path(spec).is_file()
        else f'write a cluster file with a [[group]] (device = "{missing[0]}", nodes, devices_per_node, '
        "price_per_device_hour = 2.5) and give that as --cluster"
    )
    raise UserError(
        f"--objective cost: {spec} has no price for {names}; {how} (docs/clusters.md), or use --objective time"
    )


def _check_record(file: StrategyFile, record: ProblemRecord, request: Request, cluster: Cluster) -> None:
    """`[problem]` says what the file was planned for: another sequence length or cluster is refused."""
    remedy = "plan again, or remove [problem] from the file to use its other keys as constraints"
    if request.seq_len is not None and record.seq_len not in (None, request.seq_len):
        raise UserError(
            f"{file.path}: [problem] seq_len = {record.seq_len}, but --seq-len {request.seq_len} was given; "
            f"{remedy}"
        )
    if request.objective is not None and record.objective not in (None, request.objective):
        raise UserError(
            f'{file.path}: [problem] objective = "{record.objective}", but --objective {request.objective} was '
            f"given; {remedy}"
        )
    if record.cluster is not None:
        where = f"{file.path}: [problem] cluster"
        if recorded_hash(record.cluster, where) != cluster_hash(cluster):
            raise UserError(
                f"{where} ({record.cluster.get('name')}) is not the cluster {request.cluster}"
                f"{differing(record.cluster, cluster, where)}; {remedy}"
            )


def check_finite(option: str, value: float | None) -> None:
    """Raise UserError for `inf` and `nan`, which number parsers let through."""
    if value is not None and not math.isfinite(value):
        raise UserError(f"{option} {value}: must be a finite number")


def parse_model_args(given: Sequence[str], record: ProblemRecord | None = None) -> Mapping[str, str]:
    """`k=v` pairs of `--model-arg`; those of a strategy file where none are given."""
    result: dict[str, str] = {}
    for item in given:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UserError(f"--model-arg {item}: write KEY=VALUE")
        result[key] = value
    return result or dict(record.model_args if record else {})


def load_graph(checked: Checked, say: Callable[[str], None] = lambda _: None) -> ModelGraph:
    """Capture the model, or read a saved graph; checked against the strategy file's hash. Raises UserError. `say` is told
    what a capture does."""
    spec = checked.request.model
    graph = _read_graph(spec, checked) if checked.is_saved_graph else _capture(spec, checked, say)
    graph = _with_other_lengths(graph, checked, say)
    record = checked.record
    if record and record.graph_hash is not None and record.graph_hash != graph_hash(graph):
        raise UserError(
            f"{checked.request.strategy}: [problem] graph_hash does not match {spec}: the file was planned for "
            f"{record.model or 'another model'} (or another sequence length or version of it); plan again, or "
            "remove [problem] from the file to use its other keys as constraints"
        )
    return graph


def _with_other_lengths(graph: ModelGraph, checked: Checked, say: Callable[[str], None]) -> ModelGraph:
    """The graph with one for each length that phases change to, captured as well unless it was saved with them."""
    found = []
    for tokens, where in phase_lengths(phases_of(checked.constraints)).items():
        own = graph.of_length(tokens)
        if own is None and checked.is_saved_graph:
            raise UserError(
                f"{where}: {checked.request.model} was saved without it; save it again from the model with this strategy file: "
                "--strategy FILE --save-graph keeps a graph of every length"
            )
        if own is None:
            longer = replace(checked, seq_len=tokens, request=replace(checked.request, seq_len=tokens))
            try:
                own = _capture(checked.request.model, longer, say)
            except UserError as error:
                raise UserError(f"{where}: {error}") from error
        if own is not graph:
            found.append(own)
    return replace(graph, other_lengths=tuple(found))


def read_saved_graph(spec: str) -> ModelGraph:
    """The graph that `--save-graph` wrote. Raises UserError."""
    try:
        text = Path(spec).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{spec}: no such graph file; for a Hugging Face config write hf:{spec}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{spec}: cannot be read: {error}") from None
    try:
        return graph_from_json(text)
    except UserError as error:
        hint = f"; for a Hugging Face config write hf:{spec}" if '"model_type"' in text else ""
        raise UserError(f"{spec}: {error}{hint}") from None


def _read_graph(spec: str, checked: Checked) -> ModelGraph:
    graph = read_saved_graph(spec)
    if checked.seq_len is not None and checked.seq_len != graph.tokens_per_sample:
        raise UserError(
            f"{spec} was captured with a sequence length of {graph.tokens_per_sample}, not {checked.seq_len}; "
            f"leave out {_seq_len_source(checked)}, or save the graph again from the model with it"
        )
    if checked.request.model_args:
        raise UserError(f"--model-arg means nothing for the saved graph {spec}; leave it out")
    return graph


def _seq_len_source(checked: Checked) -> str:
    return (
        "--seq-len"
        if checked.request.seq_len is not None
        else f"[problem] seq_len of {checked.request.strategy}"
    )


def _capture(spec: str, checked: Checked, say: Callable[[str], None]) -> ModelGraph:
    from autoparallel.planner.capture import capture
    from autoparallel.planner.capture.load import load_model

    asked = checked.request.seq_len is not None
    say("building it, and what it is fed")
    with in_the_models_words(spec):
        loaded = load_model(spec, model_args=checked.model_args, seq_len=checked.seq_len, seq_len_asked=asked)
        taken = _taken_members(loaded.module, refuse=checked.request.runnable)
        dtype = computed_in(checked.constraints)
        graph = capture(loaded.module, loaded.example_inputs, name=loaded.name, dtype=dtype, say=say)
    if asked and graph.tokens_per_sample == 1 != checked.seq_len:
        raise UserError(
            f"--seq-len {checked.seq_len}: a sample of {loaded.name} is one {sample_word(graph)}, not a sequence; leave it out"
        )
    graph = replace(graph, warnings=(*loaded.warnings, *taken, *graph.warnings))
    gc.freeze()  # torch's million objects stay: the search need not look at them at every collection
    return graph


def _taken_members(module: Any, *, refuse: bool) -> tuple[str, ...]:
    """A warning where `auto_parallelize` and `dryrun` will refuse the module for names that they add; with `refuse` the UserError."""
    from autoparallel.runtime.lowering.members import check_members

    try:
        check_members(module)
    except UserError as error:
        if refuse:
            raise
        return (f"{error}; until then this plan is priced, and not run",)
    return ()


def computed_in(constraints: Mapping[str, object]) -> str:
    """torch's name of the dtype of activations: a model is captured in that, for what it casts it keeps as well."""
    dtype = constraints.get("execution.dtype", Execution().dtype)
    return TENSOR_DTYPE[str(dtype)]


def make_problem(checked: Checked, graph: ModelGraph) -> Problem:
    """The problem to plan. The global batch is one sequence per device unless told otherwise. Raises UserError."""
    constraints = checked.constraints
    if problems := constraint_problems(graph, checked.cluster, constraints, checked.request.lossy):
        where = f"{checked.request.strategy}: " if checked.request.strategy else ""
        raise UserError("\n".join(f"{where}{problem}" for problem in problems))
    if checked.request.runnable:
        check_devices(graph, checked.cluster.devices)
        dropped = {"execution.dropout": graph.dropout} if graph.dropout else {}
        constraints = {**graph_limits(graph), **dropped, **constraints}
    batch = constraints.get("batch.global", checked.cluster.devices)
    assert isinstance(batch, int)  # the strategy file's schema saw to it
    return Problem(
        graph=graph,
        cluster=checked.cluster,
        global_batch=batch,
        objective=checked.objective,
        constraints=constraints,
        execution=told(Execution(), constraints),
        allow_lossy=checked.request.allow_lossy or bool(checked.request.lossy),
        lossy=tuple(checked.request.lossy),
        refuses=refuser(graph, checked.cluster, said=True) if checked.request.runnable else None,
        kernels=kernels_to_choose(checked.constraints) if checked.request.runnable else {},
        steps=checked.request.steps,
    )


def roomy(checked: Checked) -> Checked:
    """The same request on devices whose memory never runs out: what `score` completes a strategy with when
    nothing fits."""
    groups = tuple(replace(group, device=_roomy(group.device)) for group in checked.cluster.groups)
    return replace(checked, cluster=replace(checked.cluster, groups=groups))


def _roomy(device: Device) -> Device:
    """A device and a host without end."""
    constants = dict(device.constants)
    if constants["host.memory_bytes"]:
        constants["host.memory_bytes"] = UNLIMITED_BYTES
    return replace(device, memory_bytes=UNLIMITED_BYTES, reserve_bytes=0.0, constants=constants)
