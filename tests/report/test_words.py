"""What is proved and what was left out, in the quantity that was minimised."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from autoparallel.cli_words import print_explanation
from autoparallel.planner.strategy.types import Recompute
from autoparallel.profiles import load_cluster
from autoparallel.report.words import bound_words, choices, seen_with_less_memory, why
from tests.report.sample import predicted, strategy

STOPPED: dict[str, Any] = {
    "status": "feasible", "lower_bound_s": 5.48, "gap": 0.1, "candidates": 100, "pruned": 90,
    "alternatives": [
        {"kind": "ZeRO-3", "step_time_s": 9.0, "peak_memory_gib": 20.0, "feasible": True, "simpler": False,
         "reason": "slower", "label": "dp_shard 16, zero 3"},
    ],
    "explored": [[8.0, 30.0, True, "a"], [8.5, 33.0, True, "b"], [7.0, 200.0, False, "c"], [9.5, 10.0, False, "d"]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        ({}, "no strategy is faster than 5.48 s (gap 10.0 %)"),
        ({"lower_bound_gib": 12.3}, "no strategy needs less than 12.3 GiB (gap 10.0 %)"),
        ({"lower_bound_cost": 0.3}, "no strategy costs less than 0.300 a step (gap 10.0 %)"),
    ],
)
def test_a_bound_is_told_in_what_was_minimised(bound: dict[str, float], said: str) -> None:
    search = {**STOPPED, **bound}
    assert bound_words(search) == said
    assert any(said in line for line in why(search, 6.0))


def test_an_explanation_of_a_stopped_search_says_what_it_lacks_and_what_was_seen() -> None:
    told, chosen = predicted(pp=4, micro_batches=16), strategy(pp=4, micro_batches=16)
    told["peak_memory_gib"] = 40.0
    assert seen_with_less_memory(STOPPED, 40.0) == [(8.0, 30.0, "a"), (9.0, 20.0, "dp_shard 16, zero 3")]
    page = io.StringIO()
    print_explanation(Console(file=page, width=200), load_cluster("h100-sxm:2x8"), chosen, told, STOPPED)
    said = " ".join(page.getvalue().split())
    assert (
        "What each fixed key costs, and what less memory or fewer devices would, was not looked for" in said
    )
    assert "--time-limit SECONDS" in said
    assert "less memory, as far as the search saw it" in said
    assert "30.0 GiB 8.00 s a" in said


def test_every_block_in_full_leaves_no_others_to_tell_of() -> None:
    whole = replace(strategy(pp=1, micro_batches=8), recompute=Recompute(mode="none", per_stage=(32,)))
    (told,) = [c for c in choices(whole, load_cluster("h100-sxm:2x8"), {}) if c.name == "Recomputation"]
    assert told.setting == "full"
    assert told.text.startswith("Each block keeps only its input")


def test_a_report_says_what_the_optimum_was_where_another_strategy_was_chosen() -> None:
    lines = why({**STOPPED, "optimum": "pp 2", "optimum_s": 6.0, "instead": "has memory to spare"}, 6.06)
    assert (
        "It is 1.0 % slower than the optimum, pp 2: it has memory to spare (--within 0 gives the optimum)."
        in lines
    )
    assert any("rejected strategy, compared with the optimum, is dp_shard 16" in line for line in lines)
    assert all("optimum" not in line for line in why(STOPPED, 6.06))
