"""What capture does, pass by pass: the graphs of one training step become a `ModelGraph`.

`step.trace_step` writes the step down as a `torch.fx` graph, at three micro-batches. Every pass takes a graph, notes
something on its nodes (`node.meta`, see `nodes`) or moves some, and gives the graph. `check` says what holds after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx, nn

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.planner.capture.alike import alike
from autoparallel.planner.capture.build import to_model_graph
from autoparallel.planner.capture.check import (
    check_costs,
    check_gradients,
    check_kept,
    check_links,
    check_repetition,
    check_shardings,
    check_step,
    check_twins,
)
from autoparallel.planner.capture.costs import with_costs
from autoparallel.planner.capture.fit import Fit
from autoparallel.planner.capture.fold import FoldError, FoldPlan
from autoparallel.planner.capture.gradients import with_weight_gradients
from autoparallel.planner.capture.links import hoisted, links, repeated_paths, with_links
from autoparallel.planner.capture.nodes import micro_batch
from autoparallel.planner.capture.repetition import with_repetition
from autoparallel.planner.capture.rules import Rules
from autoparallel.planner.capture.samples import one_round
from autoparallel.planner.capture.saved import with_kept_storages
from autoparallel.planner.capture.strided import with_shardings


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What passes need beside the graph."""

    module: nn.Module
    plan: FoldPlan
    fit: Fit
    rules: Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One step from graph to graph, and what holds after it (an AssertionError is a bug of ours)."""

    name: str
    run: Callable[[fx.Graph, Context], fx.Graph]
    check: Callable[[fx.Graph], None]


PASSES = (
    Pass(
        name="gradients: which backward kernels serve parameters alone",
        run=lambda graph, _: with_weight_gradients(graph),
        check=check_gradients,
    ),
    Pass(
        name="links: which calls are one repeated module, which are glue",
        run=lambda graph, context: with_links(graph, repeated_paths(context.module)),
        check=check_links,
    ),
    Pass(
        name="hoisting: glue between blocks that does not depend on them goes before them",
        run=lambda graph, _: hoisted(graph),
        check=check_links,
    ),
    Pass(
        name="saved storages: what autograd keeps, each storage at one call",
        run=lambda graph, _: with_kept_storages(graph),
        check=check_kept,
    ),
    Pass(
        name="repetition: which links have the structure of one before them",
        run=lambda graph, context: with_repetition(graph, context.module, context.fit),
        check=check_repetition,
    ),
    Pass(
        name="costs: kind, kernels, FLOPs and bytes of each call, by micro-batch",
        run=lambda graph, context: with_costs(graph, context.fit),
        check=check_costs,
    ),
    Pass(
        name="shardings: the legal ones of each call, from DTensor's rules",
        run=lambda graph, context: with_shardings(graph, context.rules, context.fit),
        check=check_shardings,
    ),
)


def lowered(
    graphs: Sequence[fx.Graph],
    module: nn.Module,
    *,
    name: str,
    plan: FoldPlan,
    rules: Rules,
    say: Callable[[str], None] = lambda _: None,
) -> ModelGraph:
    """The `ModelGraph` of `module`, from the graphs of its training step at several micro-batches.

    Raises ModelError where those are not alike, FoldError where blocks that should be equal are not.
    """
    fit = Fit(tuple(map(micro_batch, graphs)))
    for graph in graphs:
        check_step(graph)
    one_round(graphs)
    graph = alike(graphs)
    check_twins(graph)
    context = Context(module=module, plan=plan, fit=fit, rules=rules)
    for each in PASSES:
        say(each.name)
        graph = each.run(graph, context)
        each.check(graph)
    return to_model_graph(graph, module, name=name, plan=plan, fit=fit, rules=rules)


def check_fold(graph: fx.Graph, module: nn.Module, plan: FoldPlan) -> None:
    """Raises FoldError where modules that `plan` takes for equal have unlike structures at one micro-batch already.

    Blocks of unlike structure may still be equal in the end: what is refused here may be tried to its end.
    """
    graph = with_weight_gradients(alike([graph]))
    graph = with_kept_storages(with_links(graph, repeated_paths(module)))
    graph = with_repetition(graph, module, Fit((micro_batch(graph),)))
    first = {link.path: link.same or link for link in links(graph) if not link.model}
    for second, last in plan.pairs:
        if first.get(second) is not first.get(last):
            raise FoldError(f"{second} and {last} have unlike structures")
