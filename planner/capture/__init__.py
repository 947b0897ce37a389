"""Capture: a module becomes a `ModelGraph`. The only part of planning that needs torch.

- `load.py`: the MODEL argument becomes a module on the meta device and example inputs, Hugging Face's by
  `huggingface.py`, `huggingface_inputs.py` and `image_tokens.py`.
- `model_graph.py`: `capture`, which traces as little as can be proved to be enough: of equal repeated modules three
  (`fold.py`); what cannot be traced is run once for real (`leaf.py`).
- `step.py`: one training step, traced by `tracer.py` on the meta device (`on_meta.py`, `meta_mode.py`), functions such as
  attention kept whole (`whole.py`); `records.py` is what a trace consists of.
- `split.py`, `build.py`: traces become links of the chain and these a graph, call by call in `operators.py`: kernels
  (`kernels.py`), what autograd keeps (`saved.py`), which kernels make parameters' gradients (`gradients.py`), names of dims
  (`labels.py`), sizes by micro-batch (`fit.py`), modules' boundaries (`boundaries.py`).
- `shardings.py`, `strided.py`: legal shardings of an operator, from DTensor's own rules (`rules.py`).

Shared by them: `names.py`, `trees.py`, `loops.py`, `errors.py`.
"""

from __future__ import annotations

from autoparallel.costmodel.collecting import without_collection

with without_collection():  # importing torch makes a million objects and hardly a cycle
    from autoparallel.planner.capture.model_graph import capture

__all__ = ["capture"]
