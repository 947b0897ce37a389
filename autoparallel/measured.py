"""Measured step times, as `calibrate` takes them: rows of a CSV, each with the strategy that ran."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.costmodel.parts import slopes
from autoparallel.errors import UserError
from autoparallel.inputs import Checked, Request, load_graph
from autoparallel.planner.problem import Objective
from autoparallel.planner.score import score
from autoparallel.planner.strategy.file import missing_keys, read_strategy_file, strategy_from_constraints
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.types import Recompute, Strategy
from autoparallel.profiles import Cluster
from autoparallel.profiles.build import cluster_of, shared_device
from autoparallel.profiles.csv_rows import read_csv_rows
from autoparallel.profiles.hardware import Device
from autoparallel.profiles.record import recorded_cluster
from autoparallel.runtime.monitor.differences import step_time_s
from autoparallel.runtime.monitor.record import NAME, read_record

MOST_NEAR = 12  # runs that are looked at for the next measurement
COLUMNS = ("strategy", "step_time_s", "model", "cluster", "seq_len")
_SHAPE = re.compile(r"(\d+)x(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run: what ran, on how much of the profiled device, and its seconds per step."""

    name: str
    graph: ModelGraph
    strategy: Strategy
    cluster: Callable[[Device], Cluster]
    step_time_s: float

    def predicted_s(self, device: Device) -> float:
        """The step that the cost model predicts with this device."""
        return score(self.graph, self.cluster(device), self.strategy).step_time_s


def read_measured(
    path: Path, device: Device, say: Callable[[str], None] = lambda _: None
) -> tuple[Measured, ...]:
    """The rows of a CSV with the columns `strategy` (a complete strategy file, relative to the CSV) and
    `step_time_s`; `model`, `cluster` (NODESxPER_NODE) and `seq_len` where the file's [problem] does not say or
    they were different; or the starts on this device that the folder of a run records; `say` is told of others. Raises UserError,
    naming row and column, and for a run on other devices."""
    graphs: dict[tuple[str, int | None], ModelGraph] = {}
    if path.is_dir():
        return tuple(
            _run(row, f"{path}: {row['strategy']}", path, device, graphs)
            for row in recorded_rows(path, device.name, say)
        )
    says = (
        "a header with `strategy` (a strategy file) and `step_time_s` (seconds), and optionally "
        "`model`, `cluster` (NODESxPER_NODE) and `seq_len`; and a row for each run"
    )
    rows = read_csv_rows(path, COLUMNS, ("strategy", "step_time_s"), says)
    return tuple(_run(row, where, path.parent, device, graphs) for where, row in rows)


def recorded_rows(folder: Path, device: str, say: Callable[[str], None]) -> list[dict[str, str]]:
    """What a run's record says of each of its starts, as rows; starts of too few steps are left out, as are those on other devices
    than the named one, which is told. Raises UserError where none is left for that."""
    records = read_record(folder)
    # Records of earlier versions, and of runs that knew no cluster, do not say.
    own = [record for record in records if record.start.get("devices", [device]) == [device]]
    if not own:
        devices = sorted({name for record in records for name in record.start["devices"]})
        one = len(devices) == 1
        raise UserError(
            f"{folder / NAME}: the run was on {' and '.join(devices)}, and its steps say nothing of {device}: calibrate "
            + (
                f"the profile of {devices[0]} (a profile's device is its `name`)"
                if one
                else "from runs on one kind of device"
            )
        )
    if left_out := len(records) - len(own):
        say(
            f"warning: {left_out} of {len(records)} starts of the run in {folder} were on other devices than {device}, and are left out"
        )
    rows = []
    for record in own:
        seconds, start = step_time_s(record), record.start
        if seconds is not None:
            rows.append(
                {
                    "strategy": start["strategy"],
                    "step_time_s": repr(seconds),
                    "model": str(folder / start["graph"]),
                    "cluster": start["shape"],
                }
            )
    return rows


def _run(
    row: dict[str, str],
    where: str,
    folder: Path,
    device: Device,
    graphs: dict[tuple[str, int | None], ModelGraph],
) -> Measured:
    try:
        file = read_strategy_file(folder / row["strategy"])
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if missing := missing_keys(file.constraints):
        raise UserError(
            f"{where}: {row['strategy']} leaves out {missing[0]}; give the complete strategy that ran"
        )
    strategy = strategy_from_constraints(file.constraints, name=row["strategy"])
    record = file.problem
    model = row.get("model") or (record.model if record else None)
    if not model:
        raise UserError(f"{where}: {row['strategy']} does not say which model; add a column `model`")
    seq_len = _tokens(row["seq_len"], where) if row.get("seq_len") else (record.seq_len if record else None)
    cluster = _cluster(row.get("cluster", ""), record.cluster if record else None, where, device)
    if (model, seq_len) not in graphs:
        # The record's hash and cluster are of the machine that the plan was made for: not this profile.
        checked = Checked(
            request=Request(model=model, cluster="", strategy=None), cluster=cluster(device), record=None,
            constraints=file.constraints, seq_len=None if seq_len == 1 else seq_len,
            model_args=record.model_args if record else {}, objective=Objective.TIME,
        )  # fmt: skip
        graphs[model, seq_len] = load_graph(checked)
    return Measured(
        name=row["strategy"],
        graph=graphs[model, seq_len],
        strategy=strategy,
        cluster=cluster,
        step_time_s=_seconds(row["step_time_s"], where),
    )


def _tokens(text: str, where: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"{where}: `seq_len` = {text!r} must be a whole number of at least 1")
    return int(text)


def _seconds(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise UserError(f"{where}: `step_time_s` = {text!r} must be a number of seconds above 0")
    return value


def _cluster(shape: str, record: object, where: str, profile: Device) -> Callable[[Device], Cluster]:
    """The row's cluster of any correction of the profiled device."""
    if shape:
        match = _SHAPE.fullmatch(shape)
        if not match:
            raise UserError(f"{where}: `cluster` = {shape!r} must be NODESxPER_NODE, such as 2x8")
        nodes, per_node = int(match[1]), int(match[2])
        try:
            cluster_of(profile, nodes, per_node, shape)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        return lambda device: cluster_of(device, nodes, per_node, f"{device.name}:{shape}")
    if not isinstance(record, dict):
        raise UserError(
            f"{where}: the strategy file has no [problem.cluster]; add a column `cluster`: 2x8, say"
        )
    planned = recorded_cluster(record, where, checked=False)  # the profile's own figures take their place
    if profile.name not in {group.device.name for group in planned.groups}:
        names = ", ".join(group.device.name for group in planned.groups)
        raise UserError(
            f"{where}: ran on {names}, but the profile is of {profile.name}; calibrate that device's profile, or "
            "say with a column `cluster` (NODESxPER_NODE) how much of this device it was"
        )

    def of(device: Device) -> Cluster:
        groups = tuple(
            replace(g, device=shared_device(device, g.devices_per_node))
            if g.device.name == profile.name
            else g
            for g in planned.groups
        )
        return replace(planned, groups=groups)

    return of


def predictions(runs: Sequence[Measured]) -> Callable[[Device], list[float]]:
    """What `calibrate` varies: the predicted step of every run for a device."""
    return lambda device: [run.predicted_s(device) for run in runs]


def near(runs: Sequence[Measured], device: Device) -> tuple[tuple[str, Measured], ...]:
    """Runs that differ from a measured one in one decision, and are legal: larger and smaller micro-batches, tensor parallelism,
    recomputation; each with what it is in words."""
    found: dict[Strategy, tuple[str, Measured]] = {}
    for run in runs:
        for key, changed in _changed(run.strategy):
            if changed in found or any(changed == other.strategy for other in runs):
                continue
            if not strategy_problems(run.graph, run.cluster(device), changed):
                found[changed] = (f"{run.name} with {key}", replace(run, strategy=changed))
    return tuple(found.values())[:MOST_NEAR]


def _changed(strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """The strategy with one thing else, in words and whole."""
    micro, mesh = strategy.batch.micro, strategy.mesh
    for other in (4 * micro, 2 * micro, micro // 2, micro // 4):
        if other:
            yield f"batch.micro = {other}", replace(strategy, batch=replace(strategy.batch, micro=other))
    for tp in (2 * mesh.tp, mesh.tp // 2):
        shards = mesh.dp_shard * mesh.tp // tp if tp else 0
        if shards and shards * tp == mesh.dp_shard * mesh.tp:
            moved = replace(mesh, tp=tp, dp_shard=shards)
            shard = replace(
                strategy.shard,
                zero=(strategy.shard.zero or 1) if shards > 1 else 0,
                sequence_parallel=strategy.shard.sequence_parallel and tp > 1,
            )
            yield f"mesh.tp = {tp}", replace(strategy, mesh=moved, shard=shard, tensor=())
    mode = "none" if strategy.recompute.mode == "full" else "full"
    yield f'recompute.mode = "{mode}"', replace(strategy, recompute=Recompute(mode=mode))


def slopes_of(runs: Sequence[Measured], device: Device) -> NDArray[np.float64]:
    """How much each run's step follows each part of the device."""
    predict = predictions(runs)
    return slopes(predict, device, predict(device))
