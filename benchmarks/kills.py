"""A seeded campaign of kills: `python -m benchmarks.kills --seeds 3 --phases 4`.

Each seed draws a run in phases. A phase has a number of processes, a strategy for them, a step, and a victim that is killed
there with SIGKILL: a rank (its agent restarts all), the agent (its processes end with it), or all at once. The next phase goes
on under other processes and another strategy, and the last one to the end. Consumed samples must be those of a run in one process
that nothing interrupts, each loss within 1e-9 of it. Prints a JSON object, with the seconds until a step
was done after a start.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / "tests/runtime/train_elastic.py")
STRATEGIES = {
    1: ["[mesh]\npp = 1\ntp = 1\n"],
    2: [
        "[mesh]\npp = 1\ntp = 2\n", "[mesh]\npp = 2\ntp = 1\n", "[mesh]\npp = 1\ntp = 1\ndp_shard = 2\n[shard]\nzero = 3\n",
        "[mesh]\npp = 1\ntp = 1\ndp_replicate = 2\n",
    ],
    4: [
        "[mesh]\npp = 2\ntp = 2\n", "[mesh]\npp = 1\ntp = 2\ndp_shard = 2\n[shard]\nzero = 3\n",
        "[mesh]\npp = 2\ntp = 1\ndp_replicate = 2\n",
    ],
}  # fmt: skip
VICTIMS = ("rank", "agent", "all")
EVERY = 3  # steps between checkpoints, as the script has it
WAIT_S = 240.0


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _done(folder: Path) -> list[dict[str, Any]]:
    lines = (line for log in folder.glob("log-*.jsonl") for line in log.read_text().splitlines())
    return [json.loads(line) for line in lines if line.endswith("}")]


def _since(folder: Path, known: set[int]) -> list[dict[str, Any]]:
    """What processes other than the `known` have done."""
    return [entry for entry in _done(folder) if entry["pid"] not in known]


def _until(folder: Path, agent: subprocess.Popen[bytes], step: int, known: set[int]) -> float:
    """Seconds until a step that far is done by a process that is not among the `known`."""
    begun = time.monotonic()
    while not any(entry["step"] >= step for entry in _since(folder, known)):
        if agent.poll() not in (None, 0) or time.monotonic() - begun > WAIT_S:
            agent.kill()
            raise SystemExit(f"step {step} was not done: {(folder / 'said').read_text()[-3000:]}")
        time.sleep(0.02)
    return time.monotonic() - begun


def _gone(ranks: set[int]) -> None:
    """Wait for processes to end: they end with their agent, a moment after it."""
    begun = time.monotonic()
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        if time.monotonic() - begun > WAIT_S:
            raise SystemExit(f"processes {sorted(ranks)} outlived their agent")
        time.sleep(0.02)


def _start(folder: Path, world: int, steps: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "autoparallel",
        "run",
        "--nproc-per-node",
        str(world),
        SCRIPT,
        str(folder),
        str(steps),
    ]
    with (folder / "said").open("ab") as said:
        return subprocess.Popen(command, env=_environment(), stdout=said, stderr=said)


def _kill(victim: str, agent: subprocess.Popen[bytes], ranks: list[int], draw: random.Random) -> None:
    killed = {"rank": [draw.choice(ranks)], "agent": [agent.pid], "all": [agent.pid, *ranks]}[victim]
    for pid in killed:
        with contextlib.suppress(ProcessLookupError):  # it has ended with its agent
            os.kill(pid, signal.SIGKILL)


def campaign(folder: Path, seed: int, phases: int, steps: int) -> Iterator[dict[str, Any]]:
    """Run the phases of one seed in `folder`; what each came to."""
    draw = random.Random(seed)
    stops = sorted(draw.sample(range(2, steps - 1), phases))
    for stop in stops:
        world = draw.choice(list(STRATEGIES))
        strategy, victim = draw.choice(STRATEGIES[world]), draw.choice(VICTIMS)
        (folder / f"strategy-{world}.toml").write_text(strategy)
        hold = folder / f"hold-{world}"
        hold.write_text(str(stop))
        known = {entry["pid"] for entry in _done(folder)}
        agent = _start(folder, world, steps)
        back_s = _until(folder, agent, stop, known)
        time.sleep(draw.uniform(0, 0.5))  # the checkpoint is being written, or is not
        now = _since(folder, known)
        ranks = {entry["pid"] for entry in now}
        first = min(entry["step"] for entry in now)
        _kill(victim, agent, sorted(ranks), draw)
        if victim == "rank":
            back_s = _until(folder, agent, 1, known | ranks)
            ranks = {entry["pid"] for entry in _since(folder, known)}
            agent.kill()
        agent.wait()
        _gone(ranks)
        hold.unlink()
        yield {
            "world": world,
            "strategy": strategy,
            "victim": victim,
            "step": stop,
            "went_on_at": first,
            "seconds": back_s,
        }
    last = _start(folder, 1, steps)
    last.wait(WAIT_S)
    assert last.returncode == 0, (folder / "said").read_text()[-3000:]


def same(interrupted: list[dict[str, Any]], straight: list[dict[str, Any]]) -> list[str]:
    """Where a run differs from one that nothing interrupted."""
    losses = {entry["step"]: entry["loss"] for entry in straight}
    ids = {entry["step"]: set(entry["ids"]) for entry in straight}
    consumed: dict[int, set[int]] = {step: set() for step in ids}
    found = []
    for entry in interrupted:
        step = entry["step"]
        if abs(entry["loss"] - losses[step]) > 1e-9 * abs(losses[step]):
            found.append(f"step {step}: loss {entry['loss']} instead of {losses[step]}")
        if not set(entry["ids"]) <= ids[step]:
            found.append(f"step {step}: samples {entry['ids']} are not of {sorted(ids[step])}")
        consumed[step] |= set(entry["ids"])
    return found + [
        f"step {step}: samples {sorted(ids[step] - of)} were left out"
        for step, of in consumed.items()
        if of != ids[step]
    ]


def main() -> None:
    """Print one JSON object; exit status 1 where a run differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--phases", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    found, wrong = [], []
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name) / "straight"
        whole.mkdir()
        command = [sys.executable, SCRIPT, str(whole), str(given.steps)]
        subprocess.run(command, env=_environment(), check=True, capture_output=True)
        for seed in range(given.first, given.first + given.seeds):
            folder = Path(name) / f"seed-{seed}"
            folder.mkdir()
            phases = list(campaign(folder, seed, given.phases, given.steps))
            differs = same(_done(folder), _done(whole))
            wrong += [f"seed {seed}: {text}" for text in differs]
            again = len({(e["step"], e["pid"]) for e in _done(folder)}) - given.steps
            found.append(
                {"seed": seed, "phases": phases, "entries_beyond_one_each": again, "differs": differs}
            )
            print(f"seed {seed}: {'differs' if differs else 'equal'}", file=sys.stderr)
    print(json.dumps({"runs": found, "wrong": wrong}, indent=2))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
