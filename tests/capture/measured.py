"""What torch itself says about a training step on real CPU tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autoparallel.costmodel.graph import ModelGraph
from benchmarks.coverage.eager import GROUPS


def eager_saved_bytes(module: nn.Module, inputs: Mapping[str, Any]) -> int:
    """Bytes of the distinct storages that autograd keeps in one forward, without parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss_of(module(**inputs))
    return sum(size for size, _ in kept.values())


def counted_flops(module: nn.Module, inputs: Mapping[str, Any]) -> int:
    """FLOPs of forward and backward as torch counts them, attention by the math kernel."""
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False, custom_mapping=GROUPS) as counter,
    ):
        loss_of(module(**inputs)).backward()
    return int(counter.get_total_flops())


def loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output if output.dim() == 0 else output.sum()
    loss = output.loss
    assert isinstance(loss, torch.Tensor)
    return loss


def show_saved(graph: ModelGraph) -> str:
    """The saved storages of each distinct block, for a failing test to print."""
    return "\n".join(
        f"{block.name} {op.name}@{op.module}: {saved.value or '-'} {saved.spec}"
        for block in graph.blocks
        for op in block.operators
        for saved in op.saved
    )
