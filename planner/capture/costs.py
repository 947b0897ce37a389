"""What each call costs: its kind, its kernels forward and backward, and the sizes of its product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from autoparallel.costmodel.graph import ITEM_BYTES, ONCE, KernelSpec, OpKind, Size
from autoparallel.planner.capture import kernels
from autoparallel.planner.capture.alike import twins
from autoparallel.planner.capture.fit import Fit
from autoparallel.planner.capture.gradients import gradient_of
from autoparallel.planner.capture.labels import Labels, attention_labels, product_labels
from autoparallel.planner.capture.library_kernels import ONE_CALL, WORKS
from autoparallel.planner.capture.links import calls_by_link
from autoparallel.planner.capture.nodes import (
    Launch,
    plain_arguments,
    tensor,
    tensor_inputs,
    tensor_outputs,
)
from autoparallel.planner.capture.one_call import Step, Work
from autoparallel.planner.capture.recurrent import FUSED_CELLS, recurrent_work
from autoparallel.planner.capture.trees import mapped
from autoparallel.planner.capture.whole import GROUPED_PRODUCTS

_ATTENTION = "scaled_dot_product_attention"
_PRODUCTS = {OpKind.GEMM, OpKind.GROUPED_GEMM, OpKind.CONV}

# An operator that launches several kernels is of the first of these kinds that occurs among them.
_PRIORITY = (
    OpKind.GROUPED_GEMM, OpKind.CONV, OpKind.GEMM, OpKind.EMBEDDING, OpKind.NORM, OpKind.BATCH_NORM, OpKind.POOL,
    OpKind.SOFTMAX, OpKind.DROPOUT,
    OpKind.REDUCTION, OpKind.ELEMENTWISE, OpKind.COPY,
)  # fmt: skip

_Kernels = tuple[KernelSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a call costs. `labels` and `sizes` as `Operator` has them."""

    kind: OpKind
    forward: _Kernels
    backward: _Kernels
    labels: tuple[str, ...]
    sizes: tuple[tuple[str, Size], ...]


def with_costs(graph: fx.Graph, fit: Fit) -> fx.Graph:
    """`graph`, each call of the first link of each structure told its `costs`, as functions of the micro-batch."""
    for link, group in calls_by_link(graph).items():
        for call in group if link.first else ():
            call.meta["costs"] = _costs(call, fit)
    return graph


def _costs(call: fx.Node, fit: Fit) -> Costs:
    kind = _kind(call)
    labels = [_labels(same, kind) for same in twins(call)]
    known = [label for label in labels if label is not None]
    sizes = known[0].sizes if len(known) == len(labels) else {}
    forward, backward = _kernels(call, kind, labels, fit)
    if (rounds := fit.rounds(twins(call))) != ONCE:
        forward, backward = (tuple(replace(k, count=rounds) for k in side) for side in (forward, backward))
    return Costs(
        kind=kind,
        forward=forward,
        backward=backward,
        labels=labels[0].names if labels[0] else (),
        sizes=tuple((letter, fit.size([k.sizes[letter] for k in known])) for letter in sizes),
    )


def _labels(call: fx.Node, kind: OpKind) -> Labels | None:
    inputs = [tensor(node) for node in tensor_inputs(call)]
    outputs = [tensor(node) for node in tensor_outputs(call)]
    if kind is OpKind.ATTENTION:
        return attention_labels(inputs)
    if kind is OpKind.RECURRENT:
        return Labels(names=(), sizes=_work(call).sizes)
    if kind in _PRODUCTS and len(inputs) >= 2:
        return product_labels(call.meta["torch_name"], inputs, outputs, plain_arguments(call))
    return None


def _kernels(
    call: fx.Node, kind: OpKind, labels: Sequence[Labels | None], fit: Fit
) -> tuple[_Kernels, _Kernels]:
    if kind is OpKind.ATTENTION:
        return _attention(call, labels, fit)
    if kind is OpKind.LEAF:
        return _leaf(call, fit)
    if kind is OpKind.RECURRENT:
        return _one_call(call, fit)
    if _is_grouped(call):
        return _grouped(call, labels, fit)
    sizes = labels[0].sizes if labels[0] else {}
    forward = zip(*(same.meta["kernels"] for same in twins(call)), strict=True)
    behind = [same.meta["backward"] for same in twins(call)]
    if len({len(nodes) for nodes in behind}) > 1:
        made = tuple(k for row in forward for k in _launched(row, "", kind, sizes, fit))
        return made, _summed(behind, fit)
    backward = zip(*behind, strict=True)
    sides = (
        tuple(k for row in forward for k in _launched(row, "", kind, sizes, fit)),
        tuple(k for row in backward for k in _of_backward(row, kind, sizes, fit)),
    )
    cell = FUSED_CELLS.get(call.meta["torch_name"])
    return (
        (_as_fused(sides[0], cell.forward, call, fit), _as_fused(sides[1], cell.backward, call, fit))
        if cell
        else sides
    )


def _as_fused(found: _Kernels, numbers: int, call: fx.Node, fit: Fit) -> _Kernels:
    """The kernels of one cell with what runs over its gates as one, which moves `numbers` for each state of each sample: what
    accelerators have, where the meta device has a dozen."""
    kinds = (OpKind.ELEMENTWISE, OpKind.COPY)
    over_gates = [k for k in found if k.kind in kinds and k.bytes_moved.per_sample]
    if not over_gates:
        return found
    states = [math.prod(tensor(tensor_outputs(same)[0]).shape) for same in twins(call)]
    moved = fit.cost([numbers * n * ITEM_BYTES[over_gates[0].dtype] for n in states])
    one = replace(over_gates[0], kind=OpKind.ELEMENTWISE, bytes_moved=moved)
    return tuple(one if k is over_gates[0] else k for k in found if k is over_gates[0] or k not in over_gates)


def _summed(behind: Sequence[Sequence[fx.Node]], fit: Fit) -> _Kernels:
    """Kernels of which there are more with more samples (gradients of what each sample reads by itself, added up): those of one
    operator together as one."""
    result = []
    for target in dict.fromkeys(node.meta["launch"].target for nodes in behind for node in nodes):
        rows = [[n for n in nodes if n.meta["launch"].target == target] for nodes in behind]
        first = next(n for row in rows for n in row)
        launch = first.meta["launch"]
        if kernels.runs_kernel(launch):
            result.append(
                KernelSpec(
                    kind=kernels.kind_of(launch),
                    dtype=launch.outputs[0].dtype if launch.outputs else launch.inputs[0].dtype,
                    flops=fit.cost(
                        [sum(kernels.launch_flops(n.meta["launch"]) for n in row) for row in rows]
                    ),
                    bytes_moved=fit.cost(
                        [sum(kernels.launch_bytes(n.meta["launch"]) for n in row) for row in rows]
                    ),
                    gradient_of=gradient_of(first),
                )
            )
    return tuple(result)


def _of_backward(row: Sequence[fx.Node], owner: OpKind, sizes: dict[str, int], fit: Fit) -> _Kernels:
    launches = [node.meta["launch"] for node in row]
    if not row[0].meta["repeats"]:
        return _launched(launches, gradient_of(row[0]), owner, sizes, fit)
    return _again(_launched(launches, "", owner, sizes, fit))


def _again(forward: _Kernels) -> _Kernels:
    """Kernels of the forward pass as part of the backward pass, whose input gradients wait for them."""
    return tuple(replace(kernel, gradient_of="input") for kernel in forward)


def _both(call: fx.Node, forward: _Kernels, back: _Kernels) -> tuple[_Kernels, _Kernels]:
    """The passes of a call that stays whole: no backward where no gradient reaches it, and the forward once more where that runs again."""
    if not call.meta["backward"]:
        return forward, ()
    return forward, (*_again(forward if "runs_again" in call.meta else ()), *back)


def _launched(row: Sequence[Launch], of: str, owner: OpKind, sizes: dict[str, int], fit: Fit) -> _Kernels:
    """The kernels of one launch, seen at each micro-batch: one, or two for a convolution's backward."""
    if not kernels.runs_kernel(row[0]):
        return ()
    if kernels.short_name(row[0].target) == "convolution_backward":
        return _convolution_backward(row, fit)
    kind = OpKind.CROSS_ENTROPY if owner is OpKind.CROSS_ENTROPY else kernels.kind_of(row[0])
    product = ""
    if kind in _PRODUCTS and sizes:
        product = backward_product(row[0], sizes, of) if of else "bmnk"
        product = product.replace("b", "e") if kind is OpKind.GROUPED_GEMM else product
    return (
        KernelSpec(
            kind=kind,
            dtype=row[0].outputs[0].dtype if row[0].outputs else row[0].inputs[0].dtype,
            flops=fit.cost([kernels.launch_flops(x) for x in row]),
            bytes_moved=fit.cost([kernels.launch_bytes(x) for x in row]),
            product=product,
            gradient_of=of,
        ),
    )


def _convolution_backward(row: Sequence[Launch], fit: Fit) -> _Kernels:
    result = []
    for of, position, product in (("input", 0, "bmkn"), ("weight", 1, "bnkm")):
        parts = [kernels.convolution_gradient(launch, position) for launch in row]
        if parts[0] is not None:
            result.append(
                KernelSpec(
                    kind=OpKind.CONV,
                    dtype=row[0].inputs[0].dtype,
                    flops=fit.cost([p[0] for p in parts if p]),
                    bytes_moved=fit.cost([p[1] for p in parts if p]),
                    product=product,
                    gradient_of=of,
                )
            )
    return tuple(result)


def _attention(call: fx.Node, labels: Sequence[Labels | None], fit: Fit) -> tuple[_Kernels, _Kernels]:
    """One kernel forward and one backward: the tensors once each, and the statistics."""
    needs = tuple(node.meta["requires_grad"] for node in tensor_inputs(call)[:3])
    flops, gradient_flops, moved = [], [], []
    for same, label in zip(twins(call), labels, strict=True):
        assert label is not None
        flops.append(kernels.attention_flops(label.sizes))
        gradient_flops.append(kernels.attention_flops(label.sizes, (needs[0], needs[1], needs[2])))
        tensors = map(tensor, (*tensor_inputs(same), *tensor_outputs(same)))
        statistics = label.sizes["b"] * label.sizes["h"] * label.sizes["s"]
        moved.append(sum(map(kernels.tensor_bytes, tensors)) + statistics * ITEM_BYTES["float32"])
    made = tensor_outputs(call)[0]
    kernel = KernelSpec(
        kind=OpKind.ATTENTION,
        dtype=tensor(made).dtype,
        flops=fit.cost(flops),
        bytes_moved=fit.cost(moved),
    )
    # Backward reads what forward moved and the output's gradient, and writes the inputs' gradients.
    back = replace(
        kernel,
        flops=fit.cost(gradient_flops),
        bytes_moved=kernel.bytes_moved * 2,
        gradient_of="input",
    )
    return _both(call, (kernel,), (back,))


def _leaf(call: fx.Node, fit: Fit) -> tuple[_Kernels, _Kernels]:
    """One kernel each way, as measured; the backward pass moves what the forward moved twice."""
    costs, made = [same.meta["leaf"] for same in twins(call)], tensor_outputs(call)
    forward = KernelSpec(
        kind=OpKind.LEAF,
        dtype=tensor(made[0]).dtype if made else "float32",
        flops=fit.cost([c.forward_flops for c in costs]),
        bytes_moved=fit.cost([c.moved_bytes for c in costs]),
    )
    if not any(node.meta["requires_grad"] for node in made):
        return (forward,), ()
    backward = replace(
        forward,
        flops=fit.cost([c.backward_flops for c in costs]),
        bytes_moved=forward.bytes_moved * 2,
        gradient_of="input",
    )
    return (forward,), (backward,)


def _one_call(call: fx.Node, fit: Fit) -> tuple[_Kernels, _Kernels]:
    """The kernels of a library that one call runs."""
    works = [_work(same) for same in twins(call)]

    def made(sides: Sequence[Sequence[Step]]) -> _Kernels:
        return tuple(_of_steps(same, works, call, fit) for same in zip(*sides, strict=True))

    return _both(call, made([work.forward for work in works]), made([work.backward for work in works]))


def _work(call: fx.Node) -> Work:
    needs = [node.meta["requires_grad"] for node in tensor_inputs(call)]
    args, kwargs = mapped(lambda x: tensor(x) if isinstance(x, fx.Node) else x, (call.args, call.kwargs))
    name = call.meta["torch_name"]
    found = WORKS[name](*args, **kwargs) if name in WORKS else recurrent_work(name, args, needs)
    assert found is not None
    return found


def _of_steps(steps: Sequence[Step], works: Sequence[Work], call: fx.Node, fit: Fit) -> KernelSpec:
    """The kernels that are `steps` at each micro-batch."""
    dtype, first = tensor(tensor_outputs(call)[0]).dtype, steps[0]
    products = [[work.sizes[letter] for letter in first.product] for work in works]
    numbers = [m * k + k * n + m * n for m, n, k in products] if first.product else [s.numbers for s in steps]
    flops = [2 * math.prod(sizes) for sizes in products] if first.product else [s.flops for s in steps]
    return KernelSpec(
        kind=first.kind,
        dtype=dtype,
        flops=fit.cost(flops),
        bytes_moved=fit.cost([round(n * ITEM_BYTES[dtype]) for n in numbers]),
        product=f"b{first.product}" if first.product else "",
        gradient_of=first.of,
        count=fit.size([step.count for step in steps]),
    )


def _grouped(call: fx.Node, labels: Sequence[Labels | None], fit: Fit) -> tuple[_Kernels, _Kernels]:
    """A product of experts: 2 · rows · n · k forward and for each gradient, however the rows are routed."""
    flops, moved = [], []
    for same, label in zip(twins(call), labels, strict=True):
        assert label is not None
        flops.append(2 * label.sizes["m"] * label.sizes["n"] * label.sizes["k"])
        tensors = map(tensor, (*tensor_inputs(same)[:2], *tensor_outputs(same)))
        moved.append(sum(map(kernels.tensor_bytes, tensors)))
    made = tensor_outputs(call)[0]
    kernel = KernelSpec(
        kind=OpKind.GROUPED_GEMM,
        dtype=tensor(made).dtype,
        flops=fit.cost(flops),
        bytes_moved=fit.cost(moved),
        product="emnk",
    )
    wanted = [node.meta["requires_grad"] for node in tensor_inputs(call)[:2]]
    halves = (("input", "emkn"), ("weight", "enkm"))
    backward = [
        replace(kernel, gradient_of=of, product=product)
        for (of, product), want in zip(halves, wanted, strict=True)
        if want and call.meta["backward"]
    ]
    return (kernel,), (*_again((kernel,) if "runs_again" in call.meta else ()), *backward)


def _is_grouped(call: fx.Node) -> bool:
    """Whether a call is a product of experts that was kept whole."""
    whole = call.meta["torch_name"] in GROUPED_PRODUCTS
    return whole and not any(map(kernels.runs_kernel, call.meta["kernels"]))


def _kind(call: fx.Node) -> OpKind:
    name = call.meta["torch_name"]
    if "leaf" in call.meta:
        return OpKind.LEAF
    if _is_grouped(call):
        return OpKind.GROUPED_GEMM
    if name == _ATTENTION:
        return OpKind.ATTENTION
    if name in ONE_CALL:
        return OpKind.RECURRENT
    if name in {"cross_entropy_loss", "nll_loss", "nll_loss_nd"}:
        return OpKind.CROSS_ENTROPY
    found = {kernels.kind_of(x) for x in call.meta["kernels"] if kernels.runs_kernel(x)}
    return next((kind for kind in _PRIORITY if kind in found), OpKind.VIEW)


def backward_product(launch: Launch, sizes: dict[str, int], of: str) -> str:
    """Letters (batch, rows, columns, contracted) of a gradient product, found by its sizes.

    The gradient of the first operand contracts n, that of the second contracts m; either may be computed
    transposed.
    """
    first, second = launch.inputs[-2].shape, launch.inputs[-1].shape
    if len(first) < 2 or len(second) < 2:
        return "bmkn"
    measured = (first[-2], second[-1], first[-1])
    order = ("bnkm", "bknm", "bmkn", "bkmn") if of == "weight" else ("bmkn", "bkmn", "bnkm", "bknm")
    for letters in order:
        if tuple(sizes[x] for x in letters[1:]) == measured:
            return letters
    return order[0]
