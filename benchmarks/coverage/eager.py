"""What torch itself says of a training step of a small model on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from autoparallel.costmodel.graph import ITEM_BYTES, ModelGraph
from autoparallel.planner.capture.library_kernels import KERNELS, library_kernels
from autoparallel.planner.capture.trees import mapped, plain, tensors
from benchmarks.coverage.composed import Composed


def with_numbers(inputs: Any) -> Any:
    """Inputs with random numbers where they are on the meta device."""
    generator = torch.Generator().manual_seed(0)

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return leaf
        return torch.randn(leaf.shape, generator=generator).to(leaf.dtype)

    return mapped(real, inputs)


def differentiated(output: Any) -> list[Tensor]:
    """What capture differentiates: the scalar loss, or all that needs a gradient."""
    found = [t for t in tensors(plain(output)) if t.requires_grad]
    loss = next((t for t in found if t.numel() == 1), None)
    return found if loss is None else [loss]


def loss_of(output: Any) -> Tensor:
    """A scalar whose gradients are those of all that is differentiated."""
    return torch.stack([t.sum() for t in differentiated(output)]).sum()


def saved_bytes(module: nn.Module, inputs: Mapping[str, Any], mode: Composed | None = None) -> int:
    """Bytes of the distinct storages that autograd keeps in one forward, without parameters and buffers; with a `mode` those
    of what it runs in the place of what torch has for CPUs alone."""
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    whole = library_kernels(module) if mode else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), mode or nullcontext(), whole:
        output = module(**inputs)
    del output
    return sum(size for size, _ in kept.values())


def _of_gradients(grad: Any, given: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """Of a convolution's gradients each takes what the convolution took. torch counts products of all channels with all for that of
    the weight, whatever the groups (torch 2.13)."""
    transposed, asked = rest[4], rest[-1]
    return sum(asked[:2]) * int(conv_flop_count(given, weight, grad, transposed))


GROUPS = {torch.ops.aten.convolution_backward: _of_gradients}


def counted_flops(module: nn.Module, inputs: Mapping[str, Any]) -> int:
    """FLOPs of forward and backward as torch counts them, attention by the math kernel, recurrent layers step by step; those of
    kernels of other libraries (`library_flops`) are not among them."""
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False, custom_mapping=GROUPS) as counter,
        library_kernels(module),
    ):
        with Composed(fused=False):
            found = differentiated(module(**inputs))
        torch.autograd.backward(found, [torch.ones_like(t) for t in found])
    return int(counter.get_total_flops())


def library_flops(graph: ModelGraph, micro_batch: int) -> int:
    """FLOPs of the kernels of other libraries over the whole chain."""
    operators = [op for link in graph.chain for op in graph.blocks[link.block].operators]
    calls = [op for op in operators if op.target.rpartition(".")[2] in KERNELS]
    return sum(k.flops.at(micro_batch) for op in calls for k in (*op.forward, *op.backward))


def graph_saved_bytes(graph: ModelGraph, micro_batch: int) -> int:
    """Bytes of the saved storages over the whole chain."""
    return sum(
        saved.spec.numel(micro_batch) * ITEM_BYTES[saved.spec.dtype]
        for link in graph.chain
        for op in graph.blocks[link.block].operators
        for saved in op.saved
    )
