"""`capture`: from a module and example inputs to its `ModelGraph`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from autoparallel.costmodel.collecting import without_collection
from autoparallel.costmodel.graph import ModelGraph, OpKind
from autoparallel.planner.capture.build import main_dtype
from autoparallel.planner.capture.dropout import largest_dropout
from autoparallel.planner.capture.errors import ModelError, TraceError, UntraceableError
from autoparallel.planner.capture.fold import FoldError, FoldPlan, fold_plan
from autoparallel.planner.capture.leaf import forget_leaves
from autoparallel.planner.capture.links import repeated_paths
from autoparallel.planner.capture.loops import loop_warnings
from autoparallel.planner.capture.on_meta import in_dtype, on_meta
from autoparallel.planner.capture.passes import check_fold, lowered
from autoparallel.planner.capture.rules import Rules
from autoparallel.planner.capture.step import trace_step
from autoparallel.planner.capture.traced import checked_inputs, with_leaves

# Two points give an affine function, the third checks it; 1 is left out because code treats it apart.
MICRO_BATCHES = (2, 3, 5)
POWERS = (2, 4, 8)  # for code that refuses those
# A model of which no more modules are stood in for than twice those that run is folded at first sight or not at all: to trace
# it whole takes no longer than to find out why. Kind: chosen.
_SHALLOW = 2
_NAMED = 3  # parts of a model that a warning names


@without_collection()
def capture(
    module: torch.nn.Module,
    example_inputs: Any,
    *,
    name: str,
    fold: bool = True,
    dtype: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> ModelGraph:
    """The graph of one training step of `module`.

    `example_inputs` are a tensor, a tuple of positional or a mapping of keyword arguments; dim 0 of the tensors
    that share the first tensor's is the batch. Nothing is computed: parameters and inputs are replaced by meta
    tensors while the module's code runs, and put back afterwards. The module's training mode is respected.
    With `fold` equal modules are traced as often as the proof needs that they are equal; without it all are. With `dtype`
    (torch's name) the module runs as if most of its parameters, and inputs like them, were of that: code that computes in
    another one of its own accord casts then, and keeps what it has cast. A module that does not run so runs as it is.
    `say` is told what is done, often.
    """
    forget_leaves()
    inputs = checked_inputs(module, example_inputs, name)
    own, wanted = getattr(torch, main_dtype(module)), getattr(torch, dtype) if dtype else None
    if wanted in (None, own):
        return _graph_of(module, inputs, name, fold=fold, dtype=None, say=say)
    found: ModelGraph | None = None
    try:
        found = _graph_of(module, in_dtype(inputs, own, wanted), name, fold=fold, dtype=wanted, say=say)
        if not _leaves(found):
            return found
    except ModelError:
        pass
    as_it_is = _graph_of(module, inputs, name, fold=fold, dtype=None, say=say)
    if found is not None and _leaves(found) <= _leaves(as_it_is):
        return found
    return replace(as_it_is, warnings=(*as_it_is.warnings, _other_dtype_warning(as_it_is.dtype, dtype)))


def _other_dtype_warning(own: str, asked: str | None) -> str:
    return (
        f"its code does not run in {asked}, in which it is to be computed: it was captured in {own}; have it cast what it makes "
        f"itself (tables, masks, embeddings of a time) to the dtype of its parameters, or set execution.dtype to that"
    )


def _leaves(graph: ModelGraph) -> int:
    return sum(op.kind is OpKind.LEAF for block in graph.blocks for op in block.operators)


def _graph_of(
    module: torch.nn.Module,
    inputs: Any,
    name: str,
    *,
    fold: bool,
    dtype: torch.dtype | None,
    say: Callable[[str], None],
) -> ModelGraph:
    take = partial(_captured, module, inputs, name, Rules(), say)
    with on_meta(module, dtype):
        graph, untraced = with_leaves(module, partial(_folded, module, take) if fold else take)
    found = (
        *_leaf_warnings(untraced.leaves),
        *_share_warnings(untraced.shares),
        *loop_warnings(graph),
        *_idle_warnings(graph),
        *_untrained_warnings(graph),
    )
    return replace(graph, warnings=(*graph.warnings, *found), dropout=largest_dropout(module))


def _folded(module: torch.nn.Module, take: Callable[..., ModelGraph], plan: FoldPlan) -> ModelGraph:
    """The graph with as little traced as can be proved to be enough."""
    # A leaf is priced whole, with what is in it.
    within = tuple(f"{leaf}." if leaf else "" for leaf in plan.leaves)
    paths = [path for path in repeated_paths(module) if not path.startswith(within)]
    alike, last_differs, last_apart = (
        replace(fold_plan(module, paths, **how), leaves=plan.leaves, shares=plan.shares)
        for how in ({}, {"last_differs": True}, {"last_apart": True})
    )
    if len(alike.stood_in) <= _SHALLOW * len(alike.run):
        attempts = [(alike, True)] if alike.stood_in else []
    else:
        attempts = _attempts(alike, last_differs, last_apart)
    for attempt, doubted in attempts:
        try:
            return take(attempt, doubted=doubted)
        except FoldError:
            continue
        except TraceError as error:
            if not _holds_folded(error, attempt):
                raise
            break
    return take(plan)


def _holds_folded(error: TraceError, plan: FoldPlan) -> bool:
    """Whether code failed that runs around modules that were stood in for, which leave nothing in their attributes (a loss
    that is added up after the last layer, say): it is given what all of them make."""
    within = f"{error.path}." if error.path else ""
    return any(path.startswith(within) for path in plan.stood_in) and not isinstance(
        error.__cause__, UntraceableError
    )


def _attempts(alike: FoldPlan, last_differs: FoldPlan, last_apart: FoldPlan) -> list[tuple[FoldPlan, bool]]:
    """The plans of a deep model that are tried before all of it is traced, and whether each is doubted."""
    # Of an encoder and a decoder the last blocks are likely to differ: that is found out before all is traced.
    likely = len({second.rpartition(".")[0] for second, _ in alike.pairs}) > 1
    return [
        (alike, likely),
        (last_differs, False),
        (last_apart, True),
        *([(alike, False)] if likely else []),
        (replace(alike, told=True), True),
        (replace(last_differs, told=True), False),
    ]


def _captured(
    module: torch.nn.Module,
    inputs: Any,
    name: str,
    rules: Rules,
    say: Callable[[str], None],
    plan: FoldPlan,
    *,
    doubted: bool = False,
) -> ModelGraph:
    """The graph of the module folded by `plan`; where that is `doubted`, it is checked at the first micro-batch."""
    graphs = [trace_step(module, inputs, MICRO_BATCHES[0], plan, say).graph]
    if doubted:
        check_fold(graphs[0], module, plan)
    try:
        graphs += [trace_step(module, inputs, batch, plan, say).graph for batch in MICRO_BATCHES[1:]]
    except TraceError as error:
        if isinstance(error.__cause__, UntraceableError | NotImplementedError):
            raise
        try:  # code that takes some numbers of samples only
            graphs += [trace_step(module, inputs, batch, plan, say).graph for batch in POWERS[1:]]
        except TraceError:
            raise error from error.__cause__
    return lowered(graphs, module, name=name, plan=plan, rules=rules, say=say)


def _leaf_warnings(leaves: Mapping[str, str]) -> tuple[str, ...]:
    """One warning for each reason and place, the same place in every layer counted once."""
    places: dict[str, list[str]] = {}
    for path, reason in leaves.items():
        place = ".".join("*" if part.isdigit() else part for part in path.split("."))
        places.setdefault(reason, [])
        if place not in places[reason]:
            places[reason].append(place)
    return tuple(
        f"{', '.join(p or 'the whole model' for p in where)} cannot be traced ({reason}): priced whole, never sharded"
        for reason, where in places.items()
    )


def _share_warnings(where: str | None) -> tuple[str, ...]:
    if where is None:
        return ()
    place = ".".join("*" if part.isdigit() else part for part in where.split(".")) or "the model"
    return (
        f"{place} does what its data choose (which experts, say): every choice is priced as if it were made equally often, by "
        "the same tokens of each sample",
    )


def _idle_warnings(graph: ModelGraph) -> tuple[str, ...]:
    """Parameters that would be trained, but that nothing reads: the example inputs do not reach them."""
    idle, count = [], 0
    for block in graph.blocks:
        read = {name.removeprefix("param:") for op in block.operators for name in op.inputs}
        if any(op.kind is OpKind.LEAF for op in block.operators):
            continue  # it reads all of its own
        unread = [p for p in block.parameters if p.trainable and not p.tied and p.name not in read]
        idle += [_idle_part(p.name, read) for p in unread]
        instances = sum(graph.blocks[instance.block] is block for instance in graph.chain)
        count += instances * sum(p.numel for p in unread)
    if not idle:
        return ()
    parts = list(dict.fromkeys(idle))
    names = ", ".join(parts[:_NAMED]) + (f" and {len(parts) - _NAMED} more" if len(parts) > _NAMED else "")
    return (
        f"{count:,} parameters are not used with the example inputs ({names}): they take memory, but no work "
        "of theirs is priced; give inputs that reach them, or freeze them",
    )


def _untrained_warnings(graph: ModelGraph) -> tuple[str, ...]:
    """A step without a backward pass is most likely not what was meant."""
    if any(op.backward for block in graph.blocks for op in block.operators):
        return ()
    return (
        "no gradient reaches a parameter, so a step is a forward pass alone: nothing requires a gradient, or the forward "
        "pass runs under torch.no_grad()",
    )


def _idle_part(name: str, read: Set[str]) -> str:
    """The largest module around the parameter of which nothing is read, or the parameter itself."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        prefix = ".".join(parts[:depth])
        if not any(other.startswith(f"{prefix}.") for other in read):
            return prefix
    return name
