"""Cases: failures drawn by a seed, what the formulas say of every policy, and what each comes to under the same failures."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.goodput.learnt import Learnt
from benchmarks.goodput.nodes import Nodes
from benchmarks.goodput.worker import NODES

POLICIES = ("restart", "peers", "replan", "spares", "drop-replica")
TELLS = 0.02  # predictions tell no policies apart that are closer than this


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Failures of a run: the mean time between two of them, how long a node is away, and when each comes, at which place."""

    seed: int
    mtbf_s: float
    replace_s: float
    whole_s: float
    kills: tuple[tuple[float, int], ...]


def draw_case(seed: int, minutes: float) -> Case:
    """Exponential times between failures, one of each part of the distribution in random order: few draws of it would say
    more about the draws than about the policies."""
    draw, whole_s = random.Random(seed), 60 * minutes
    mtbf_s, replace_s = draw.choice((40.0, 60.0, 90.0)), draw.choice((0.0, 5.0, 20.0, 60.0))
    count = round(whole_s / mtbf_s)
    gaps = [-mtbf_s * math.log(1 - (i + 0.5) / count) for i in range(count)]
    draw.shuffle(gaps)
    after, kills = draw.random() * mtbf_s - mtbf_s / 2, list[tuple[float, int]]()
    for gap in gaps:
        after += gap
        kills.append((max(after, 0.0), draw.randrange(NODES)))
    return Case(seed=seed, mtbf_s=mtbf_s, replace_s=replace_s, whole_s=whole_s, kills=tuple(kills))


def measured(folder: Path, case: Case, policy: str, learnt: Learnt) -> dict[str, Any]:
    """One policy under the failures of a case: steps of the undisturbed run that are left at the end over the time."""
    said = learnt.recovery(policy, case.mtbf_s, case.replace_s, 1)
    spares = 1 if policy == "spares" else 0
    every = max(round(said.checkpoint_every_s / learnt.step_s), 1)
    stored = max(round(said.storage_every_s / learnt.step_s), 1)
    with Nodes(folder, policy, every, spares, stored) as nodes:
        nodes.until(lambda found: len({one["node"] for one in found}) == NODES)
        begun, before = time.time(), max(one["step"] for one in nodes.done())
        end = begun + case.whole_s
        kills = [(begun + at, place) for at, place in case.kills if at < case.whole_s]
        failed = nodes.fail(kills, learnt.detect_s(policy) + case.replace_s, end)
        done = [one for one in nodes.done() if one["at"] <= end]
    newest = done[-1]["step"] - before
    share = NODES / (NODES + spares)
    return {
        "policy": policy,
        "failures": failed,
        "every": every,
        "stored": stored if policy == "peers" else every,
        "predicted": said.goodput,
        "measured": share * newest * learnt.step_s / case.whole_s,
    }


def compared(case: Case, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """How well the formulas did on a case."""
    chosen = max(runs, key=lambda run: run["predicted"])
    best = max(runs, key=lambda run: run["measured"])
    return {
        "seed": case.seed,
        "mtbf_s": case.mtbf_s,
        "replace_s": case.replace_s,
        "runs": runs,
        "chosen": chosen["policy"],
        "best": best["policy"],
        "right": chosen["measured"] >= best["measured"] * (1 - TELLS),
        "worst_error": max(abs(run["predicted"] / run["measured"] - 1) for run in runs),
    }
