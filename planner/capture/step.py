"""`trace_step`: one training step of a module, traced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map

from autoparallel.planner.capture.errors import ModelError, TraceError, UntraceableError
from autoparallel.planner.capture.fold import FoldError, FoldPlan, forwards_replaced, positions_hidden
from autoparallel.planner.capture.on_meta import left_as_it_was, with_batch
from autoparallel.planner.capture.records import Trace
from autoparallel.planner.capture.tracer import Tracer
from autoparallel.planner.capture.trees import plain, tensors


@contextmanager
def _trusting() -> Iterator[None]:
    """While inside, distributions do not look at the values of their parameters, which a trace has not."""
    kind = torch.distributions.Distribution
    before = kind._validate_args
    kind.set_default_validate_args(False)
    try:
        yield
    finally:
        kind.set_default_validate_args(before)


def trace_step(
    module: torch.nn.Module, example: Mapping[str, Any] | tuple[Any, ...], micro_batch: int, plan: FoldPlan
) -> Trace:
    """Trace a forward and backward pass, on `micro_batch` samples, of a module whose parameters are on the meta device.

    The `example` inputs are keyword or positional arguments, which leaves (see `plan`) get with their numbers. A scalar output that needs a gradient is the loss; without one
    all outputs that need a gradient are differentiated. Raises TraceError, FoldError.
    """
    tracer = Tracer(module, micro_batch)
    for name, parameter in module.named_parameters():
        tracer.declare(parameter, "param", name)
    for name, buffer in module.named_buffers():
        tracer.declare(buffer, "buffer", name)
    inputs = with_batch(example, micro_batch)
    inputs = tree_map(lambda x: tracer.meta_mode.to_meta(x) if isinstance(x, torch.Tensor) else x, inputs)
    if plan.leaves:
        real = tensors(with_batch(example, micro_batch, numbers=True))
        tracer.given = {id(t): own for t, own in zip(tensors(inputs), real, strict=True) if not own.is_meta}
    for position, tensor in enumerate(tensors(inputs)):
        tracer.declare(tensor, "input", str(position), on_floats=tensor.is_floating_point())
    try:
        with (
            left_as_it_was(module),
            positions_hidden(module, plan),
            forwards_replaced(module, plan, tracer),
            _trusting(),
            tracer.recording(),
        ):
            result = module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)
    except (FoldError, ModelError, TraceError):
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, UntraceableError) else f"{type(error).__name__}: {error}"
        raise TraceError(tracer.failed or "", reason.splitlines()[0]) from error
    outputs = tensors(plain(result))
    tracer.trace.outputs = [tracer.value_of(t) for t in outputs]
    wanted: list[torch.Tensor] = [p for p in module.parameters() if p.requires_grad]
    differentiable = [t for t in outputs if t.requires_grad]
    loss = next((t for t in differentiable if t.numel() == 1), None)
    if loss is not None:
        tracer.trace.loss, differentiable = tracer.value_of(loss), [loss]
    if differentiable and wanted:
        tracer.run_backward(differentiable, wanted)
    return tracer.trace
