"""From a launched ATen operator to what the cost model knows: kind, FLOPs and bytes.

FLOPs are those of matrix products and convolutions, two per multiply-add, as torch.utils.flop_counter counts
them (its own formulas are called); everything else is priced by the bytes it moves. Bytes are the distinct
elements read plus the elements written, each once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from autoparallel.costmodel.graph import ITEM_BYTES, OpKind
from autoparallel.planner.capture.nodes import Launch, Meta

_KINDS: dict[OpKind, frozenset[str]] = {
    OpKind.GEMM: frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_scaled_mm"}),
    OpKind.GROUPED_GEMM: frozenset(
        {"_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward"}
    ),
    OpKind.CONV: frozenset({"convolution", "convolution_backward", "_convolution", "cudnn_convolution"}),
    OpKind.EMBEDDING: frozenset(
        {
            "embedding",
            "embedding_dense_backward",
            "_embedding_bag",
            "_embedding_bag_forward_only",
            "_embedding_bag_dense_backward",
            "_embedding_bag_backward",
        }
    ),
    OpKind.NORM: frozenset(
        {
            "native_layer_norm",
            "native_layer_norm_backward",
            "native_group_norm",
            "native_group_norm_backward",
            "_fused_rms_norm",
            "_fused_rms_norm_backward",
        }
    ),
    OpKind.BATCH_NORM: frozenset(
        {
            "native_batch_norm",
            "native_batch_norm_backward",
            "_native_batch_norm_legit",
            "_batch_norm_with_update",
            "batch_norm_backward",
        }
    ),
    OpKind.SOFTMAX: frozenset(
        {"_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"}
    ),
    OpKind.CROSS_ENTROPY: frozenset(
        {"nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"}
    ),
    OpKind.DROPOUT: frozenset({"native_dropout", "native_dropout_backward"}),
    OpKind.POOL: frozenset(
        {
            "max_pool2d_with_indices",
            "max_pool2d_with_indices_backward",
            "avg_pool2d",
            "avg_pool2d_backward",
            "_adaptive_avg_pool2d",
            "_adaptive_avg_pool2d_backward",
        }
    ),
    OpKind.REDUCTION: frozenset(
        {
            "sum", "mean", "var", "var_mean", "std", "amax", "amin", "max", "min", "any", "all", "argmax", "argmin",
            "prod", "norm", "linalg_vector_norm", "logsumexp", "cumsum", "cumprod", "topk", "sort", "histc",
            "bincount",

        }
    ),
}  # fmt: skip
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}

# Allocation without initialisation, and torch's bookkeeping: no kernel runs.
_NO_KERNEL = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh"}
)
_COPIES = frozenset({"clone", "copy_", "fill_", "zero_"})  # tagged pointwise, but nothing is computed
_CASTS = frozenset({"_to_copy"})
# What is read is as large as what is written, whatever the size of the table that is read from.
_GATHERS = frozenset({"embedding", "index", "index_select", "gather", "select_scatter"})
_WRITES_ONLY = frozenset(
    {"fill_", "zero_", "zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like"}
)


def short_name(target: str) -> str:
    """ "aten.mm.default" -> "mm"."""
    return target.split(".")[1]


def runs_kernel(launch: Launch) -> bool:
    """Whether anything runs on the device."""
    return not launch.is_view and short_name(launch.target) not in _NO_KERNEL


def named_kind(name: str) -> OpKind | None:
    """The kind of an operator that its name (without namespace and overload) tells; None where it does not."""
    return _KIND_OF.get(name)


def kind_of(launch: Launch) -> OpKind:
    """The kind of a launch, from its name, or from the pointwise tag of its schema."""
    name = short_name(launch.target)
    if name in _KIND_OF:
        return _KIND_OF[name]
    pointwise = torch.Tag.pointwise in launch.signature[0].tags and name not in _COPIES
    return OpKind.ELEMENTWISE if pointwise or name in _CASTS else OpKind.COPY


def tensor_bytes(meta: Meta) -> int:
    """Bytes of the distinct elements of a tensor."""
    return meta.distinct * ITEM_BYTES.get(meta.dtype, 4)


def launch_bytes(launch: Launch) -> int:
    """Bytes read and written by one launch."""
    name = short_name(launch.target)
    written = sum(tensor_bytes(m) for m in launch.outputs)
    if name in _WRITES_ONLY:
        return written
    if name in _GATHERS:
        return 2 * written + sum(tensor_bytes(m) for m in launch.inputs[1:])
    if name == "copy_":
        return written + tensor_bytes(launch.inputs[-1])
    if name == "slice_backward":  # zero-fill, then copy the slice in
        return written + 2 * sum(tensor_bytes(m) for m in launch.inputs)
    if name == "nll_loss_forward":  # one probability and one class index a row
        target = launch.inputs[1]
        return tensor_bytes(target) + target.distinct * ITEM_BYTES[launch.inputs[0].dtype] + written
    return written + sum(tensor_bytes(m) for m in launch.inputs)


def launch_flops(launch: Launch) -> int:
    """FLOPs by torch's own formula; 0 where it has none."""
    func, args, kwargs = launch.signature
    packet = getattr(func, "overloadpacket", func)
    if short_name(launch.target) in _KINDS[OpKind.GROUPED_GEMM]:
        return _grouped_flops(launch)
    if packet not in flop_registry:
        return 0
    return int(flop_registry[packet](*args, **kwargs, out_val=_output_like(launch)))


def _output_like(launch: Launch) -> Any:
    outputs = [torch.empty(m.shape, device="meta") for m in launch.outputs]
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _grouped_flops(launch: Launch) -> int:
    """2 · rows · n · k: every row of the input meets one expert's matrix, however the rows are split."""
    first, second = launch.inputs[0].shape, launch.inputs[1].shape
    if len(first) == 2 and len(second) == 3:
        return 2 * first[0] * second[1] * second[2]
    if len(first) == 2 and len(second) == 2:  # weight gradient: contracted over the rows
        return 2 * first[0] * first[1] * second[1]
    return 2 * first[0] * first[1] * first[2] * second[-1]


def attention_flops(sizes: Mapping[str, int], needs: tuple[bool, bool, bool] | None = None) -> int:
    """FLOPs of attention over the full square, not halved for a causal mask. Kind: formula.

    Forward, two products: 2·b·h·s·t·(d + v). Backward, for the gradients `needs` of query, key and value: each of
    query and key 2·b·h·s·t·d, the value's 2·b·h·s·t·v, and as much for the probabilities' if query or key is
    asked for: twice the forward for all. What flash attention computes again there is recomputation, which the
    cost model counts.
    """
    b, h, s, t, d, v = (sizes[letter] for letter in "bhstdv")
    square = 2 * b * h * s * t
    if needs is None:
        return square * (d + v)
    query, key, value = needs
    return square * (d * (query + key) + v * (value + (query or key)))


def convolution_gradient(launch: Launch, position: int) -> tuple[int, int] | None:
    """FLOPs and bytes of one half of convolution_backward: the gradient of the input (0) or the weight (1).

    None where that gradient is not asked for. The operator computes both in one call, with one kernel each.
    """
    func, args, _ = launch.signature
    mask = [False, False, False]
    mask[position] = True
    if not args[-1][position]:
        return None
    flops = int(flop_registry[func.overloadpacket](*args[:-1], mask, out_val=_gradients_like(launch)))
    if position == 1:  # torch counts products of all channels with all, whatever the groups
        flops //= args[-2]
    gradient, other = launch.inputs[0], launch.inputs[2 - position]
    written = launch.inputs[1 + position]
    return flops, sum(tensor_bytes(m) for m in (gradient, other, written))


def _gradients_like(launch: Launch) -> tuple[Any, Any, Any]:
    first, second = (torch.empty(m.shape, device="meta") for m in launch.inputs[1:3])
    return first, second, None
