"""When parameters of ZeRO are gathered: before anything needs them; and that blocks which a step leaves out do no harm."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Shard, Strategy
from autoparallel.runtime.gradients.gathered import UnitGather
from autoparallel.runtime.start import parallelize
from tests.runtime.harness import Processes

pytestmark = pytest.mark.distributed
WIDTH, BLOCKS = 8, 4
SKIPPED = (-1, 2, -1, 1, 3, -1)  # by step


class Skipping(nn.Module):
    """Blocks one after the other, but for one that is left out, as under stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)
        self.skipped = -1

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number != self.skipped:
                x = x + block(x)
        return self.head(x).pow(2).mean()  # type: ignore[no-any-return]


class Told(UnitGather):
    """The backend's own way, noted."""

    def __init__(self, events: list[str]) -> None:
        super().__init__("none")
        self._events = events

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._events.append("gather")
        return super().__call__(*args, **kwargs)


def trained(rank: int, world_size: int, zero: int) -> dict[str, Any]:
    """Losses of steps here and in one process, and when each block ran and was gathered in the last one."""
    execution = Execution(dtype="fp32", param_dtype="fp32", grad_dtype="fp32", kernels="eager", fsdp2=True)
    strategy = Strategy(
        batch=Batch(global_=8, micro=2), mesh=Mesh(dp_shard=world_size), shard=Shard(zero=zero), execution=execution
    )  # fmt: skip
    alone = Skipping()
    module, x = copy.deepcopy(alone), torch.randn(8, WIDTH)
    mine = x.chunk(world_size)[rank]
    blocks = tuple(f"blocks.{i}" for i in range(BLOCKS))
    events: list[str] = []
    for number, block in enumerate(module.blocks):
        block.register_forward_hook(lambda *_, number=number: events.append(f"ran {number}"))
    model: Any = parallelize(module, (mine,), strategy, blocks=blocks, program=lambda: None)  # type: ignore[arg-type, return-value]
    optimizers = [
        model.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(alone.parameters(), lr=0.1),
    ]  # fmt: skip
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_custom_all_gather(Told(events))  # type: ignore[arg-type]
    losses = []
    for skipped in SKIPPED:
        events.clear()
        model.skipped = alone.skipped = skipped
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = alone(x)
        expected.backward()
        losses.append((model.step((mine,)).item(), expected.item()))
        for optimizer in optimizers:
            optimizer.step()
    return {"losses": losses, "events": events}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gathers_begin_ahead_of_what_needs_them_and_skipped_blocks_do_no_harm(
    gloo: Processes, zero: int
) -> None:
    found = gloo.run(2, trained, zero=zero)[0]
    for here, alone in found["losses"]:
        assert here == pytest.approx(alone, rel=1e-5)
    events = found["events"]
    ran = [events.index(f"ran {number}") for number in range(BLOCKS)]
    gathers = [events[:at].count("gather") for at in ran]
    if zero == 3:  # the head, which is the root, and each block with the one behind it
        assert gathers == [3, 4, 5, 5], events
    else:
        assert gathers == [BLOCKS + 1] * BLOCKS, events
        assert events.count("gather") == BLOCKS + 1, "and stay whole for all micro-batches"
