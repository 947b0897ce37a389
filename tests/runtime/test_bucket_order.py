"""Buckets leave as soon as their gradients are there, in whatever order modules are registered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autoparallel.runtime.gradients.feedback import Memory
from autoparallel.runtime.gradients.reductions import Reducer
from autoparallel.runtime.gradients.replicated import GradientSync

WIDTH, BUCKET = 16, 4 * 16 * 16


class Block(nn.Module):
    """Its norm is used first, so that its gradient comes last, and is registered last, as those of Llama are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Noted(Reducer):
    """Notes the numbers of each buffer when it leaves, and leaves it as it is."""

    biased = False

    def __init__(self, events: list[int]) -> None:
        self._events = events

    def start(self, buffer: Tensor, memory: Memory) -> Any:
        self._events.append(-buffer.numel())
        return Done()


class Done:
    held_bytes = 0

    def wait(self) -> None:
        pass


def test_no_bucket_waits_for_a_gradient_of_another_one_once_a_step_has_shown_their_order() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    events: list[int] = []  # numbers of gradients that come, and, negative, of buckets that leave
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: events.append(p.numel()))
    sync = GradientSync(
        model.parameters(),
        Noted(events),
        group=None,
        grad_dtype=torch.float32,
        bucket_bytes=BUCKET,
        overlap=True,
    )
    x, waits, gradients = torch.randn(4, WIDTH), [], []
    for _ in range(3):
        events.clear()
        sync.begin(2)
        for _ in range(2):
            model(x).square().mean().backward()
        del events[: len(list(model.parameters()))]  # of the first micro-batch, after which nothing leaves
        sync.finish()
        there = waiting = most = 0
        for event in events:
            there, waiting = there + max(event, 0), waiting + event
            most = max(most, waiting)
        assert waiting == 0
        waits.append(most)
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    block = 2 * WIDTH * WIDTH + WIDTH
    assert waits[0] >= block, (
        "the first step fills buckets before it knows: the norm, which comes last, stands in the first"
    )
    assert waits[1] == waits[2] <= BUCKET // 4 + WIDTH, "no more than a bucket and what does not fit in it"
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    torch.testing.assert_close(gradients[2], gradients[0], rtol=0, atol=0)
