"""Rows of an embedding whose vocabulary is sharded over tp, looked up on each rank's share of it.

DTensor (torch 2.13) looks up shares, too, but makes the gradient of the whole vocabulary on every rank before it cuts
its share out: 1 GB for 128,000 rows of 4,096 bf16 numbers, whatever the number of ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from autoparallel.runtime.tensor.questions import to_plain

_SIGNATURE = inspect.signature(F.embedding)


def rows_of_shares(args: Any, kwargs: Any) -> Tensor | None:
    """What `F.embedding` returns for these arguments, (*indices, numbers), as a sum over tp that is still to be taken;
    None where it is not the rows that are sharded, or not in equal shares."""
    call = _SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    if not _handles(call.arguments):
        return None
    weight: DTensor = call.arguments["weight"]
    indices, padding = to_plain(call.arguments["input"]), call.arguments["padding_idx"]
    part = weight.to_local(grad_placements=[Shard(0)])
    first = weight.device_mesh.get_local_rank() * len(part)
    index = indices - first
    mine = (index >= 0) & (index < len(part))
    if padding is not None:  # the row that gets no gradient: of another rank's, nobody here asks
        own = padding % len(weight) - first
        padding = own if 0 <= own < len(part) else None
    rows = F.embedding(torch.where(mine, index, 0), part, padding).masked_fill(~mine.unsqueeze(-1), 0.0)
    return DTensor.from_local(rows, weight.device_mesh, [Partial()], run_check=False)


def _handles(call: Mapping[str, Any]) -> bool:
    weight = call["weight"]
    if not isinstance(weight, DTensor) or weight.device_mesh.ndim != 1 or weight.placements != (Shard(0),):
        return False
    unusual = call["max_norm"] is not None or call["scale_grad_by_freq"] or call["sparse"]
    return not unusual and len(weight) % weight.device_mesh.size() == 0
