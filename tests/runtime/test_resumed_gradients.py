"""What error feedback holds back is neither lost nor counted twice, whatever strategy and phase a run goes on under."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoparallel import Trainer
from autoparallel.runtime.guards.guards import GuardOptions
from tests.runtime.harness import Processes

REPLICAS = "[mesh]\npp = 1\ntp = 1\ndp_replicate = 2\ndp_shard = 1\n"
SHARDS = "[mesh]\npp = 1\ntp = 1\ndp_replicate = 1\ndp_shard = 2\n[shard]\nzero = {}\n"
LOSSY = '[grad_sync]\ncompression = ["topk:0.1"]\n'
PLAIN = '[grad_sync]\ncompression = ["none"]\n'
BETWEEN = """[[phase]]
from_step = 3
grad_sync.compression = ["topk:0.1"]
[[phase]]
from_step = 7
grad_sync.compression = ["none"]
"""
OTHER_MESHES = """[[phase]]
from_step = 3
mesh.dp_replicate = 1
mesh.dp_shard = 2
shard.zero = 3
batch.micro = 4
grad_sync.compression = ["topk:0.1"]
[[phase]]
from_step = 6
mesh.dp_replicate = 2
mesh.dp_shard = 1
shard.zero = 0
grad_sync.compression = ["sign"]
[[phase]]
from_step = 8
grad_sync.compression = ["none"]
"""
# Starts of one run: the strategy, and the step that each ends after. The last step of all sends what is owed.
RUNS = {
    "plain": [(REPLICAS, 8)],
    "lossy, then plain": [(REPLICAS + LOSSY, 5), (REPLICAS, 8)],
    "plain, then lossy, then plain": [(REPLICAS, 2), (REPLICAS + LOSSY, 6), (REPLICAS, 8)],
    "lossy over replicas, then over shards": [
        (REPLICAS + LOSSY, 3),
        (SHARDS.format(3) + LOSSY, 6),
        (SHARDS.format(2), 8),
    ],
    "a phase, interrupted before, inside and after": [
        (REPLICAS + PLAIN + BETWEEN, end) for end in (2, 4, 6, 8)
    ],
    "a phase over shards": [(SHARDS.format(3) + PLAIN + BETWEEN, end) for end in (4, 8)],
    "phases on other meshes": [(REPLICAS + PLAIN + OTHER_MESHES, 8)],
    "phases on other meshes, interrupted": [(REPLICAS + PLAIN + OTHER_MESHES, end) for end in (1, 4, 6, 8)],
    "plain, rolled back": [(REPLICAS, 8)],
    "a phase, rolled back to before it": [(REPLICAS + PLAIN + BETWEEN, 8)],
}


class Sums(nn.Module):
    """Its gradients are those of its inputs, whatever its parameters are: steps of SGD add them up."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = sum((layer(x) for layer in self.layers), torch.zeros(()))
        return (found * torch.linspace(0.5, 2.0, 16, dtype=x.dtype)).mean()


class Numbers(torch.utils.data.Dataset[Any]):
    fingerprint = "numbers"

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(16, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


class Quiet(Trainer):
    def _say(self, text: str) -> None:
        pass


class Once(Quiet):
    """The loss of step 4 is no number the first time, which leaves its batch out."""

    def _forward_and_backward(self, items: Any, own: list[Tensor]) -> Tensor:
        mean = super()._forward_and_backward(items, own)
        if self.step == 3 and not hasattr(self, "broken"):
            self.broken = True
            return mean * math.nan
        return mean


def cases(rank: int, world_size: int, folder: str) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, starts in RUNS.items():
        path = Path(folder) / name.replace(" ", "-")
        for number, (text, end) in enumerate(starts):
            file = path / f"{number}.toml"
            if rank == 0:
                path.mkdir(exist_ok=True)
                file.write_text("[batch]\nglobal = 8\nmicro = 2\n" + text)
            torch.distributed.barrier()
            torch.manual_seed(0)
            trainer = (Once if "rolled back" in name else Quiet)(
                Sums().double(), optimizer=partial(torch.optim.SGD, lr=1.0), data=Numbers(), global_batch=8,
                strategy=file, cluster="cpu-gloo:1x2", folder=path / "run", every=2,
                guards=GuardOptions(not_a_number="roll-back"),
                scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=9, gamma=0.0),
            )  # fmt: skip
            trainer.fit(end)
            trainer.close()
            torch.distributed.barrier()
        found[name] = trainer.model.full_state_dict()
    return found


@pytest.mark.distributed
def test_no_gradient_is_lost_or_counted_twice_where_a_run_goes_on_otherwise(
    gloo: Processes, tmp_path: Path
) -> None:
    found = gloo.run(2, cases, folder=str(tmp_path))[0]
    for name, state in found.items():
        plain = found["plain, rolled back" if "rolled back" in name else "plain"]
        for key, value in state.items():
            torch.testing.assert_close(value, plain[key], rtol=1e-9, atol=1e-9, msg=f"{name}: {key}")
    assert not torch.equal(found["plain"]["layers.0.weight"], found["plain, rolled back"]["layers.0.weight"])
