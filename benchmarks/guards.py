"""What guards cost, and whether they cry wolf: `python benchmarks/guards.py [--steps 10000] [--width 1024]`.

Two Gloo processes train replicas of an MLP. The first part times a step and, in it, the check for numbers that are none and the
comparison of replicas. The second compares replicas after every one of so many clean steps of a small model: each difference
that is told is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from autoparallel import auto_parallelize
from autoparallel.planner.strategy.types import Batch, Mesh, Pipeline, Strategy
from autoparallel.profiles import load_cluster
from autoparallel.runtime.guards.checksums import Checksums
from autoparallel.runtime.guards.deadline import Deadline
from autoparallel.runtime.guards.guards import GuardOptions, Guards, Verdict
from autoparallel.runtime.guards.status import StatusFile
from autoparallel.runtime.ranks.agreement import Agreement

RANKS = 2


def _model(width: int, layers: int, batch: int) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())))
    strategy = Strategy(
        batch=Batch(global_=batch * RANKS, micro=batch), mesh=Mesh(dp_replicate=RANKS), pipeline=Pipeline(stage_blocks=())
    )  # fmt: skip
    return auto_parallelize(
        module,
        torch.zeros(batch, width),
        strategy=strategy,
        cluster=load_cluster(f"cpu-gloo:1x{RANKS}"),
        cache=None,
    )


def _rank(rank: int, folder: str, steps: int, width: int, timed: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    everyone = Agreement(600.0)
    found: dict[str, float] = {}
    batch = 256
    model = _model(width, 4, batch)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
    status = StatusFile(Path(folder) / "ranks", rank)
    guards = Guards(
        model, everyone, status, Deadline(Path(folder) / "ranks", rank, status), GuardOptions(checksums_every=0), lambda text: print(text, file=sys.stderr)
    )  # fmt: skip
    inputs = torch.randn(batch, width)
    whole, numbers, equal = [], [], []
    for step in range(timed + 3):
        begun = time.perf_counter()
        optimizer.zero_grad()
        loss = float(model.step(inputs, inputs, loss_fn=nn.functional.mse_loss))
        dist.barrier()  # what is waited for is not the guards'
        middle = time.perf_counter()
        assert guards.judge(step, loss, [], []) is Verdict.TAKE
        judged = time.perf_counter()
        optimizer.step()
        ended = time.perf_counter()
        dist.barrier()
        compare = time.perf_counter()
        assert guards.equal(step)
        equal.append(time.perf_counter() - compare)
        whole.append(ended - begun)
        numbers.append(judged - middle)
    found["step_s"], found["numbers_s"], found["equal_s"] = (median(t[3:]) for t in (whole, numbers, equal))
    guards.close()
    small = _model(32, 2, 4)
    optimizer = small.optimizer(torch.optim.AdamW, lr=1e-3)
    checks = [Checksums(small.named_parameters(), everyone, exact=exact) for exact in (True, False)]
    alarms = 0
    for _ in range(steps):
        optimizer.zero_grad()
        small.step(torch.randn(4, 32), torch.randn(4, 32), loss_fn=nn.functional.mse_loss)
        optimizer.step()
        alarms += sum(bool(check.find()) for check in checks)
    if rank == 0:
        found |= {
            "numbers_share": found["numbers_s"] / found["step_s"],
            "equal_share_every_100": found["equal_s"] / 100 / found["step_s"],
            "clean_steps": steps, "false_alarms": alarms,
        }  # fmt: skip
        print(json.dumps(found, indent=2))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--timed", type=int, default=30)
    parser.add_argument("--width", type=int, default=1024)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(folder, given.steps, given.width, given.timed), nprocs=RANKS)


if __name__ == "__main__":
    main()
