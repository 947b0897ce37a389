"""Names for the dims of matrix products, as in einsum: b batch, m rows, n columns, k contracted.

They say which dim of which tensor a size of the product belongs to, so that a sharded product gets its local
sizes. Functions here look only at the called function and at shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoparallel.planner.capture.nodes import Meta

Shapes = Sequence[Meta]


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of each input, then each output; and the size of each letter."""

    names: tuple[str, ...]
    sizes: dict[str, int]


def product_labels(name: str, inputs: Shapes, outputs: Shapes, constants: Sequence[object]) -> Labels | None:
    """Labels of a call that is one matrix product; None for a form that is not known."""
    name = name.strip("_").removeprefix("r") if name in {"__matmul__", "__rmatmul__"} else name
    if name == "einsum":
        names = _einsum(constants, inputs)
    elif name in _CONVOLUTIONS:
        return _convolution(inputs, outputs, transposed="transpose" in name)
    else:
        names = _FORMS[name](inputs) if name in _FORMS else None
    if names is None:
        return None
    return Labels(names, _sizes(names, [*inputs, *outputs]))


def _sizes(names: Sequence[str], tensors: Shapes) -> dict[str, int]:
    """The product of the dims that share a letter, from the first tensor that has all of them."""
    sizes = {"b": 1, "m": 1, "n": 1, "k": 1}
    for name, tensor in zip(names, tensors, strict=False):
        for letter in set(name) - {"_"}:
            size = 1
            for label, dim in zip(name, tensor.shape, strict=False):
                size *= dim if label == letter else 1
            sizes[letter] = max(sizes.get(letter, 1), size)
    return sizes


def _linear(inputs: Shapes) -> tuple[str, ...]:
    rows = "m" * (len(inputs[0].shape) - 1)
    bias = ("n",) if len(inputs) > 2 else ()
    return (rows + "k", "nk", *bias, rows + "n")


def _addmm(inputs: Shapes) -> tuple[str, ...]:
    bias = "n" if len(inputs[0].shape) == 1 else "mn"
    return (bias, "mk", "kn", "mn")


def _matmul(inputs: Shapes) -> tuple[str, ...] | None:
    first, second = len(inputs[0].shape), len(inputs[1].shape)
    if first < 2 or second < 2:
        return None
    if second == 2:
        rows = "m" * (first - 1)
        return (rows + "k", "kn", rows + "n")
    if first == 2:
        return None
    batch = "b" * (max(first, second) - 2)
    left = "".join("_" if size == 1 else "b" for size in inputs[0].shape[:-2])
    right = "".join("_" if size == 1 else "b" for size in inputs[1].shape[:-2])
    return (left + "mk", right + "kn", batch + "mn")


def _baddbmm(inputs: Shapes) -> tuple[str, ...]:
    return ("_" * len(inputs[0].shape), "bmk", "bkn", "bmn")


def _grouped(inputs: Shapes) -> tuple[str, ...] | None:
    if len(inputs[0].shape) != 2 or len(inputs[1].shape) != 3:
        return None
    rest = tuple("_" * len(t.shape) for t in inputs[2:])
    return ("mk", "ekn", *rest, "mn")


_FORMS = {
    "linear": _linear,
    "addmm": _addmm,
    "mm": _matmul,
    "bmm": _matmul,
    "matmul": _matmul,
    "baddbmm": _baddbmm,
    "_grouped_mm": _grouped,
    "grouped_mm": _grouped,
    "grouped_mm_fallback": _grouped,
}
_CONVOLUTIONS = frozenset(
    {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
)


def _einsum(constants: Sequence[object], inputs: Shapes) -> tuple[str, ...] | None:
    """Letters of the equation by where they occur: in both operands and the output b, in one of them m or n,
    in both but not in the output k."""
    equation = next((c for c in constants if isinstance(c, str)), "").replace(" ", "")
    if "->" not in equation or "." in equation or len(inputs) != 2:
        return None
    operands, result = equation.split("->")
    first, second = operands.split(",")

    def role(letter: str) -> str:
        if letter in first and letter in second:
            return "b" if letter in result else "k"
        return "m" if letter in first else "n"

    return tuple("".join(map(role, term)) for term in (first, second, result))


def _convolution(inputs: Shapes, outputs: Shapes, transposed: bool) -> Labels:
    """A convolution as a product: m output positions, n output channels, k input channels × window; b groups."""
    weight, out = inputs[1].shape, outputs[0].shape
    spatial = len(weight) - 2
    groups = max(1, (inputs[0].shape[-spatial - 1]) // weight[0 if transposed else 1])
    if transposed:
        groups = max(1, out[-spatial - 1] // weight[1])
    batch = "m" if len(out) == spatial + 2 else ""
    bias = ("n",) if len(inputs) > 2 else ()
    window = "k" * spatial
    names = (
        batch + "k" + "_" * spatial,
        ("kn" if transposed else "nk") + window,
        *bias,
        batch + "n" + "m" * spatial,
    )
    positions = 1
    for size in (out[:1] if batch else ()) + out[-spatial:]:
        positions *= size
    contracted = 1
    for size in weight[1:] if not transposed else (weight[0] // groups, *weight[2:]):
        contracted *= size
    sizes = {"b": groups, "m": positions, "n": out[-spatial - 1] // groups, "k": contracted}
    return Labels(names, sizes)


def attention_labels(inputs: Shapes) -> Labels:
    """Labels of attention: b batch, h query heads, g key-value heads, s queries, t keys, d and v head sizes."""
    query, key, value = (t.shape for t in inputs[:3])
    batch = "b" * (len(query) - 3)
    names = (
        batch + "hsd",
        batch + "gtd",
        batch + "gtv",
        *("_" * len(t.shape) for t in inputs[3:]),
        batch + "hsv",
    )
    samples = 1
    for size in query[:-3]:
        samples *= size
    heads, kv_heads = (query[-3], key[-3]) if len(query) > 2 else (1, 1)
    sizes = {
        "b": samples, "h": heads, "g": kv_heads, "s": query[-2], "t": key[-2], "d": query[-1], "v": value[-1],
    }  # fmt: skip
    return Labels(names, sizes)
