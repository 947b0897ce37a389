"""Capture: a module becomes a `ModelGraph`. The only part of planning that needs torch.

- `load.py`: the MODEL argument becomes a module on the meta device and example inputs, Hugging Face's by
  `huggingface.py`: `huggingface_inputs.py` says what a model is fed (of `huggingface_model.py`), `huggingface_examples.py` and
  `huggingface_images.py` what an argument of a name looks like, `inputs_tried.py` finds what else a model asks for (`inputs_mended.py`: in
  other sizes),
  `placeholders.py` puts images and sound in front of a text.
- `traced.py`: `trace`, the step as one `torch.fx` graph, `show.py` as code; `nodes.py` says what its nodes say.
- `model_graph.py`: `capture`, which traces as little as can be proved to be enough: of equal repeated modules three
  (`fold.py`, by their `structure.py`); what a router chooses gets equal shares where code asks for
  it (`choices.py`); what cannot be traced is run once for real (`leaf.py`).
- `step.py`: one training step, of the loss that `losses.py` finds, run by `tracer.py` on the meta device (`on_meta.py`, `trusting.py`, `meta_mode.py` with `values.py`, `uniform.py` and `indexing.py`; checks hold and logged numbers stay unknown: `guards.py`; nothing is compiled: `as_written.py`; no layer is left out by chance: `undropped.py`), torch's own
  Python functions opened (`opened.py`) and others such as attention kept whole (`whole.py`), recurrent layers as a library runs them (`recurrent.py`), functions that are a library's kernels (`library_kernels.py`; `scans.py` and `delta_rules.py` say what these do, `one_call.py` how that is said), torch's multi-head attention with its heads apart (`heads.py`), checkpoints of the model's own code
  followed (`again.py`), `torch.vmap` kept as one call (`vmapped.py`), rounds of a loop counted (`rounds.py`), samples that are taken apart and joined left together (`pieces.py`), such that cannot be refused (`samples_first.py`), parameters that a forward pass writes to found (`written_parameters.py`), and written down by `writer.py` as a graph (`marks.py`: what torch has no name for).
- `passes.py`: the passes from there to the `ModelGraph`, in order, each with its check (`check.py`): `samples.py` leaves one round of loops over samples, `alike.py` joins the
  graphs of several micro-batches, `gradients.py` finds the kernels that serve parameters alone, `links.py` the links of
  the chain, `saved.py` what autograd keeps, `repetition.py` which links are equal, `costs.py` what each call costs (`kernels.py`, `labels.py`, `fit.py`),
  `strided.py` and `shardings.py` its legal shardings, from DTensor's own rules (`rules.py`); `build.py` makes the
  `ModelGraph`, block by block (`blocks.py`), with what
  passes between them (`flow.py`, `parameters.py`, `boundaries.py`).

Shared by them: `names.py`, `trees.py`, `loops.py`, `errors.py`; `dropout.py`: what a model drops in training.
"""

from __future__ import annotations

from autoparallel.costmodel.collecting import without_collection

with without_collection():  # importing torch makes a million objects and hardly a cycle
    from autoparallel.planner.capture.model_graph import capture
    from autoparallel.planner.capture.traced import trace

__all__ = ["capture", "trace"]
