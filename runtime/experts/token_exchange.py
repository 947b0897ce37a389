"""Tokens to the ranks that hold the experts they chose, and back: the two exchanges of expert parallelism.

Every choice of a token is a row. Rows are put in the order of their experts, so that each rank's are next to each
other; the ranks tell each other how many rows they send for each expert, then send them. What the experts return
comes back by the same counts, and is weighted and summed where the token came from. Under autograd gradients take
the same ways in the opposite direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.runtime.torch_private import is_fake


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """Where the rows of this rank's tokens go: `token` is the token of each, by expert; `back` is where each row
    (token * choices + choice) stands in this order. `sent` and `received` are rows by rank, `expert` is the one of
    this rank's that each received row is for."""

    token: Tensor
    back: Tensor
    sent: list[int]
    received: list[int]
    expert: Tensor
    group: dist.ProcessGroup


def find_route(index: Tensor, experts: int, group: dist.ProcessGroup) -> Route:
    """The route of tokens that chose the experts `index` [tokens, choices], `experts` in all; collective.

    An index beyond the last expert chooses none. On tensors without values every expert is chosen equally often.
    """
    ranks, own = group.size(), experts // group.size()
    chosen = index.reshape(-1)
    order = torch.argsort(chosen, stable=True)
    back, token = torch.argsort(order), order // index.shape[-1]
    if is_fake(index):
        rows = chosen.numel()
        sent = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
        expert = torch.arange(sent[0] * ranks, device=index.device) % own
        return Route(
            token=token, back=back, sent=sent, received=[sent[0]] * ranks, expert=expert, group=group
        )
    # Counted on the device, which is waited for once, for the sizes of what is sent and received.
    bounds = torch.arange(experts + 1, device=index.device, dtype=chosen.dtype)
    counts = torch.searchsorted(chosen[order], bounds).diff()
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    sent, received = torch.stack([counts, arriving]).view(2, ranks, own).sum(dim=2).tolist()
    experts_of_rows = torch.arange(own, device=index.device).repeat(ranks)
    return Route(
        token=token[: sum(sent)], back=back, sent=sent, received=received,
        expert=experts_of_rows.repeat_interleave(arriving, output_size=sum(received)), group=group,
    )  # fmt: skip


def send_rows(hidden: Tensor, route: Route) -> Tensor:
    """The rows that chose this rank's experts, from `hidden` [tokens, width] of every rank; collective."""
    return _exchange(hidden[route.token], route.sent, route.received, route.group)


def return_rows(rows: Tensor, weights: Tensor, route: Route, *, gradient_scale: float) -> Tensor:
    """What each token gets [tokens, width], of what the experts made of its rows, by `weights` [tokens, choices].

    The gradient that goes to the experts is multiplied by `gradient_scale`. Collective.
    """
    rows = _exchange(rows, route.received, route.sent, route.group, gradient_scale)
    lost = len(route.back) - len(rows)  # rows for no expert stand last
    if lost:
        rows = torch.cat([rows, rows.new_zeros(lost, rows.shape[-1])])
    tokens, choices = weights.shape
    by_token = rows[route.back].view(tokens, choices, rows.shape[-1])
    return (by_token * weights.unsqueeze(-1)).sum(dim=1).to(rows.dtype)


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """The tensor itself, whose gradient is multiplied by `factor`."""
    scaled: Tensor = tensor if factor == 1.0 else _ScaledGradient.apply(tensor, factor)
    return scaled


def _exchange(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, scale: float = 1.0
) -> Tensor:
    exchanged: Tensor = _Exchange.apply(rows, sent, received, group, scale)
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, scale: float
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group, ctx.scale = sent, received, group, scale
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        scaled = gradient if ctx.scale == 1.0 else gradient * ctx.scale
        return _all_to_all(scaled, ctx.received, ctx.sent, ctx.group), None, None, None, None


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
