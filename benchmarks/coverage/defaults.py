"""Whether a model runs with its own defaults at all: on a CPU, with real tensors and the same kind of inputs.

A model that does not is nothing that capture could do better. The proof is strict: its forward pass fails on real tensors at
the line of its own code at which it fails on the meta device, and neither that line nor the error speaks of an argument that
it was not given. The model has its own widths, four layers of each kind and a
short text; its numbers are zeros, which take no memory until they are written to.
"""

from __future__ import annotations

import inspect
import linecache
import re
import traceback
from typing import Any

import torch
from torch import nn

from autoparallel.planner.capture.inputs_tried import failure, words_there
from autoparallel.planner.capture.on_meta import noted_values
from benchmarks.coverage.eager import with_numbers
from benchmarks.coverage.models import Entry, Smaller, full_settings, load, smaller

SEQ_LEN = 32
_SHALLOWER = Smaller(widths=1, heads=1)
_LIBRARIES = ("/torch/", "/autoparallel/", "/planner/", "/benchmarks/")


def own_failure(entry: Entry, module: nn.Module, inputs: Any) -> str | None:
    """What the model says on a CPU with its own defaults, in its own words, where it fails there as `module` does on the meta
    device with these inputs; None where it runs, fails elsewhere, or is none of transformers'."""
    if entry.library != "transformers":
        return None
    on_meta, _ = failure(module, inputs)
    if on_meta is None:
        return None
    missing = inspect.signature(module.forward).parameters.keys() - inputs.keys()
    if missing & (words_there(on_meta) | set(re.findall(r"\w+", str(on_meta)))):
        return None  # it may only have been fed too little
    small = load(smaller(full_settings(entry), _SHALLOWER), SEQ_LEN)
    numbers = with_numbers(small.example_inputs)
    try:
        with torch.no_grad():
            of_zeros(small.module)(**numbers)
    except Exception as error:
        return f"{type(error).__name__}: {error}" if own_line(error) == own_line(on_meta) else None
    return None


def own_line(error: Exception) -> str:
    """The innermost line of the model's own code that failed; the error itself, where none of it ran."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(library in frame.filename for library in _LIBRARIES)
    ]
    if not frames:
        return str(error)
    return f"{frames[-1].filename}: {linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()}"


def of_zeros(module: nn.Module) -> nn.Module:
    """The module with zeros in the place of tensors that are on the meta device; what is noted of buffers stays."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta:
                zeros = torch.zeros(parameter.shape, dtype=parameter.dtype)
                part._parameters[name] = nn.Parameter(zeros, requires_grad=parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                values = noted_values(buffer)
                part._buffers[name] = (
                    torch.zeros(buffer.shape, dtype=buffer.dtype) if values is None else values
                )
    return module


def with_proof(entry: Entry, module: nn.Module, inputs: Any, error: Exception) -> dict[str, Any]:
    """The result of a model that was not captured for an error: with the model's own words, where it cannot run at all. Raises
    the error itself otherwise."""
    try:
        said = own_failure(entry, module, inputs)
    except Exception:  # then nothing is proved
        said = None
    if said is None:
        raise error
    first = (str(error).strip().splitlines() or [""])[0]
    return {"ok": False, "why": f"{type(error).__name__}: {first}", "fails_itself": said[:300]}
