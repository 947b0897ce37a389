"""A run of `Trainer` over links that a test slows down, or takes away: an MLP of two million numbers, replicas.

train_links.py FOLDER STEPS TIMEOUT_S [HOLD]: rank 0 writes every step's number to FOLDER/step.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from autoparallel import Trainer
from autoparallel.runtime.guards.guards import GuardOptions
from autoparallel.runtime.monitor.monitor import MonitorOptions
from autoparallel.runtime.ranks.mesh import world_size
from autoparallel.trainer import Step
from tests.runtime.train_elastic import Numbers

WIDTH = 256


class Wide(Numbers):
    """The same samples in float32."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = super().__getitem__(index)
        return inputs.float(), target


def main(folder: Path, steps: int, timeout_s: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )
    strategy = folder / "strategy.toml"

    def note(step: Step) -> None:
        if trainer.rank == 0:
            (folder / "step").write_text(str(step.number))

    if not strategy.exists():
        strategy.write_text(f"[mesh]\npp = 1\ntp = 1\ndp_replicate = {world_size()}\n")
    trainer = Trainer(
        module, optimizer=partial(torch.optim.SGD, lr=1e-2), data=Wide(), global_batch=12, loss_fn=F.cross_entropy,
        strategy=strategy, cluster=f"cpu-gloo:{world_size()}x1", folder=folder / "run", every=10**6, on_step=note,
        guards=GuardOptions(timeout_s=timeout_s), monitor=MonitorOptions(links_every=1),
    )  # fmt: skip
    trainer.fit(steps)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
