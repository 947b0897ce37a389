"""A checkpoint that is never written: state under one strategy given to the same model under another, in the same processes.

What a rank holds is asked of all, name by name: whoever has shares of a tensor makes it whole, the first of them sends it to all
ranks, and each that wants a share takes it and forgets the rest. So beside both states one whole tensor is there at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoparallel.runtime.loading.materialise import share_of
from autoparallel.runtime.tensor.questions import as_bytes, local


@torch.no_grad()
def reshard(held: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What `wanted` names, with the values of `held`: tensors in the layout that `wanted` has them in, filled in place. Names
    that nobody holds keep their values. Collective over all ranks of the run."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if ranks > 1 else 0
    told = {name: _described(value) for name, value in held.items()}
    every: list[dict[str, Any]] = [told]
    if ranks > 1:
        every = [{} for _ in range(ranks)]
        dist.all_gather_object(every, told)
    found = dict(wanted)
    for name in sorted({name for one in every for name in one}):
        owner = next(n for n, one in enumerate(every) if name in one)
        about = every[owner][name]
        if about is None:
            if name in found:
                found[name] = _value(held, name, owner, ranks)
            else:
                _value(held, name, owner, ranks)
            continue
        shape, dtype = about
        whole = _whole(held[name]) if name in held else None  # collective among those that hold shares of it
        device = whole.device if whole is not None else _device(found, held)
        sent = (
            whole.contiguous()
            if whole is not None and rank == owner
            else torch.empty(shape, dtype=dtype, device=device)
        )
        if ranks > 1:
            dist.broadcast(as_bytes(sent), src=owner)
        if name in found and isinstance(found[name], Tensor):
            target = found[name]
            source = share_of(sent.to(local(target).dtype), target) if isinstance(target, DTensor) else sent
            local(target).copy_(local(source))
    return found


def names_of(held: Mapping[str, Any]) -> set[str]:
    """What any rank holds. Collective over all ranks of the run."""
    every = [list(held)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        every = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, list(held))
    return {name for names in every for name in names}


def _described(value: Any) -> tuple[torch.Size, torch.dtype] | None:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


def _whole(value: Any) -> Tensor:
    whole: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach()


def _device(*states: Mapping[str, Any]) -> torch.device:
    return next(
        (local(v).device for state in states for v in state.values() if isinstance(v, Tensor)),
        torch.device("cpu"),
    )


def _value(held: Mapping[str, Any], name: str, owner: int, ranks: int) -> Any:
    if ranks == 1:
        return held[name]
    one = [held.get(name)]
    dist.broadcast_object_list(one, src=owner)
    return one[0]
