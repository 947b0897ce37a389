"""Collectives whose names torch has changed: 2.13 warns, in the user's terminal, of those that earlier ones have."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_torch: Any = dist
# all_gather_single(whole, part, group=…, async_op=…), reduce_scatter_single(part, whole, op=…, group=…, async_op=…)
all_gather_single = getattr(_torch, "all_gather_single", None) or _torch.all_gather_into_tensor
reduce_scatter_single = getattr(_torch, "reduce_scatter_single", None) or _torch.reduce_scatter_tensor
