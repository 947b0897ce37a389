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


# Of four processes, and of a weight that the first and the last pipeline stage have, and vectors that tp keeps whole.
COPIES = "[mesh]\npp = {}\ntp = {}\ndp_replicate = {}\ndp_shard = {}\n[shard]\nzero = {}\nsequence_parallel = false\n"
PIPELINE, TENSORS = COPIES.format(2, 1, 2, 1, 0), COPIES.format(1, 2, 2, 1, 0)
COPIED_RUNS = {
    "plain": [(COPIES.format(1, 1, 4, 1, 0), 6)],
    "tied across stages, then on one rank, then again": [
        (PIPELINE + LOSSY, 2),
        (COPIES.format(1, 1, 4, 1, 0) + LOSSY, 4),
        (PIPELINE, 6),
    ],
    "kept whole by tp, then by shards in stages": [
        (TENSORS + LOSSY.replace("topk:0.1", "sign"), 2),  # whose scale is each peer's own
        (COPIES.format(2, 1, 1, 2, 3) + LOSSY, 4),
        (COPIES.format(1, 2, 1, 2, 2), 6),
    ],
}


class Sums(nn.Module):
    """Its gradients are those of its inputs, whatever its parameters are: steps of SGD add them up."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = sum((layer(x) for layer in self.layers), torch.zeros(()))
        return (found * torch.linspace(0.5, 2.0, 16, dtype=x.dtype)).mean()


class Added(nn.Module):
    """A block of `Chain`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, both: Tensor) -> Tensor:
        x, found = both.chunk(2, dim=-1)
        return torch.cat([x, found + self.linear(x) + 0.1 * x * self.scale], dim=-1)


class Chain(nn.Module):
    """As `Sums`, in blocks, with a weight in front of them that is another's behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.last.weight = self.first.weight
        self.layers = nn.ModuleList(Added() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x, self.first(x)], dim=-1)
        for layer in self.layers:
            both = layer(both)
        x, found = both.chunk(2, dim=-1)
        found = found + self.last(x.square())
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
    kind, runs = (Sums, RUNS) if world_size == 2 else (Chain, COPIED_RUNS)
    for name, starts in runs.items():
        path = Path(folder) / name.replace(" ", "-")
        for number, (text, end) in enumerate(starts):
            file = path / f"{number}.toml"
            if rank == 0:
                path.mkdir(exist_ok=True)
                file.write_text("[batch]\nglobal = 8\nmicro = 2\n" + text)
            torch.distributed.barrier()
            torch.manual_seed(0)
            trainer = (Once if "rolled back" in name else Quiet)(
                kind().double(), optimizer=partial(torch.optim.SGD, lr=1.0), data=Numbers(), global_batch=8,
                strategy=file, cluster=f"cpu-gloo:1x{world_size}", folder=path / "run", every=2,
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


@pytest.mark.distributed
def test_what_several_ranks_owe_of_one_parameter_arrives_once(gloo: Processes, tmp_path: Path) -> None:
    found = gloo.run(4, cases, folder=str(tmp_path))[0]
    for name, state in found.items():
        for key, value in state.items():
            torch.testing.assert_close(
                value,
                found["plain"][key],
                rtol=1e-9,
                atol=1e-9,
                msg=lambda m, w=f"{name}: {key}": f"{w}: {m}",
            )
