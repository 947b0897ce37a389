"""What `plan` and `score` tell a person, on standard error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from autoparallel.labels import counted, strategy_label
from autoparallel.phases_table import phase_lines
from autoparallel.planner.strategy.machines import idle_words
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles import Cluster
from autoparallel.report.numbers import count, gib, percent, seconds, significant, times
from autoparallel.report.placement import placement_words
from autoparallel.report.recovery import recovery_words
from autoparallel.report.words import (
    bound_words,
    break_even_words,
    choices,
    chosen_words,
    cluster_words,
    constraint_words,
    seen_with_less_memory,
    simpler_words,
    sureness,
    why,
)

if TYPE_CHECKING:
    from rich.console import Console


def print_plan(
    console: Console,
    cluster: Cluster,
    strategy: Strategy,
    predicted: Mapping[str, Any],
    search: Mapping[str, Any],
) -> None:
    """The plan in a few lines: what, how long, how full, how sure."""
    _print_numbers(console, cluster, strategy, predicted)
    sample = predicted["sample"]
    sure = (
        "proved the best under the cost model"
        if search["status"] == "optimal"
        else f"not proved: {bound_words(search)}"
    )
    console.print(f"  search        {search['candidates']:,} candidates; {sure}", markup=False)
    if chosen := chosen_words(search, predicted["step_time_s"]):
        console.print(f"  chosen        {chosen}", markup=False)
    if better := search.get("better_batch"):
        console.print(
            f"  batch         {better_batch_words(better, strategy.batch.global_, sample)}", markup=False
        )
    if others := [one for one in search["alternatives"] if one["kind"].endswith(" kernels")]:
        told = f"{strategy.execution.kernels}; {others[0]['kind']}: {others[0]['reason']}"
        console.print(f"  kernels       {told}", markup=False)
    if simpler := simpler_words(search, predicted["step_time_s"]):
        console.print(f"  simpler       {simpler}", markup=False)


def print_score(console: Console, cluster: Cluster, strategy: Strategy, predicted: Mapping[str, Any]) -> None:
    """The same numbers for a strategy that was given, and whether it fits."""
    _print_numbers(console, cluster, strategy, predicted)
    if not predicted["feasible"]:
        over = max(stage["peak"] - stage["capacity"] for stage in predicted["memory_gib_by_stage"])
        where = "on the fullest device"
        if over <= 0:
            over = predicted["host_memory_gib"] - predicted["host_capacity_gib"]
            where = "in the memory of each host"
        console.print(f"  DOES NOT FIT: {gib(over)} too much {where}", style="bold red", markup=False)


def _print_numbers(
    console: Console, cluster: Cluster, strategy: Strategy, predicted: Mapping[str, Any]
) -> None:
    model, step_s = predicted["model"], predicted["step_time_s"]
    used = predicted["devices"]
    place = (
        cluster_words(cluster)
        if used == cluster.devices
        else f"{times(used, 'device')} of {cluster_words(cluster)}"
    )
    console.print(
        f"{model['name']} ({count(model['parameters'])} parameters) on {place}",
        style="bold",
        markup=False,
    )
    sample = predicted["sample"]
    rate = f"{significant(predicted['tokens_per_s_per_device'])} {counted(sample)}/s per device"
    spent = sorted(predicted["breakdown_s"].items(), key=lambda item: -item[1])
    parts = [
        f"{name.replace('_', ' ')} {percent(value / step_s)}"
        for name, value in spent
        if value > 0.005 * step_s
    ]
    fullest = min(predicted["memory_gib_by_stage"], key=lambda stage: stage["capacity"] - stage["peak"])
    memory = f"{gib(fullest['peak'])} of {gib(fullest['capacity'])}"
    for name, text in (
        ("strategy", strategy_label(strategy)),
        ("step time", f"{seconds(step_s)} for {times(strategy.batch.global_, sample)}"),
        ("speed", f"{rate}, {percent(predicted['mfu'])} of the peak (MFU)"),
        ("peak memory", f"{memory} on the fullest device"),
        *([("on each host", host_words(predicted, strategy))] if "host_memory_gib" in predicted else []),
        ("time goes to", ", ".join(parts)),
        ("how sure", sureness(predicted["confidence"])),
        *([("price", price_words(predicted["cost"], counted(sample)))] if "cost" in predicted else []),
        *[("phase", line) for line in phase_lines(predicted)],
        *([("failures", recovery_words(predicted["recovery"]))] if "recovery" in predicted else []),
        *([("placement", placed)] if (placed := placement_words(strategy, cluster)) else []),
        *([("idle", idle)] if (idle := idle_words(cluster, strategy)) else []),
        *(
            [("not run yet", f"{predicted['not_run']}; plan --runnable leaves it out")]
            if "not_run" in predicted
            else []
        ),
    ):
        console.print(f"  {name:<13} {text}", markup=False)


def better_batch_words(better: Mapping[str, Any], batch: int, sample: str) -> str:
    """What another global batch than the default one would give."""
    return (
        f"none was given: one {sample} for each device, {batch} in all, which divides badly; with --global-batch "
        f"{better['global_batch']} a {sample} takes {percent(better['less'])} less time"
    )


def host_words(predicted: Mapping[str, Any], strategy: Strategy) -> str:
    """What the memory of the fullest host holds."""
    held = gib(predicted["host_memory_gib"])
    room = f" of {gib(predicted['host_capacity_gib'])}" if "host_capacity_gib" in predicted else ""
    kept = {
        "activations": strategy.offload.activations > 0,
        "optimizer state": strategy.offload.optimizer > 0,
        "embedding tables": any(rule.tier == "parameter-server" for rule in strategy.embedding),
    }
    return f"{held}{room} for {' and '.join(what for what, there in kept.items() if there)}"


def price_words(cost: Mapping[str, float], what: str) -> str:
    """What a plan costs to run, in the cluster file's currency."""
    step, trillion = significant(cost["per_step"]), count(cost["per_trillion_tokens"])
    return f"{significant(cost['per_hour'])} an hour, {step} a step, {trillion} for 10^12 {what}"


def print_explanation(
    console: Console,
    cluster: Cluster,
    strategy: Strategy,
    predicted: Mapping[str, Any],
    search: Mapping[str, Any],
) -> None:
    """What each decision does, why this strategy, and the best rejected ones."""
    console.print()
    for choice in choices(strategy, cluster, predicted):
        console.print(f"  {choice.name} ({choice.setting}): {choice.text}", markup=False)
    console.print()
    for line in why(search, predicted["step_time_s"]):
        console.print(f"  {line}", markup=False)
    for cost in search.get("constraints", ()):
        console.print(f"  {constraint_words(cost)}", markup=False)
    for one in search.get("break_even", ()):
        console.print(f"  {break_even_words(one)}", markup=False)
    table = Table(title="rejected", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("why not", "strategy", "step time", "peak memory", "because it is"):
        table.add_column(name, overflow="fold")
    for other in search["alternatives"]:
        peak = gib(other["peak_memory_gib"])
        kind = other["kind"].replace("; ", ",\n")
        table.add_row(kind, other["label"], seconds(other["step_time_s"]), peak, other["reason"])
    if search["alternatives"]:
        console.print()
        console.print(table)
    if len(search.get("tradeoffs", ())) > 1:
        console.print()
        console.print(_tradeoffs(search["tradeoffs"], priced="cost" in predicted))
    elif search["status"] != "optimal":
        _print_left_out(console, predicted, search)


def _print_left_out(console: Console, predicted: Mapping[str, Any], search: Mapping[str, Any]) -> None:
    """What an explanation lacks because the search stopped early, and what of it was seen on the way."""
    console.print()
    console.print(
        "  What each fixed key costs, and what less memory or fewer devices would, was not looked for, because the search "
        "stopped early: --time-limit SECONDS gives it longer.",
        markup=False,
    )
    if lighter := seen_with_less_memory(search, predicted["peak_memory_gib"]):
        table = Table(
            title="less memory, as far as the search saw it on its way (nothing is proved of these)",
            title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0),
        )  # fmt: skip
        for name in ("peak memory", "step time"):
            table.add_column(name, justify="right")
        table.add_column("strategy", overflow="fold")
        for time_s, peak, label in lighter:
            table.add_row(gib(peak), seconds(time_s), label)
        console.print()
        console.print(table)


def _tradeoffs(points: Sequence[Mapping[str, Any]], *, priced: bool) -> Table:
    """With less memory, or with fewer devices: what the step then takes and costs."""
    table = Table(
        title="less memory, fewer devices",
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for name in ("devices", "peak memory", "step time", "price of a step" if priced else "device-seconds"):
        table.add_column(name, justify="right")
    table.add_column("strategy", overflow="fold")
    for one in points:
        table.add_row(
            f"{one['devices']:,}", gib(one["peak_memory_gib"]), seconds(one["step_time_s"]),
            significant(one["device_cost"]), one["label"],
        )  # fmt: skip
    return table


def print_outcomes(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """The cases of a what-if, one a line, as they were asked for."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    names = list(rows[0]["settings"])
    for name in names:
        table.add_column(name, overflow="fold")
    more = [key for key in ("days", "price") if any(key in row for row in rows)]
    what = next((counted(row["sample"]) for row in rows if "sample" in row), "tokens")
    for name in ("devices", f"{what}/s", "step time", "MFU", "peak memory", *more):
        table.add_column(name, justify="right")
    table.add_column("strategy", overflow="fold")
    for row in rows:
        given = [row["settings"][name] for name in names]
        if "reason" in row:
            table.add_row(*given, *"-----", *("-" for _ in more), row["reason"].splitlines()[0])
        else:
            speed, peak = significant(row["tokens_per_s"]), gib(row["peak_memory_gib"])
            told = [f"{row['devices']:,}", speed, seconds(row["step_time_s"]), percent(row["mfu"]), peak]
            told += [
                count(row[key]) if key == "price" else significant(row[key]) for key in more if key in row
            ]
            table.add_row(*given, *told, *("-" for key in more if key not in row), row["label"])
    console.print(table)
