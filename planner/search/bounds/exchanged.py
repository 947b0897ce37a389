"""What is exchanged of a layer group, of the whole model, and of a layer group of each kind, from rates by parameter."""

from __future__ import annotations

import numpy as np

from autoparallel.planner.search.bounds.communication import Communication
from autoparallel.planner.search.bounds.tables import PriceTable
from autoparallel.planner.search.space.meshes import Floats, Ints


def of_kinds(table: PriceTable, each_s: Floats, expert_s: Floats, numbers: str) -> Floats:
    """Seconds of a layer group of each kind at these rates per number, [variant, kind]."""
    dense, experts = (
        ("dense_trainable", "expert_trainable") if numbers == "trainable" else ("dense", "experts")
    )
    return table.of_kinds(dense) * each_s[:, None] + table.of_kinds(experts) * expert_s[:, None]


def gathers_s(
    repeated: int, communication: Communication, table: PriceTable, *, again: bool
) -> dict[str, Floats]:
    """Of a layer group, of all parameters, of a layer group of each kind, and of one parameter: what is gathered before a forward, and
    before a backward: nothing is known of that where not all parts of the model have one (`again`)."""
    found = {}
    for name, counts in (("gather", 1.0), ("regather", float(again))):
        group_s, each_s, expert_s = (
            counts * getattr(communication, key) for key in (f"{name}_s", f"{name}_each_s", "gather_expert_s")
        )
        with_experts_s = group_s + expert_s * table.group_experts
        all_s = each_s * table.all_parameters + expert_s * table.all_experts
        found[f"group_{name}_s"] = with_experts_s
        found[f"all_{name}_s"] = np.maximum(repeated * with_experts_s, all_s)
        found[f"kind_{name}_s"] = _kind_gathers_s(table, group_s, each_s, expert_s)
        found[f"{name}_each_s"] = each_s
    return found


def _kind_gathers_s(table: PriceTable, group_s: Floats, each_s: Floats, expert_s: Floats) -> Floats:
    """Seconds to gather the parameters of a layer group of each kind: at the best rate, and no less than those of the
    smallest layer group of the kinds that count where it has as many."""
    as_many = table.of_kinds("dense") >= table.group_parameters[:, None]
    best = of_kinds(table, each_s, 0.0 * expert_s, "all")
    least = np.where(as_many, np.maximum(best, group_s[:, None]), best)
    return least + table.of_kinds("experts") * expert_s[:, None]


def updates_s(pp: Ints, communication: Communication, table: PriceTable) -> dict[str, Floats]:
    """Of a layer group, of all parameters, of a layer group of each kind, and of one parameter: what is gathered, once updated, beside
    the next step's first forwards, which pipeline stages wait for."""
    several = pp > 1  # of one stage it is known what all of it waits for
    each_s, expert_s = communication.updated_s * several, communication.updated_expert_s * several
    return {
        "group_updated_s": each_s * table.group_parameters + expert_s * table.group_experts,
        "all_updated_s": each_s * table.all_parameters + expert_s * table.all_experts,
        "kind_updated_s": of_kinds(table, each_s, expert_s, "all"),
        "updated_s": each_s,
    }
