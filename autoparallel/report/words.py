"""A strategy in words: what it does on this cluster, and why it and not another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from autoparallel.labels import offload_label, whole_matrices
from autoparallel.planner.expand.schedules import rank_of_stage
from autoparallel.planner.strategy.runs import runs
from autoparallel.planner.strategy.types import Strategy
from autoparallel.planner.strategy.write import literal
from autoparallel.profiles.hardware import Cluster
from autoparallel.report.numbers import bandwidth, gib, percent, seconds, significant, times
from autoparallel.report.placement import Place, placement_setting, placement_words, places
from autoparallel.report.tables import tables_words

# Share of the step by which a simpler strategy may be slower and is still worth a thought: predictions of single runs
# are further off than that (docs/accuracy.md). Kind: formula.
NEARLY = 0.01
LIGHTER_SHOWN = 8

_SCHEDULES = {
    "gpipe": "GPipe: all forward passes, then all backward passes",
    "1f1b": "1F1B: after the fill, every stage alternates one forward and one backward pass",
    "interleaved-1f1b": "Interleaved 1F1B: every rank holds several chunks of the model and alternates among them",
    "zb1p": "ZB-1P: weight gradients are computed where the pipeline would idle",
    "zbv": "ZB-V: two chunks a rank in a V, weight gradients fill the idle time",
    "dualpipev": "DualPipe-V: forward and backward passes of the two directions run side by side",
}
_ZERO = {
    0: "every rank keeps parameters, gradients and optimizer state whole",
    1: "the optimizer state is divided among them (ZeRO-1)",
    2: "the optimizer state and gradients are divided among them (ZeRO-2)",
    3: "the optimizer state, gradients and parameters are divided among them (ZeRO-3, gathered block by block)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One decision: its setting in short, what it does here, and the axis size where it is an axis."""

    name: str
    setting: str
    text: str


def cluster_words(cluster: Cluster) -> str:
    """`16 h100-sxm in 2 nodes of 8`."""
    parts = []
    for group in cluster.groups:
        nodes = times(group.nodes, "node")
        short = "".join(f", node {node} of {devices}" for node, devices in group.short)
        text = f"{group.devices:,} {group.device.name} ({nodes} of {group.devices_per_node}{short})"
        parts.append(text)
    return " and ".join(parts)


def choices(strategy: Strategy, cluster: Cluster, predicted: Mapping[str, Any]) -> tuple[Choice, ...]:
    """Every decision that matters, outermost axis first, then memory and communication."""
    where = {place.axis: place for place in places(strategy, cluster)}
    found = []
    if "pp" in where:
        found.append(_pipeline(strategy, where["pp"], predicted))
        if len(set(strategy.mesh.groups)) > 1:
            found.append(_groups(strategy, cluster))
    found.extend(_data(strategy, where, predicted))
    if "cp" in where:
        text = f"Each sequence is split over {where['cp'].size} devices, which talk {_over(where['cp'])}."
        text += _cost(predicted, "cp_comm", "Exchanging keys and values takes")
        found.append(Choice(name="Context parallelism", setting=f"cp = {where['cp'].size}", text=text))
    if "tp" in where:
        found.append(_tensor(strategy, where["tp"], predicted))
    if strategy.mesh.ep > 1:
        text = (
            f"Each layer's experts are divided among {strategy.mesh.ep} devices, and tokens travel to theirs "
            f"{_over(where['ep'])}."
        )
        text += _cost(predicted, "ep_comm", "Sending tokens takes")
        found.append(Choice(name="Expert parallelism", setting=f"ep = {strategy.mesh.ep}", text=text))
    if placed := placement_words(strategy, cluster):
        found.append(Choice(name="Placement", setting=placement_setting(strategy), text=placed))
    if not found:
        text = "The whole model trains on one device; nothing is communicated."
        found.append(Choice(name="One device", setting="1 device", text=text))
    if strategy.embedding:
        setting, text = tables_words(strategy)
        found.append(Choice(name="Embedding tables", setting=setting, text=text))
    found.append(_batch(strategy, predicted.get("sample", "sequence")))
    found.append(_recompute(strategy, predicted))
    if away := offload_label(strategy):
        text = f"Kept in the host's memory, and fetched when needed: {away}."
        setting = (
            f"optimizer = {strategy.offload.optimizer:g}, activations = {strategy.offload.activations:g}"
        )
        found.append(Choice(name="Offload", setting=setting, text=text))
    return tuple(found)


def _over(place: Place) -> str:
    apart = "side by side" if place.stride == 1 else f"{place.stride} devices apart"
    return f"over {place.level.name} ({bandwidth(place.level.bytes_per_s)} per device and direction; {apart})"


def _cost(predicted: Mapping[str, Any], key: str, what: str) -> str:
    breakdown, step = predicted.get("breakdown_s", {}), predicted.get("step_time_s")
    if not step or key not in breakdown:
        return ""
    lost = breakdown[key] / step
    if lost < 5e-4:
        return f" {what} next to nothing of the step."
    return f" {what} {percent(lost)} of the step."


def _pipeline(strategy: Strategy, place: Place, predicted: Mapping[str, Any]) -> Choice:
    blocks = strategy.pipeline.stage_blocks
    even = "each" if len(set(blocks)) == 1 else "from"
    dealt = f"{blocks[0]}" if len(set(blocks)) == 1 else f"{min(blocks)} to {max(blocks)}"
    chunks = "stages" if strategy.pipeline.virtual_stages == 1 else "chunks"
    text = (
        f"The {times(sum(blocks), 'block')} are cut into {len(blocks)} {chunks} ({even} {dealt}); "
        f"activations travel between ranks {_over(place)}. "
        f"{_SCHEDULES.get(strategy.pipeline.schedule, strategy.pipeline.schedule)}; "
        f"{times(strategy.micro_batches, 'micro-batch').replace('batchs', 'batches')} a step."
    )
    setting = f"pp = {place.size}, {strategy.pipeline.schedule}"
    if strategy.pipeline.virtual_stages > 1:
        setting += f", {strategy.pipeline.virtual_stages} chunks a rank"
    return Choice(
        name="Pipeline parallelism",
        setting=setting,
        text=text + _cost(predicted, "bubble", "Idle time while the pipeline fills and drains takes"),
    )


def _groups(strategy: Strategy, cluster: Cluster) -> Choice:
    mesh, chunks = strategy.mesh, strategy.pipeline.stage_blocks
    home = rank_of_stage(strategy.pipeline.schedule, mesh.pp, strategy.pipeline.virtual_stages)
    each = mesh.devices // mesh.pp
    parts = []
    blocks = [sum(n for n, at in zip(chunks, home, strict=True) if at == rank) for rank in range(mesh.pp)]
    for group, same in groupby(range(mesh.pp), key=lambda rank: mesh.groups[rank]):
        first, *more = list(same)
        last = more[-1] if more else first
        ranks = f"ranks {first} to {last}" if more else f"rank {first}"
        held = runs(blocks[first : last + 1]) if more else times(blocks[first], "block")
        parts.append(
            f"{ranks} on {each} {cluster.groups[group].device.name}{' each' if more else ''} with "
            f"{held}{' blocks' if more else ''}"
        )
    text = f"Each pipeline rank has devices of one kind, and stages in proportion: {', '.join(parts)}."
    return Choice(name="Device groups", setting=f"groups = {runs(mesh.groups)}", text=text)


def _data(strategy: Strategy, where: Mapping[str, Place], predicted: Mapping[str, Any]) -> list[Choice]:
    mesh, found = strategy.mesh, []
    cost = _cost(
        predicted, "dp_comm", "Synchronising gradients and parameters, where nothing hides it, takes"
    )
    if "dp_shard" in where:
        place = where["dp_shard"]
        text = (
            f"{times(place.size, 'replica')} read different samples; {_zero_words(strategy)}. "
            f"They talk {_over(place)}."
        )
        setting = f"dp_shard = {place.size}, zero = {strategy.shard.zero}"
        if ranks := strategy.shard.secondary:
            setting += f", secondary = {ranks}"
            text += (
                f" From forward to backward every {ranks} neighbours hold a second copy of the parameters in shares, which the "
                "backward pass gathers from."
            )
        found.append(Choice(name="Sharded data parallelism", setting=setting, text=text + cost))
    if "dp_replicate" in where:
        place = where["dp_replicate"]
        what = "copies of the sharded group" if mesh.dp_shard > 1 else "copies of the model"
        text = f"{place.size} {what} read different samples and average their gradients {_over(place)}."
        setting = f"dp_replicate = {place.size}"
        extra = "" if "dp_shard" in where else cost
        found.append(Choice(name="Replicated data parallelism", setting=setting, text=text + extra))
    lossy = [c for c in strategy.grad_sync.compression if c != "none"]
    if lossy and found:
        text = f"Gradients travel as {', '.join(strategy.grad_sync.compression)} (per network level, innermost first)."
        found.append(Choice(name="Gradient compression", setting=", ".join(lossy), text=text))
    weights = strategy.grad_sync.weights
    if weights != "none" and found and strategy.shard.zero == 3:
        text = (
            f"Parameters are gathered as {weights}; their shards, and what the optimizer updates, stay whole."
        )
        found.append(Choice(name="Compressed gathers", setting=weights, text=text))
    return found


def _zero_words(strategy: Strategy) -> str:
    """What is divided, and among whom: context-parallel ranks hold the same state, and share in it."""
    mesh, text = strategy.mesh, _ZERO[strategy.shard.zero]
    if mesh.cp == 1 or not strategy.shard.zero:
        return text
    return text.replace(
        "among them", f"among their {mesh.dp_shard * mesh.cp} ranks, context-parallel ones included"
    )


def _tensor(strategy: Strategy, place: Place, predicted: Mapping[str, Any]) -> Choice:
    whole = whole_matrices(strategy)
    but = f" but those of {', '.join(whole)}, which are whole on each," if whole else ""
    text = f"The matrices of every block{but} are split over {place.size} devices, which talk {_over(place)}."
    if strategy.shard.sequence_parallel:
        text += (
            " Between them, activations are split along the sequence, which saves memory at no extra traffic."
        )
    cost = _cost(predicted, "tp_comm", "Exchanging activations takes")
    setting = f"tp = {place.size}" + (", sequence parallel" if strategy.shard.sequence_parallel else "")
    return Choice(name="Tensor parallelism", setting=setting, text=text + cost)


def _batch(strategy: Strategy, sample: str) -> Choice:
    batch = strategy.batch
    n = strategy.micro_batches
    accumulate = (
        "in one pass"
        if n == 1
        else f"in {n:,} micro-batches of {batch.micro}, whose gradients are accumulated"
    )
    per_rank = batch.global_ // strategy.mesh.data_parallel
    text = (
        f"{times(batch.global_, sample)} per optimizer step, {per_rank} per data-parallel rank, {accumulate}."
    )
    return Choice(name="Batch", setting=f"global = {batch.global_}, micro = {batch.micro}", text=text)


def _recompute(strategy: Strategy, predicted: Mapping[str, Any]) -> Choice:
    mode, per_stage = strategy.recompute.mode, strategy.recompute.per_stage
    kept = {
        "none": "Every activation is kept until its backward pass.",
        "selective": "The attention core is computed again in the backward pass instead of being kept.",
        "operators": "Of each block the results of matrix products and of attention are kept; the rest is computed again "
        "in the backward pass.",
        "full": "Each block keeps only its input and is computed again before its backward pass.",
    }
    if mode != "full" and sum(per_stage) == sum(strategy.pipeline.stage_blocks) > 0:
        mode, per_stage = "full", ()
    text = kept[mode]
    if any(per_stage) and mode != "full":
        chunks = f" ({runs(per_stage)[1:-1]} by chunk)" if len(per_stage) > 1 else ""
        again = f"{times(sum(per_stage), 'block')}{chunks} recomputed in full: only the input is kept. In the others"
        text = f"{again}, {text[0].lower()}{text[1:]}"
    cost = _cost(predicted, "recompute", "It costs") if mode != "none" or any(per_stage) else ""
    setting = (
        mode if not any(per_stage) or mode == "full" else f"{mode}, {times(sum(per_stage), 'block')} in full"
    )
    return Choice(name="Recomputation", setting=setting, text=text + cost)


def why(search: Mapping[str, Any], step_time_s: float) -> tuple[str, ...]:
    """Why this strategy: what was searched, what is proved, and what the nearest others would cost."""
    found = []
    status = search.get("status")
    candidates, pruned = search.get("candidates"), search.get("pruned")
    if candidates:
        text = f"{candidates:,} strategies were considered"
        text += f"; {pruned:,} of them were ruled out by a lower bound or by memory." if pruned else "."
        found.append(text)
    if status == "optimal":
        found.append("None of them is better under the cost model: the search ended with a proof.")
    elif status and search.get("lower_bound_s"):
        found.append(f"The search stopped early: a better strategy could exist, but {bound_words(search)}.")
    against = ""
    if chosen := chosen_words(search, step_time_s):
        found.append(f"It is {chosen}.")
        against = ", compared with the optimum,"
    for other in list(search.get("alternatives", ()))[:1]:
        reason = other.get("reason", "").rstrip(".")
        found.append(f"The nearest rejected strategy{against} is {other.get('label', 'another')}: {reason}.")
    if simpler := simpler_words(search, step_time_s):
        found.append(f"Simpler and nearly as good: {simpler}.")
    return tuple(found)


def chosen_words(search: Mapping[str, Any], step_time_s: float) -> str:
    """`1.5 % slower than the optimum, pp 2 × dp_shard 8: it has memory to spare …`, where another strategy was chosen; else ""."""
    if "optimum" not in search:
        return ""
    slower = percent(step_time_s / search["optimum_s"] - 1.0)
    return f"{slower} slower than the optimum, {search['optimum']}: it {search['instead']} (--within 0 gives the optimum)"


def bound_words(search: Mapping[str, Any]) -> str:
    """`no strategy is faster than 5.48 s (gap 10.1 %)`, in the quantity that was minimised."""
    if "lower_bound_gib" in search:
        least = f"needs less than {gib(search['lower_bound_gib'])}"
    elif "lower_bound_cost" in search:
        least = f"costs less than {significant(search['lower_bound_cost'])} a step"
    else:
        least = f"is faster than {seconds(search['lower_bound_s'])}"
    return f"no strategy {least} (gap {percent(search.get('gap') or 0.0)})"


def seen_with_less_memory(search: Mapping[str, Any], peak_gib: float) -> list[tuple[float, float, str]]:
    """Step time, peak and label of the strategies that were priced and fit, of which none is better in both; those
    that need less than `peak_gib`, fastest first."""
    found: list[tuple[float, float, str]] = []
    rejected = [
        (one["step_time_s"], one["peak_memory_gib"], one["feasible"], one["label"])
        for one in search.get("alternatives", ())
    ]
    for time_s, peak, fits, label in sorted([*rejected, *map(tuple, search.get("explored", ()))]):
        if fits and peak < (found[-1][1] if found else peak_gib):
            found.append((time_s, peak, label))
    return found[:LIGHTER_SHOWN]


def simpler_words(search: Mapping[str, Any], step_time_s: float) -> str:
    """`dp_shard 8, zero 1, micro 1: 0.5 % slower, 1.2 GiB`: a simpler strategy that is nearly as fast; else ""."""
    for other in search.get("alternatives", ()):
        slower = other["step_time_s"] / step_time_s - 1.0
        if other.get("simpler") and other.get("feasible", True) and 0.0 <= slower <= NEARLY:
            return f"{other['label']}: {percent(slower)} slower, {gib(other['peak_memory_gib'])}"
    return ""


def break_even_words(one: Mapping[str, Any]) -> str:
    """From where on a method of compression would shorten the plan's step."""
    key = one.get("key", "grad_sync.compression")
    what = f"{key}: {one['method']} over {one['level']}"
    if "below_gbit_per_s" not in one:
        return f"{what} pays at any bandwidth that was looked at"
    if not one["below_gbit_per_s"]:
        hide = (
            "gathers hide behind computation"
            if key == "grad_sync.weights"
            else "the gradients hide behind the backward pass"
        )
        return f"{what} never pays: {hide}, or encoding takes longer"
    below, now = (significant(one[key]) for key in ("below_gbit_per_s", "now_gbit_per_s"))
    return f"{what} pays below {below} Gbit/s a device ({now} here)"


def constraint_words(cost: Mapping[str, Any]) -> str:
    """`mesh.tp = 8 costs you 4.2 % against 4 (…)`: what a constraint costs, as far as it is known."""
    what = f"{cost['key']} = {short(cost['value'])}" if "value" in cost else "the constraints together"
    verb = "costs" if "value" in cost else "cost"
    if cost["cost"] > 0:
        other = f" against {short(cost['instead'])}" if "instead" in cost else ""
        more = "" if cost["proved"] else f", and no more than {percent(cost['at_most'])}"
        return f"{what} {verb} you {percent(cost['cost'])}{other} ({cost['label']}){more}."
    if cost["proved"]:
        return f"{what} {verb} nothing: no strategy is better without."
    return f"{what} {verb} you no more than {percent(cost['at_most'])}; nothing better was found without."


def short(value: Any) -> str:
    """A value as the file spells it, but for long lists of numbers."""
    numbers = isinstance(value, list | tuple) and all(isinstance(one, int) for one in value)
    return runs(value) if numbers else literal(value)


def sureness(found: Mapping[str, Any]) -> str:
    """The interval of the step time, what it was seen on, and what kinds of figures the prediction rests on."""
    low, high = seconds(found["step_time_low_s"]), seconds(found["step_time_high_s"])
    kinds = ", ".join(
        f"{percent(share)} {kind}" for kind, share in found["rests_on"].items() if share >= 0.01
    )
    held = f"; fits with {percent(found['fits'])}" if "fits" in found else ""
    return f"{low} to {high} in nine of ten of {found['basis']}{held}; rests on figures {kinds}"
