"""`Monitor`: measures the steps of one run, and records them."""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from autoparallel.costmodel.prediction import Prediction
from autoparallel.costmodel.step_collectives import CollectiveCost
from autoparallel.runtime.monitor.alerts import Alert, Alerts, check_local, sender
from autoparallel.runtime.monitor.clock import COMPUTED, SENT, StepClock
from autoparallel.runtime.monitor.collectives import CollectiveTable, Levels, Meter, host_levels
from autoparallel.runtime.monitor.differences import WARM_UP
from autoparallel.runtime.monitor.links import LinkProbe
from autoparallel.runtime.monitor.outputs import Draw, TensorBoard, write_prometheus
from autoparallel.runtime.monitor.record import Recorder
from autoparallel.runtime.monitor.slow_links import RECENT, LinkHistory
from autoparallel.runtime.monitor.stragglers import WINDOW, communicating_s, stragglers
from autoparallel.runtime.ranks.agreement import Agreement
from autoparallel.runtime.ranks.gathers import all_gather_single

_KINDS = ("forward", "backward", "dp_comm", "pp_comm", "optimizer", "data", "other")
# Seconds between two writings of the metrics file. Kind: choice; collectors come every 15.
_METRICS_S = 5.0
# Share of the steps' time that messages over the links may take. Kind: choice.
_LINKS_SHARE = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorOptions:
    """Every `every` steps are recorded (`collectives`: with what these took); `tensorboard` writes these into the folder's `tensorboard/`, too. The fifth step
    of a start, and then one in `timeline_every` (0: none), is recorded action by action (and is a picture there); after one in `links_every` recorded
    steps (0: none) ranks send their neighbours a message, for what the links pass. `alerts` (thresholds), stragglers and slow
    links are told to `alert_command` (JSON on its standard input) and to `alert_webhook` (JSON by POST, a local address)."""

    every: int = 1
    tensorboard: bool = False
    timeline_every: int = 100
    links_every: int = 10
    collectives: bool = True
    alerts: tuple[Alert, ...] = ()
    alert_command: tuple[str, ...] = ()
    alert_webhook: str = ""

    def __post_init__(self) -> None:
        if self.alert_webhook:
            check_local(self.alert_webhook)

    def traces(self, step: int, first: int) -> bool:
        """Whether the actions of a step are recorded: once a start is warm, then every so many steps."""
        done = step - first
        return bool(self.timeline_every) and (
            done == WARM_UP + 2 or (done > 0 and done % self.timeline_every == 0)
        )

    def sends(self, step: int, first: int) -> bool:
        """Whether neighbours send each other a message after a recorded step."""
        return (
            bool(self.links_every) and step - first > WARM_UP and step // self.every % self.links_every == 0
        )


class Monitor:
    """Around the steps of a run in `folder`; rank 0 records. `stage` is this rank's, `predicted` of the plan, if known,
    `about` what else the record's start says; `per_node`: ranks of a node, numbered node by node. `timeline`: the predicted one,
    as `answer.timeline_table`; `draw` makes the picture of it and of a recorded one. `meter` hears of collectives, whose `levels` are
    those of the cluster and whose prices are `priced`.

    At each recorded step all ranks tell each other what they measured, in one message: eight numbers a rank, and three for each
    kind of collective and group.
    """

    def __init__(
        self, folder: Path, everyone: Agreement, clock: StepClock, stage: int, *, about: Mapping[str, Any],
        predicted: Prediction | None, step: int, options: MonitorOptions, say: Callable[[str], None],
        per_node: int, timeline: Mapping[str, Any] | None = None, draw: Draw | None = None, meter: Meter | None = None,
        levels: Levels = (), priced: Sequence[CollectiveCost] = (),
    ) -> None:  # fmt: skip
        self._folder, self._all, self._clock, self._say, self._every = (
            folder,
            everyone,
            clock,
            say,
            options.every,
        )
        self._options, self._first = options, step
        self._meter, self._counted, self._recorded = meter if options.collectives else None, False, 0
        self._table = CollectiveTable(everyone, levels or host_levels(everyone.ranks, per_node))
        self._priced = {(one.op, one.level): one for one in priced}
        self._predicted, self._timeline = predicted, dict(timeline or {})
        self._stages = everyone.gathered(stage)
        first = everyone.rank == 0
        self._recorder = Recorder(folder) if first else None
        self._alerts = Alerts(options.alerts, sender(options.alert_command, options.alert_webhook, say))
        self._board = TensorBoard(folder / "tensorboard", draw) if options.tensorboard and first else None
        self._computing: deque[list[float]] = deque(maxlen=WINDOW)
        self._communicating: deque[float] = deque(maxlen=RECENT)
        self._slow: frozenset[int] = frozenset()
        self._probe, self._links = LinkProbe(everyone, per_node), LinkHistory(per_node)
        self._slow_links: frozenset[str] = frozenset()
        self._written_at, self._told = -_METRICS_S, False
        self._skips, self._last = deque[bool](maxlen=WINDOW), dict[str, Any]()
        if self._recorder is not None:
            said = predicted and {
                "step_time_s": predicted.step_time_s,
                "breakdown_s": dict(predicted.breakdown_s),
                "timeline": self._timeline,
                "collectives": [collective_entry(one) for one in priced],
            }
            self._recorder.add(
                "start",
                step=step,
                world=everyone.ranks,
                **about,
                predicted=said,
                stages=self._stages,
                time=time.time(),
            )

    def begin(self, step: int) -> None:
        """A step begins."""
        self._clock.begin()
        self._counted = (
            self._meter is not None and step % self._every == 0 and self._table.counts(self._recorded)
        )
        if self._counted and self._meter is not None:
            self._meter.begin()

    def end(self, step: int, loss: float, seconds: float) -> None:
        """A step ends; collective where it is recorded."""
        parts = self._clock.end()
        heard = self._meter.end() if self._meter is not None else {}
        self._skips.append(False)
        if step % self._every:
            return
        self._recorded += 1
        own = [*(parts.get(kind, 0.0) for kind in _KINDS), _memory()]
        every = self._rows([*own, *self._table.numbers(heard)])
        rows = [row[: len(own)] for row in every]
        slowest_s = max(sum(row[:-1]) for row in rows)
        costs = self._table.costs([row[len(own) :] for row in every], slowest_s, counted=self._counted)
        if self._options.traces(step, self._first):
            self._trace(step, rows)
        if self._options.sends(step, self._first):
            self._send(step, slowest_s)
        if self._recorder is None:
            return
        entry = self._entry(step, loss, seconds, rows)
        if costs:
            entry["collectives"] = [
                collective_entry(one, self._priced.get((one.op, one.level))) for one in costs
            ]
        self._recorder.add("step", **entry)
        self._computing.append(entry["computing_s"])
        self._communicating.append(communicating_s(entry))
        self._last = entry
        self._tell_stragglers(step)
        self._tell_slow_links(step)
        self._publish(entry)

    def skipped(self, step: int) -> None:
        """A step ends whose batch was left out: it is recorded as such, whatever `every` is, and without times."""
        self._skips.append(True)
        if self._recorder is None:
            return
        self._recorder.add("skipped", step=step, time=round(time.time(), 3))
        self._publish({"step": step, "skipped_share": self._skipped_share})

    @property
    def _skipped_share(self) -> float:
        return sum(self._skips) / WINDOW

    def _publish(self, entry: Mapping[str, Any]) -> None:
        """Hold a step against the alerts, and show it to whoever looks at the run from outside."""
        assert self._recorder is not None
        step = entry["step"]
        for text in self._alerts.step(entry):
            self._say(f"step {step}: {text}")
            self.said(step, text)
        self._show(lambda board: board.add(entry))
        self._write_metrics({**self._last, **entry})
        if self._recorder.problem is not None and not self._told:
            self._told = True
            self._say(f"the record of the run is not kept ({self._recorder.problem}); training goes on")

    def _trace(self, step: int, rows: list[list[float]]) -> None:
        """Record the actions of the slowest rank of each stage; collective."""
        computing = [sum(row[_KINDS.index(kind)] for kind in COMPUTED) for row in rows]
        slowest = {
            stage: max(
                (r for r, s in enumerate(self._stages) if s == stage), key=lambda r: (computing[r], -r)
            )
            for stage in sorted(set(self._stages))
        }
        every = self._all.gathered(self._clock.spans() if self._all.rank in slowest.values() else [])
        if self._recorder is None:
            return
        ranks = [every[rank] for rank in slowest.values()]
        self._recorder.add("timeline", step=step, ranks=ranks)
        self._show(lambda board: board.add_timeline(step, self._timeline, ranks))

    def _send(self, step: int, step_s: float) -> None:
        """Measure a round of links, in a share of the steps' time; collective."""
        passed = self._probe.measure(_LINKS_SHARE * step_s * self._every * self._options.links_every)
        self._links.add(passed)
        if self._recorder is not None and passed:
            self._recorder.add(
                "links", step=step, passed=[[*one.pair, one.size, one.seconds] for one in passed]
            )

    def _write_metrics(self, entry: Mapping[str, Any]) -> None:
        assert self._recorder is not None
        if time.monotonic() - self._written_at < _METRICS_S:
            return
        self._written_at, path = time.monotonic(), self._folder / "metrics.prom"
        try:
            write_prometheus(path, entry)
        except OSError as error:
            self._recorder.problem = f"{path}: {error.strerror}"

    def _show(self, act: Callable[[TensorBoard], None]) -> None:
        """Write to TensorBoard's files, until the disk takes no more."""
        if self._board is None:
            return
        try:
            act(self._board)
        except OSError as error:
            self._board = None
            self._say(
                f"nothing more is written for TensorBoard ({error.strerror or error}); training goes on"
            )

    def said(self, step: int, text: str) -> None:
        """Keep what was told to people."""
        if self._recorder is not None:
            self._recorder.add("said", step=step, text=text, time=time.time())

    def _rows(self, own: list[float]) -> list[list[float]]:
        if self._all.group is None:
            return [own]
        mine = torch.tensor(own, dtype=torch.float64)
        rows = torch.empty(self._all.ranks * len(own), dtype=torch.float64)
        all_gather_single(rows, mine, group=self._all.group)
        found: list[list[float]] = rows.view(self._all.ranks, -1).tolist()
        return found

    def _entry(self, step: int, loss: float, seconds: float, rows: list[list[float]]) -> dict[str, Any]:
        by_kind = [dict(zip(_KINDS, row, strict=False)) for row in rows]
        computing = [sum(row[kind] for kind in COMPUTED) for row in by_kind]
        outside = [sum(row[kind] for kind in SENT) for row in by_kind]
        # What the slowest of a rank's stage computes longer than it does, it waits.
        slowest = {
            s: max(c for c, t in zip(computing, self._stages, strict=True) if t == s) for s in self._stages
        }
        waiting = [
            min(slowest[stage] - own, sent)
            for own, sent, stage in zip(computing, outside, self._stages, strict=True)
        ]
        last = max(range(len(rows)), key=lambda r: computing[r])
        return {
            "step": step, "time": round(time.time(), 3), "loss": loss, "seconds": seconds, "breakdown_s": by_kind[last], "computing_s": computing,
            "communicating_s": [sent - idle for sent, idle in zip(outside, waiting, strict=True)],
            "waiting_s": waiting, "memory_bytes": [row[-1] for row in rows],
            "efficiency": self._predicted.step_time_s / seconds if self._predicted is not None else None,
            "skipped_share": self._skipped_share,
        }  # fmt: skip

    def _tell_stragglers(self, step: int) -> None:
        found = stragglers(list(self._computing), self._stages, self._slow)
        for one in found:
            if one.rank not in self._slow:
                self._say(f"step {step}: {one}")
                self.said(step, str(one))
                self._alerts.tell(step, str(one), rank=one.rank)
        self._slow = frozenset(one.rank for one in found)

    def _tell_slow_links(self, step: int) -> None:
        found = self._links.slow(median(self._communicating))
        for one in found:
            if one.where not in self._slow_links:
                self._say(f"step {step}: {one}")
                self.said(step, str(one))
                self._alerts.tell(step, str(one), rank=one.ranks[0])
        self._slow_links = frozenset(one.where for one in found)


def collective_entry(cost: CollectiveCost, priced: CollectiveCost | None = None) -> dict[str, Any]:
    """As the record has it: seconds and bandwidth are None where they are not known."""
    seconds = cost.seconds if cost.seconds > 0 else None  # NaN is not
    entry = {
        "op": cost.op, "level": cost.level, "count": cost.count, "bytes": round(cost.sent_bytes), "seconds": seconds,
        "bytes_per_s": cost.sent_bytes / seconds if seconds else None,
    }  # fmt: skip
    if priced is not None and priced.seconds > 0:
        entry["priced_bytes_per_s"] = priced.sent_bytes / priced.seconds
    return entry


def _memory() -> float:
    """The most bytes that this rank has held: on its accelerator, else of the process."""
    if torch.accelerator.is_available():
        return float(torch.accelerator.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
