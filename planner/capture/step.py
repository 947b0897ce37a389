"""`trace_step`: one training step of a module, traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from autoparallel.planner.capture.as_written import as_written
from autoparallel.planner.capture.errors import ModelError, TraceError, UntraceableError
from autoparallel.planner.capture.fold import FoldError, FoldPlan, forwards_replaced, positions_hidden
from autoparallel.planner.capture.leaf import LeafError
from autoparallel.planner.capture.library_kernels import library_kernels
from autoparallel.planner.capture.losses import scalar_losses
from autoparallel.planner.capture.nodes import Role
from autoparallel.planner.capture.on_meta import left_as_it_was, noted_values, with_batch
from autoparallel.planner.capture.pieces import without_unread_pieces
from autoparallel.planner.capture.samples_first import check_bags
from autoparallel.planner.capture.tracer import Tracer
from autoparallel.planner.capture.trees import plain, tensors
from autoparallel.planner.capture.trusting import trusting
from autoparallel.planner.capture.undropped import undropped
from autoparallel.planner.capture.written_parameters import storages_of, written_parameters


@dataclass(frozen=True, slots=True)
class Step:
    """The graph of a training step (see `nodes`), and the constants that it reads."""

    graph: fx.Graph
    constants: Mapping[str, torch.Tensor]


def trace_step(
    module: torch.nn.Module,
    example: Mapping[str, Any] | tuple[Any, ...],
    micro_batch: int,
    plan: FoldPlan,
    say: Callable[[str], None] = lambda _: None,
) -> Step:
    """Trace a forward and backward pass, on `micro_batch` samples, of a module whose parameters are on the meta device.

    The `example` inputs are keyword or positional arguments, which leaves (see `plan`) get with their numbers. The loss is
    differentiated (`losses`), or all of several; without one all outputs that need a gradient. The rounds of
    a loop are counted once some were equal (`rounds`); where that does not work out, all are traced. Raises TraceError,
    FoldError, and ModelError for samples that do not stand along dim 0.
    """
    shares = micro_batch if plan.shares else None
    tracer = Tracer(module, counts_rounds=True, say=say, shares=shares)
    try:
        return _traced(module, example, micro_batch, plan, tracer)
    except (FoldError, LeafError, ModelError):
        raise
    except Exception:
        if not tracer.has_skipped:
            raise
    tracer = Tracer(module, counts_rounds=False, say=say, shares=shares)
    return _traced(module, example, micro_batch, plan, tracer)


def _traced(
    module: torch.nn.Module,
    example: Mapping[str, Any] | tuple[Any, ...],
    micro_batch: int,
    plan: FoldPlan,
    tracer: Tracer,
) -> Step:
    writer = tracer.writer
    inputs = with_batch(example, micro_batch)
    inputs = tree_map(lambda x: tracer.meta_mode.to_meta(x) if isinstance(x, torch.Tensor) else x, inputs)
    for name, tensor in _named(inputs):
        writer.input(tensor, name)
    for role, state in ((Role.PARAM, module.named_parameters()), (Role.BUFFER, module.named_buffers())):
        for name, tensor in state:
            writer.hold(tensor, role, name)
            if role is Role.BUFFER and (values := noted_values(tensor)) is not None:
                tracer.meta_mode.remember(tensor, values)
    if plan.leaves:
        real = tensors(with_batch(example, micro_batch, numbers=True))
        tracer.given = {id(t): own for t, own in zip(tensors(inputs), real, strict=True) if not own.is_meta}
    storages = storages_of(module)
    result = _run(module, inputs, plan, tracer)
    written = written_parameters(writer.graph, storages, storages_of(module))
    returned = tracer.pieces.together(tensors(plain(result)))
    outputs = [writer.node_of(t) for t in returned]
    wanted = {name: p for name, p in module.named_parameters() if p.requires_grad}
    differentiable = [t for t in returned if t.requires_grad]
    losses = scalar_losses(result)
    loss = next(iter(losses), None)
    differentiable = losses or differentiable
    gradients = _run_backward(tracer, differentiable, wanted) if differentiable and wanted else {}
    end = writer.graph.output({"outputs": tuple(outputs), "gradients": gradients})
    end.meta |= {"micro_batch": micro_batch, "loss": None if loss is None else writer.node_of(loss)}
    end.meta |= {"differentiates": tracer.differentiates, "casts": tracer.casts, "written": written}
    check_bags(writer.graph)
    without_unread_pieces(writer.graph)
    tracer.meta_mode.forget()
    return Step(writer.graph, writer.constants)


def _run(module: torch.nn.Module, inputs: Any, plan: FoldPlan, tracer: Tracer) -> Any:
    """What the module returns, every call of its code noted."""
    try:
        with (
            left_as_it_was(module),
            positions_hidden(module, plan),
            forwards_replaced(module, plan, tracer),
            trusting(),
            as_written(),
            library_kernels(module),
            undropped(),
            tracer.recording(),
        ):
            return module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)
    except (FoldError, LeafError, ModelError, TraceError):
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, UntraceableError) else f"{type(error).__name__}: {error}"
        raise TraceError(tracer.failed or "", reason.strip().splitlines()[0]) from error


def _run_backward(
    tracer: Tracer, outputs: list[torch.Tensor], wanted: dict[str, torch.nn.Parameter]
) -> dict[str, torch.fx.Node]:
    """The gradients' nodes. Code of a backward pass that looks at values belongs to no module: the model is then priced whole."""
    try:
        return tracer.run_backward(outputs, wanted)
    except UntraceableError as error:
        raise TraceError("", f"in its backward pass, {error}") from error


def _named(inputs: Mapping[str, Any] | tuple[Any, ...]) -> list[tuple[str, torch.Tensor]]:
    """The tensors among the inputs, in order, each with the name of the argument that holds it."""
    items = (
        inputs.items() if isinstance(inputs, Mapping) else ((f"input_{i}", x) for i, x in enumerate(inputs))
    )
    return [(name, tensor) for name, value in items for tensor in tensors(value)]
