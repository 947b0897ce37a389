"""What the nodes of a captured graph say: the keys of `node.meta`, and how to read them.

The graph is a `torch.fx.Graph` of one training step at one micro-batch. Its forward half are the torch functions that
the model's own code calls, attention and losses whole; its backward half the ATen operators that autograd runs; its
output the model's outputs and the gradients of the parameters, by name.

| key | on which nodes | what |
|---|---|---|
| `role` | all | `Role`: what the node is |
| `tensor` | all that are one tensor | `Meta`: shape, dtype, storage, layout; equal storages are aliases |
| `requires_grad`, `on_floats` | forward tensors | whether autograd follows it; whether it comes from a float input |
| `name` | inputs, parameters, buffers, constants | the name in the module |
| `call` | results | the call that made it: its result, or what it wrote into |
| `torch_name`, `frame` | calls | torch's name of the function; the call of a module (`Frame`) that it stands in |
| `inputs` | calls | the tensors that it is given, in order; one that is given twice stands there twice |
| `outputs` | calls | the tensors that it made, then those that it wrote into (as nodes) |
| `kernels` | calls | the ATen operators that it launches (`Launch`) |
| `saved` | calls | what autograd keeps for it (`SavedStorage`), in order |
| `backward` | calls | the nodes of its backward pass, in order of execution |
| `rounds` | calls | how often it runs, where it stands for other rounds of a loop (over samples: `samples.py`) |
| `joined` | calls | it is given results of rounds that were not run, each listed once |
| `leaf`, `stood_in_by` | calls | costs of a module that was run whole; path of the module that stands for this one |
| `like` | results of a stand-in | the node of the module that stands for it |
| `of`, `launch` | backward nodes | the call that it belongs to; the ATen operator |
| `repeats` | backward nodes | whether it runs a kernel of the forward pass again, for a checkpoint of the model's own code |
| `runs_again` | calls | set where such a checkpoint runs it again |
| `gradient_of` | backward nodes | the parameter that it is the gradient of |

Passes (`passes.py`) add theirs: `twins`, `weight_only`, `link`, `keeps`, `costs`, `shardings`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import fx

from autoparallel.costmodel.graph import Written
from autoparallel.planner.capture.trees import leaves


class Role(StrEnum):
    """What a node of a captured graph is."""

    INPUT = "input"
    PARAM = "param"
    BUFFER = "buffer"
    CONSTANT = "constant"
    CALL = "call"  # a torch function that the model's code calls
    COUNTED = "counted"  # a call of a round of a loop that another round stands for
    RESULT = "result"  # a tensor out of a call, or a tensor as a call left it
    BACKWARD = "backward"  # an ATen operator of the backward pass, or a tensor out of one
    KEPT = "kept"  # a tensor inside a call that autograd kept


_HELD = frozenset({Role.PARAM, Role.BUFFER, Role.CONSTANT})
_MADE = frozenset({Role.CALL, Role.RESULT})


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
    """A storage that autograd keeps for the backward pass of a call, and its size."""

    storage: int
    storage_bytes: int
    meta: Meta
    position: int  # among what its call keeps


@dataclass(slots=True, kw_only=True, eq=False)
class Frame:
    """One call of a module, by its path, within another call (None for the root).

    `inputs` are (argument, node) of the tensors that it is given and `outputs` the nodes it returns; None while it runs.
    """

    path: str
    class_name: str
    parent: Frame | None
    index: int = 0  # in the order in which the calls begin
    inputs: tuple[tuple[str, fx.Node], ...] | None = None
    outputs: tuple[fx.Node, ...] = ()

    def stack(self) -> list[Frame]:
        """This call and those around it, innermost first, without the root."""
        found, frame = [], self
        while frame.parent is not None:
            found.append(frame)
            frame = frame.parent
        return found


def role(node: fx.Node) -> Role:
    """What the node is."""
    return Role(node.meta["role"])


def calls(graph: fx.Graph) -> list[fx.Node]:
    """The calls of the forward pass, in order."""
    return [node for node in graph.nodes if node.meta.get("role") is Role.CALL]


def tensor(node: fx.Node) -> Meta:
    """The tensor that the node is."""
    meta = node.meta["tensor"]
    assert isinstance(meta, Meta)
    return meta


def is_held(node: fx.Node) -> bool:
    """Whether the node is there before the step: a parameter, buffer or constant."""
    return node.meta["role"] in _HELD


def maker(node: fx.Node) -> fx.Node | None:
    """The call that made a forward tensor; None for what no call makes."""
    if node.meta["role"] not in _MADE:
        return None
    made = node.meta.get("call", node)
    assert isinstance(made, fx.Node)
    return made


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments of a call, in order; one that is given twice stands there twice."""
    return list(node.meta["inputs"])


def tensor_outputs(node: fx.Node) -> list[fx.Node]:
    """The tensors that a call made or wrote into."""
    return list(node.meta["outputs"])


def plain_arguments(node: fx.Node) -> tuple[object, ...]:
    """The arguments of a call that are numbers, flags and strings."""
    return tuple(
        leaf for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, int | float | bool | str)
    )


def backward_launches(graph: fx.Graph) -> Iterator[tuple[fx.Node, Launch, fx.Node]]:
    """Each node of the backward pass that launches an operator, with that and the call it belongs to."""
    for node in graph.nodes:
        if "launch" in node.meta:
            yield node, node.meta["launch"], node.meta["of"]


def outputs(graph: fx.Graph) -> list[fx.Node]:
    """The tensors that the module returned."""
    return [leaf for leaf in leaves(_output(graph).args[0]["outputs"]) if isinstance(leaf, fx.Node)]  # type: ignore[call-overload,index]


def loss(graph: fx.Graph) -> fx.Node | None:
    """The scalar loss; None where there is none."""
    found = _output(graph).meta["loss"]
    assert found is None or isinstance(found, fx.Node)
    return found


def differentiates(graph: fx.Graph) -> bool:
    """Whether the model's own code takes derivatives in its forward pass: the forces that belong to an energy, a penalty."""
    return bool(_output(graph).meta["differentiates"])


def casts(graph: fx.Graph) -> bool:
    """Whether the model's own code has `torch.autocast` on for some of what it computes."""
    return bool(_output(graph).meta["casts"])


def written(graph: fx.Graph) -> tuple[Written, ...]:
    """The parameters that the forward pass writes to."""
    return tuple(_output(graph).meta["written"])


def micro_batch(graph: fx.Graph) -> int:
    """How many samples the step was traced with."""
    return int(_output(graph).meta["micro_batch"])


def gradients(graph: fx.Graph) -> dict[str, fx.Node]:
    """The gradient of each parameter that has one, by name."""
    return dict(_output(graph).args[0]["gradients"])  # type: ignore[call-overload,index,arg-type]


def _output(graph: fx.Graph) -> fx.Node:
    return graph.output_node()
