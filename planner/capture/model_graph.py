"""`capture`: from a module and example inputs to its `ModelGraph`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.planner.capture.build import build_graph
from autoparallel.planner.capture.errors import ModelError
from autoparallel.planner.capture.fold import FoldError, FoldPlan, fold_plan
from autoparallel.planner.capture.on_meta import on_meta, with_batch
from autoparallel.planner.capture.split import repeated_paths
from autoparallel.planner.capture.tracer import trace_step

# Two points give an affine function, the third checks it; 1 is left out because code treats it apart.
MICRO_BATCHES = (2, 3, 5)


def capture(module: torch.nn.Module, example_inputs: Any, *, name: str) -> ModelGraph:
    """The graph of one training step of `module`.

    `example_inputs` are a tensor, a tuple of positional or a mapping of keyword arguments; dim 0 of the tensors
    that share the first tensor's is the batch. Nothing is computed: parameters and inputs are replaced by meta
    tensors while the module's code runs, and put back afterwards. The module's training mode is respected.
    """
    inputs = example_inputs if isinstance(example_inputs, Mapping | tuple) else (example_inputs,)
    if not any(isinstance(leaf, torch.Tensor) for leaf in torch.utils._pytree.tree_leaves(inputs)):
        raise ModelError(f"{name}: the example inputs hold no tensor: pass at least one batch-first tensor")
    with on_meta(module):
        paths = repeated_paths(module)
        for plan in (fold_plan(module, paths), fold_plan(module, paths, last_differs=True)):
            try:
                return _capture(module, inputs, name, plan)
            except FoldError:
                continue
        return _capture(module, inputs, name, FoldPlan())


def _capture(module: torch.nn.Module, inputs: Any, name: str, plan: FoldPlan) -> ModelGraph:
    traces = [trace_step(module, with_batch(inputs, batch), batch, plan) for batch in MICRO_BATCHES]
    return build_graph(module, traces, name=name, plan=plan)
