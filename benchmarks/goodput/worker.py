"""A paced run on a node: `python -m benchmarks.goodput.worker FOLDER POLICY EVERY STORED`, under `autoparallel run`.

Writes down every step that is done, with the time. A sample takes `SAMPLE_S`, so that a rank with twice the samples takes twice
as long; what the two cores of this machine do besides is a small part of a step.
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

from autoparallel import ReplicaTrainer, Trainer
from autoparallel.replicated import ReplicaOptions
from autoparallel.trainer import PeerOptions, Step
from tests.runtime.models import Mlp
from tests.runtime.train_elastic import Numbers

SAMPLE_S, BATCH, NODES = 0.06, 8, 2
NODE = "GOODPUT_NODE"  # of the environment: which one this is
AT_MOST = 1_000_000  # steps, which no run comes to


def main(folder: Path, policy: str, every: int, stored: int = 1000) -> None:
    """Train until killed. `every`: steps between checkpoints; under "peers" between copies, and `stored` between checkpoints."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    node = os.environ[NODE]

    def note(step: Step) -> None:
        entry = {"step": step.number, "at": time.time(), "pid": os.getpid(), "node": int(node)}
        with (folder / f"log-{os.getpid()}.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")
        time.sleep(SAMPLE_S * len(step.ids))

    how = partial(
        ReplicaTrainer if policy == "drop-replica" else Trainer, Mlp().double(), folder=folder / "run", on_step=note,
        optimizer=partial(torch.optim.AdamW, lr=1e-3), data=Numbers(), global_batch=BATCH, loss_fn=F.cross_entropy,
        cluster="cpu-gloo:1x1",
    )  # fmt: skip
    if policy == "drop-replica":
        trainer = how(every=every, replicas=ReplicaOptions(count=NODES), strategy=folder / "strategy.toml")
    elif policy == "peers":
        trainer = how(every=stored, peers=PeerOptions(every=every, memory=folder / "memory" / node))
    else:
        trainer = how(every=every)
    trainer.fit(AT_MOST)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
