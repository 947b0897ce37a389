"""Goodput measured against predicted, under seeded kills: `python -m benchmarks.goodput --minutes 4`.

Two processes train with paced steps. A seeded Poisson process says when one of them is killed with SIGKILL; the agent restarts
both. Under `restart` they go on from the last checkpoint in storage, under `peers` from the copies in memory, which are made after
every step. Goodput is the work that is left at the end (steps, each as long as an undisturbed one) over the time that passed.

What the formulas of `costmodel/recovery.py` are told is measured in a run of its own before: the step, what a save stops it for,
and how long after a kill the first step begins. Two predictions stand beside the measured goodput: that for the mean time between
failures, and what a run comes to that is walked through the very failures that came, which the draw of a few failures does not
blur. Prints a JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PACE_S = 0.25  # a step waits so long
POLICIES = ("restart", "peers")
WORLD = 2
WAIT_S = 180.0
AT_MOST = 1_000_000  # steps, which no run comes to


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the formulas are told, in seconds."""

    step_s: float
    stall_s: float
    until_back_s: float


def worker(folder: Path, policy: str, every: int) -> None:
    """Train, and write down each step that is done, with the time."""
    import torch
    import torch.nn.functional as F

    from autoparallel import Trainer
    from autoparallel.trainer import PeerOptions, Step
    from tests.runtime.models import Mlp
    from tests.runtime.train_elastic import Numbers

    torch.set_num_threads(1)
    torch.manual_seed(0)

    def note(step: Step) -> None:
        entry = {"step": step.number, "at": time.time(), "pid": os.getpid()}
        with (folder / f"log-{os.getpid()}.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")
        time.sleep(PACE_S)

    in_memory = PeerOptions(every=1, memory=str(folder / "memory")) if policy == "peers" else None
    trainer = Trainer(
        Mlp().double(), optimizer=partial(torch.optim.AdamW, lr=1e-3), data=Numbers(), global_batch=8,
        loss_fn=F.cross_entropy, cluster="cpu-gloo:1x1", folder=folder / "run", every=every, peers=in_memory,
        on_step=note,
    )  # fmt: skip
    trainer.fit(AT_MOST)


def _done(folder: Path) -> list[dict[str, Any]]:
    lines = (line for log in folder.glob("log-*.jsonl") for line in log.read_text().splitlines())
    return sorted((json.loads(line) for line in lines if line.endswith("}")), key=lambda entry: entry["at"])


@dataclass(slots=True)
class Run:
    """A run under an agent, which is killed when the block ends."""

    folder: Path
    policy: str
    every: int
    agent: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Run:
        command = [sys.executable, "-m", "autoparallel", "run", "--nproc-per-node", str(WORLD)]
        command += [
            __file__,
            "--worker",
            str(self.folder),
            "--policy",
            self.policy,
            "--every",
            str(self.every),
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (self.folder / "said").open("ab") as said:
            self.agent = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        return self

    def __exit__(self, *_: object) -> None:
        assert self.agent is not None
        self.agent.kill()
        self.agent.wait()

    def until(self, steps: int, known: set[int]) -> list[dict[str, Any]]:
        """Wait until processes that are not among the `known` have done so many steps; what they did."""
        begun = time.monotonic()
        while True:
            now = [entry for entry in _done(self.folder) if entry["pid"] not in known]
            if len({entry["step"] for entry in now}) >= steps:
                return now
            assert self.agent is not None
            if self.agent.poll() is not None or time.monotonic() - begun > WAIT_S:
                raise SystemExit(f"no steps: {(self.folder / 'said').read_text()[-2000:]}")
            time.sleep(0.02)


def _kill_one(entries: list[dict[str, Any]], known: set[int], draw: random.Random) -> set[int]:
    """Kill one of the processes that did the entries; all of them."""
    ranks = {entry["pid"] for entry in entries} - known
    with contextlib.suppress(ProcessLookupError):
        os.kill(draw.choice(sorted(ranks)), signal.SIGKILL)
    return known | ranks


def measured(folder: Path, policy: str, every: int, kills: int) -> Measured:
    """The step, the stall of a save and the way back, in a run of its own."""
    backs, known, draw = [], set[int](), random.Random(policy)
    with Run(folder, policy, every) as run:
        quiet = run.until(6 * every, known)
        for _ in range(kills):
            killed_at = time.time()
            known = _kill_one(_done(folder), known, draw)
            first = run.until(1, known)[0]
            backs.append(first["at"] - killed_at)
            run.until(3, known)
    one = [entry for entry in quiet if entry["pid"] == quiet[0]["pid"]]
    longer = [after["at"] - before["at"] for before, after in pairwise(one)]
    # Under `peers` every step makes a copy, which is part of it. A save may stop any step: what is above the usual one.
    step_s = mean(longer) if policy == "peers" else median(longer)
    stall_s = max(mean(longer) - step_s, 0.0) * every
    return Measured(step_s=step_s, stall_s=stall_s, until_back_s=mean(backs))


def walked(told: Measured, every: int, kills: list[float], whole_s: float) -> float:
    """Goodput of a run that meets these failures, at these seconds of working since the last way back."""
    useful = 0.0
    for alive_s in [*kills, None]:
        left_s = whole_s if alive_s is None else min(alive_s, whole_s)
        block_s = every * told.step_s + told.stall_s
        blocks, rest_s = divmod(left_s, block_s)
        useful += blocks * every * told.step_s
        if alive_s is None or alive_s >= whole_s:
            useful += rest_s  # what stands at the end counts, saved or not
            break
        whole_s -= left_s + told.until_back_s
        if whole_s <= 0:
            break
    return useful


def case(folder: Path, policy: str, every: int, mtbf_s: float, minutes: float, seed: int) -> dict[str, Any]:
    """One run under kills, and what is said of it."""
    from autoparallel.costmodel.recovery import with_checkpoints

    (folder / "quiet").mkdir(parents=True)
    (folder / "killed").mkdir()
    told = measured(folder / "quiet", policy, every, kills=3)
    draw, known, lived = random.Random(seed), set[int](), []
    with Run(folder / "killed", policy, every) as run:
        begun = run.until(1, known)[0]["at"]
        resumed, end = begun, begun + 60 * minutes
        while (due := resumed + draw.expovariate(1 / mtbf_s)) < end:
            time.sleep(max(due - time.time(), 0.0))
            lived.append(time.time() - resumed)
            known = _kill_one(_done(run.folder), known, draw)
            resumed = run.until(1, known)[0]["at"]
        time.sleep(max(end - time.time(), 0.0))
        done = [entry for entry in _done(run.folder) if entry["at"] <= end]
    last = max(entry["step"] for entry in done if entry["at"] >= resumed)
    whole_s = end - begun
    every_s = told.step_s if policy == "peers" else every * told.step_s
    each = 1 if policy == "peers" else every
    return {
        "policy": policy,
        "seed": seed,
        "failures": len(lived),
        "step_s": told.step_s,
        "stall_s": told.stall_s,
        "until_back_s": told.until_back_s,
        "goodput": last * told.step_s / whole_s,
        "predicted": with_checkpoints(every_s, told.stall_s, told.until_back_s, mtbf_s),
        "predicted_for_these_failures": walked(told, each, lived, whole_s) / whole_s,
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--mtbf", type=float, default=45.0, help="seconds of work between failures")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--policy", choices=POLICIES)
    given = parser.parse_args()
    if given.worker is not None:
        worker(given.worker, given.policy, given.every)
        return
    found = []
    with tempfile.TemporaryDirectory() as name:
        for seed in range(given.seeds):
            for policy in [given.policy] if given.policy else POLICIES:
                folder = Path(name) / f"{policy}-{seed}"
                found.append(case(folder, policy, given.every, given.mtbf, given.minutes, seed))
                print(json.dumps(found[-1]), file=sys.stderr)
    print(json.dumps({"mtbf_s": given.mtbf, "every": given.every, "runs": found}, indent=2))


if __name__ == "__main__":
    main()
