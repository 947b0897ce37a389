"""What the formulas are told, each from a run of its own in which nothing but that happens."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from autoparallel.costmodel.recovery import Outages, Recovery, Saved, recoveries, spared
from benchmarks.goodput.nodes import Nodes
from benchmarks.goodput.worker import NODES

STEPS = 40  # of a quiet run
EVERY = 10  # steps between saves while it is learnt what one costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """In seconds: a step on all nodes, with one less, and of replicas; what a save in storage and a copy to a neighbour stop it for;
    the first step of a run after its nodes are there, and of what is left after a node failed; how long the others stand when a
    replica goes, and when it comes back."""

    step_s: float
    fewer_step_s: float
    replica_step_s: float
    save_s: float
    copy_s: float
    start_s: float
    fewer_s: float
    dropped_s: float
    rejoined_s: float

    def outages(self, policy: str, mtbf_s: float, replace_s: float) -> Outages:
        """These failures, as the formulas take them."""
        replica = policy == "drop-replica"
        return Outages(
            mtbf_s=mtbf_s, replace_s=replace_s, replan_s=0.0, restart_s=self.start_s, detect_s=self.detect_s(policy),
            drop_s=self.rejoined_s / 2 if replica else 0.0,
        )  # fmt: skip

    def detect_s(self, policy: str) -> float:
        """Until those that are left know that a node has gone."""
        return self.dropped_s if policy == "drop-replica" else max(self.fewer_s - self.start_s, 0.0)

    def recovery(self, policy: str, mtbf_s: float, replace_s: float, spares: int) -> Recovery:
        """What the formulas say of a policy."""
        outages = self.outages(policy, mtbf_s, replace_s)
        run = Saved(
            step_s=self.step_s, nodes=NODES, replicas=NODES, stall_s=self.save_s, storage_s=0.0,
            neighbour_s=max(self.copy_s - self.save_s, 0.0) if policy == "peers" else 0.0, replica_step_s=self.replica_step_s, fewer_step_s=self.fewer_step_s,
        )  # fmt: skip
        if policy == "spares":
            return spared(outages, run, spares)
        return next(one for one in recoveries(outages, run) if one.policy == policy)

    def told(self) -> dict[str, float]:
        """For printing."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


def learn(folder: Path) -> Learnt:
    """Measure on this machine, now: a minute or three."""
    step_s, save_s, *starts = _quiet(folder / "restart", "restart", EVERY)
    copied_s, _, start_s = _quiet(folder / "peers", "peers", 1)
    starts += [start_s, _quiet(folder / "again", "restart", EVERY)[2]]
    fewer_s, fewer_step_s = _one_less(folder / "replan")
    replica_step_s, _, _ = _quiet(folder / "replicas", "drop-replica", EVERY)
    dropped_s, rejoined_s = _dropped(folder / "dropped")
    return Learnt(
        step_s=step_s, fewer_step_s=fewer_step_s, replica_step_s=replica_step_s, save_s=save_s,
        copy_s=max(copied_s - step_s, 0.0), start_s=median(starts), fewer_s=fewer_s, dropped_s=dropped_s, rejoined_s=rejoined_s,
    )  # fmt: skip


def read_learnt(path: Path) -> Learnt:
    """What an earlier run learnt on this machine."""
    return Learnt(**json.loads(path.read_text())["learnt"])


def _lengths(entries: Sequence[dict[str, Any]]) -> list[float]:
    """From step to step, on the rank that did the first one."""
    one = [entry["at"] for entry in entries if entry["pid"] == entries[0]["pid"]]
    return [after - before for before, after in pairwise(one)]


def _quiet(folder: Path, policy: str, every: int) -> tuple[float, float, float]:
    """The step without saves (with them, where each step has one), the stall of a save, and the start."""
    begun = time.time()
    with Nodes(folder, policy, every) as nodes:
        entries = nodes.until(lambda found: max((one["step"] for one in found), default=0) >= STEPS)
    lengths = _lengths([one for one in entries if one["step"] > 3])
    step_s = mean(lengths) if every == 1 else median(lengths)
    return step_s, max(mean(lengths) - step_s, 0.0) * every, entries[0]["at"] - begun


def _one_less(folder: Path) -> tuple[float, float]:
    """Seconds until a run goes on after one of its nodes failed, and its step then."""
    with Nodes(folder, "replan", EVERY) as nodes:
        nodes.until(lambda found: len(found) >= 10)
        nodes.kill(NODES - 1)
        killed = time.time()
        entries = nodes.until(lambda found: len(found) >= 20, since=killed + 0.5)
    return entries[0]["at"] - killed, median(_lengths(entries))


def _dropped(folder: Path) -> tuple[float, float]:
    """Seconds that the others stand when a replica goes, and when it comes back."""
    with Nodes(folder, "drop-replica", EVERY) as nodes:
        nodes.until(lambda found: max((one["step"] for one in found), default=0) >= 10)
        nodes.kill(NODES - 1)
        killed = time.time()
        alone = nodes.until(lambda found: len(found) >= 20, since=killed)
        nodes.start(NODES - 1)
        back = nodes.until(
            lambda found: sum(one["node"] == NODES - 1 for one in found) >= 5, since=time.time()
        )
    lengths = _lengths(alone)
    step_s = median(lengths[5:])
    stood_s = max(alone[0]["at"] - killed, *lengths[:5])
    first = next(one for one in back if one["node"] == NODES - 1)
    other = [one for one in [*alone, *back] if one["node"] != NODES - 1]
    before = max(one["at"] for one in other if one["at"] < first["at"] and one["step"] < first["step"])
    return stood_s, max(first["at"] - before - step_s, 0.0)
