"""What one traced training step consists of: calls, the values between them, and the kernels they launch.

These are the raw notes of `tracer.Tracer`, with concrete sizes for one micro-batch. `build` turns the notes of
three micro-batches into a `ModelGraph`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autoparallel.planner.capture.leaf import LeafCost


@dataclass(frozen=True, slots=True)
class Meta:
    """Shape, dtype, storage and layout (offset, then strides) of a tensor: equal for the same view of a storage.

    `distinct` counts elements, those repeated by an expand once.
    """

    shape: tuple[int, ...]
    dtype: str
    distinct: int
    storage: int
    layout: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class Value:
    """A tensor of the traced program. `origin` is "call", "param", "buffer", "input" or "constant"."""

    meta: Meta
    origin: str
    name: str = ""  # of a parameter or buffer, absolute; of an input its position in the example inputs
    call: int = -1  # index of the call that made it
    output: int = 0  # which of that call's outputs
    like: int = -1  # for an output of a module that was stood in for: the value that stands for it
    requires_grad: bool = False
    on_floats: bool = False  # computed from a floating-point input of the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One ATen operator below autograd: a kernel, or a view where `is_view`."""

    target: str
    inputs: tuple[Meta, ...]
    outputs: tuple[Meta, ...]
    is_view: bool
    signature: tuple[Any, tuple[Any, ...], dict[str, Any]]  # the operator and its arguments, on meta tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStorage:
    """A storage that autograd keeps for the backward pass, and its size."""

    storage: int
    storage_bytes: int
    meta: Meta
    call: int  # that keeps it, and its position among what that call keeps
    position: int


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of a torch function from the model's own code."""

    name: str  # "linear", "add": torch's name, without the module
    frame: int  # index into Trace.frames: the module call it stands in
    inputs: list[int] = field(default_factory=list)  # values, tensors in the order of the arguments
    outputs: list[int] = field(default_factory=list)
    constants: tuple[object, ...] = ()  # arguments that are not tensors
    causal: bool = False  # attention only
    leaf: LeafCost | None = None  # a submodule that was not traced
    forward: list[Launch] = field(default_factory=list)
    backward: list[Launch] = field(default_factory=list)
    saved: list[SavedStorage] = field(default_factory=list)
    first_node: int = 0  # sequence number of the first autograd node made by it


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One call of a module: its path and the frame that called it (-1 for the root)."""

    path: str
    parent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What crosses the boundary of one module call: (argument, value) of its tensors, and the values returned."""

    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Trace:
    """A whole traced step at one micro-batch."""

    micro_batch: int
    frames: list[Frame] = field(default_factory=list)
    boundaries: dict[int, Boundary] = field(default_factory=dict)  # by frame
    values: list[Value] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)  # values the root module returned
    backward: list[Launch] = field(default_factory=list)  # of all calls, in order of execution
    parameter_gradients: set[int] = field(default_factory=set)  # storages of the gradients of parameters
    loss: int = -1  # value of the scalar loss, -1 where there is none
    stand_ins: dict[int, str] = field(default_factory=dict)  # call -> path of the module that stands for it
