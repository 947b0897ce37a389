"""A replica of a run that tests kill: an MLP in float64 on 37 samples; every rank writes down what it has done.

train_replicas.py FOLDER COUNT PAUSE_S, under `autoparallel run --lighthouse … --replica …`; the run ends at the step, a multiple of
ten, that the file FOLDER/last names.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from autoparallel import ReplicaTrainer
from autoparallel.replicated import ReplicaOptions
from autoparallel.trainer import Step
from tests.runtime.models import Mlp
from tests.runtime.train_elastic import Numbers


def main(folder: Path, count: int, pause_s: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(
        os.environ["AUTOPARALLEL_REPLICA"] != "a"
    )  # others begin with other weights: those of "a" count

    def note(step: Step) -> None:
        with (folder / f"log-{os.getpid()}.jsonl").open("a", encoding="utf-8") as log:
            entry = {"step": step.number, "loss": step.loss, "ids": step.ids, "pid": os.getpid()}
            log.write(
                json.dumps({**entry, "replica": os.environ["AUTOPARALLEL_REPLICA"], "at": time.time()}) + "\n"
            )
        time.sleep(pause_s)

    trainer = ReplicaTrainer(
        Mlp().double(), replicas=ReplicaOptions(count=count), optimizer=partial(torch.optim.AdamW, lr=1e-2),
        scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=40), data=Numbers(), global_batch=8,
        loss_fn=F.cross_entropy, strategy=folder / "strategy.toml", cluster=f"cpu-gloo:1x{os.environ['WORLD_SIZE']}", folder=folder / "run",
        every=5, on_step=note,
    )  # fmt: skip
    last = folder / "last"
    while not last.exists() or trainer.step < int(last.read_text()):
        trainer.fit((trainer.step // 10 + 1) * 10)
    trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
