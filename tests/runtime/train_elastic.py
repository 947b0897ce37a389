"""A run of `Trainer` that tests interrupt: an MLP in float64 on 37 samples; every rank writes down what it has done.

train_elastic.py FOLDER STEPS [TIMEOUT_S]; a file FOLDER/strategy-WORLD.toml is the strategy of so many processes, and where there is a
file FOLDER/hold-WORLD so many processes stop after the step in it until it is gone or they are told to end.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from autoparallel import Trainer
from autoparallel.runtime.guards.guards import GuardOptions
from autoparallel.trainer import Step
from tests.runtime.models import Mlp


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=random, dtype=torch.float64), torch.randint(
            0, 10, (), generator=random
        )


def _held_at(hold: Path) -> float:
    """The step in the file; none where it is gone."""
    try:
        return int(hold.read_text())
    except (FileNotFoundError, ValueError):  # ValueError: it is being written
        return math.inf


def main(folder: Path, steps: int, timeout_s: float | None = None) -> Trainer:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    strategy = folder / f"strategy-{world}.toml"

    def note(step: Step) -> None:
        with (folder / f"log-{os.getpid()}.jsonl").open("a", encoding="utf-8") as log:
            entry = {
                "step": step.number,
                "loss": step.loss,
                "ids": step.ids,
                "world": world,
                "pid": os.getpid(),
            }
            log.write(json.dumps({**entry, "share": trainer.model.data_parallel_rank}) + "\n")
        hold = folder / f"hold-{world}"
        while step.number >= _held_at(hold) and not trainer.interrupted:
            time.sleep(0.02)

    trainer = Trainer(
        Mlp().double(),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=40),
        data=Numbers(),
        global_batch=8,
        loss_fn=F.cross_entropy,
        strategy=strategy if strategy.exists() else None,
        cluster="cpu-gloo:1x1",
        folder=folder / "run",
        every=3,
        on_step=note,
        guards=GuardOptions(timeout_s=timeout_s, checksums_every=2),
    )
    trainer.fit(steps)
    return trainer


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:]))
