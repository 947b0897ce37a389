"""How a run's predicted step moves with each family of constants: priced once as it is and once with each moved.

A program says what runs, not how long; so a run is expanded once and priced as often as is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log
from pathlib import Path

from autoparallel.costmodel.price import Pricer, price_program
from autoparallel.costmodel.program import Program
from autoparallel.costmodel.simulate import Prepared
from autoparallel.costmodel.timetable import pipeline_times
from autoparallel.errors import UserError
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.score import at_home
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.hardware import Cluster, Device
from benchmarks.accuracy import Scorer, spread, with_device
from benchmarks.families import Moves, Priors, moved, scaled
from benchmarks.publishers import generation_of, publisher_of
from benchmarks.rows import Row, Run, Unscorable, parse

STRONGER = 0.1  # log scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A run that ended, with what it says of the constants."""

    run: Run
    publisher: str
    generation: str
    dirs: tuple[Path, ...] = ()  # of device files, beside those that ship


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitive:
    """A run's measured and predicted step, and by how much each family's logarithm moves the predicted one's."""

    timed: Timed
    measured_s: float
    predicted_s: float
    slopes: tuple[float, ...]


@dataclass(slots=True)
class Repricer:
    """Prices the programs of runs on devices with other constants; equal blocks of one model are priced once."""

    scorer: Scorer
    home: Expander | None = None
    pricers: dict[str, tuple[Cluster, Pricer]] = field(default_factory=dict)

    def expanded(self, run: Run, cluster: Cluster) -> tuple[Program, Prepared]:
        """The program of the run's first strategy that fits, and the order of its actions."""
        return self.of_strategy(self.scorer.chosen(run, cluster)[0])

    def of_strategy(self, strategy: Strategy) -> tuple[Program, Prepared]:
        """The program of a strategy that the scorer has just chosen, and the order of its actions."""
        (expander,) = self.scorer.expanders.values()
        home, alone = at_home(expander, strategy)
        if self.home is not home:
            self.home = home
            self.pricers.clear()
        return home.program(alone), home.prepared(alone)

    def step_s(self, program: Program, prepared: Prepared, label: str, device: Device) -> float:
        """Seconds of a program of the last model on a device; `label` tells devices apart."""
        assert self.home is not None
        if label not in self.pricers:
            cluster = with_device(self.home.cluster, device)
            self.pricers[label] = (cluster, Pricer(cluster))
        cluster, pricer = self.pricers[label]
        return pipeline_times(prepared.timetable, price_program(program, cluster, pricer)).step_time_s


def timed_runs(rows: Sequence[Row], known: dict[str, str], dirs: Sequence[Path], most: int) -> list[Timed]:
    """Runs that ended and have a measured step: an even spread of at most `most` of each source and device."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for row in rows:
        try:
            run = parse(row, dirs)
        except (Unscorable, UserError):
            continue
        if run.outcome == "ok" and run.step_time_s:
            groups.setdefault((run.source, run.cluster.device.name), []).append(run)
    generations = {device: generation_of(device, dirs) for _, device in groups}
    return [
        Timed(
            run=runs[i],
            publisher=publisher_of(source, known),
            generation=generations[device],
            dirs=tuple(dirs),
        )
        for (source, device), runs in groups.items()
        for i in spread(len(runs), most)
    ]


def sensitive(timed: Timed, priors: Priors, moves: Moves, repricer: Repricer) -> Sensitive | None:
    """A run priced under `moves`, and with each family stronger; None where it cannot be priced."""
    run = timed.run
    device = moved(run.cluster.device, priors, moves, timed.dirs)
    assert run.step_time_s
    try:
        program, prepared = repricer.expanded(run, with_device(run.cluster, device))
    except UserError:
        return None
    predicted_s = repricer.step_s(program, prepared, "", device)
    slopes = []
    for family in priors.families:
        home = priors.home_of(family, device.name, timed.generation)
        if home is None:
            slopes.append(0.0)  # nothing that a fit may move
            continue
        stronger = scaled(device, priors.keys(home, family), exp(STRONGER))
        moved_s = repricer.step_s(program, prepared, family.name, stronger)
        slopes.append(log(moved_s / predicted_s) / STRONGER)
    return Sensitive(timed=timed, measured_s=run.step_time_s, predicted_s=predicted_s, slopes=tuple(slopes))
