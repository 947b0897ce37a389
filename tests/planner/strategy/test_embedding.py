"""`[[embedding]]` and `[embedding_access]` in a strategy file: read, written, checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoparallel.errors import UserError
from autoparallel.planner.strategy.access_laws import MOST_STEPS
from autoparallel.planner.strategy.file import (
    apply_settings,
    missing_keys,
    read_strategy_file,
    strategy_from_constraints,
    strategy_to_constraints,
    write_strategy,
)
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.types import (
    Batch,
    EmbeddingAccess,
    EmbeddingRule,
    Mesh,
    Pipeline,
    Strategy,
)
from autoparallel.profiles.load import load_cluster
from tests.toy_tables import toy_recommender

GRAPH, CLUSTER = toy_recommender(1000, 2000), load_cluster("a100-sxm-80gb:1x8")
WHOLE = Strategy(
    batch=Batch(global_=64, micro=8), mesh=Mesh(dp_replicate=8), pipeline=Pipeline(stage_blocks=(0,)),
    embedding=(
        EmbeddingRule(module="tables.0", tier="device"),
        EmbeddingRule(module="tables.*", tier="parameter-server", hot_rows=64),
    ),
    embedding_access=EmbeddingAccess(law="zipf:1.1", tables=(("tables.1", "uniform"),), update="touched"),
)  # fmt: skip


def test_a_strategy_with_tables_survives_its_file(tmp_path: Path) -> None:
    write_strategy(tmp_path / "s.toml", WHOLE, {}, {}, {})
    constraints = read_strategy_file(tmp_path / "s.toml").constraints
    assert strategy_from_constraints(constraints) == WHOLE
    assert strategy_from_constraints(strategy_to_constraints(WHOLE)) == WHOLE


def test_a_file_without_tables_says_nothing_of_them(tmp_path: Path) -> None:
    plain = replace(WHOLE, embedding=(), embedding_access=EmbeddingAccess())
    write_strategy(tmp_path / "s.toml", plain, {}, {}, {})
    assert "embedding" not in (tmp_path / "s.toml").read_text()
    assert not missing_keys(read_strategy_file(tmp_path / "s.toml").constraints)


def test_a_rule_that_leaves_something_open_is_to_be_completed(tmp_path: Path) -> None:
    open_ = replace(WHOLE, embedding=(EmbeddingRule(module="tables.*", tier="parameter-server"),))
    write_strategy(tmp_path / "s.toml", open_, {}, {}, {})
    assert missing_keys(read_strategy_file(tmp_path / "s.toml").constraints) == ("embedding",)


def test_a_histogram_is_read_into_the_strategy(tmp_path: Path) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text("rank,cumulative_share\n10,0.5\n1000,0.9\n")
    law = apply_settings({}, [f"embedding_access.law={path}"])["embedding_access.law"]
    assert law == "steps:10=0.5,1000=0.9"


def test_a_long_histogram_is_thinned_and_keeps_its_end(tmp_path: Path) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text("\n".join(f"{rank},{(rank / 5000) ** 0.5}" for rank in range(1, 5001)))
    law = str(apply_settings({}, [f"embedding_access.law={path}"])["embedding_access.law"])
    assert law.count("=") <= MOST_STEPS
    assert law.endswith("5000=1.0")


@pytest.mark.parametrize("text", ["10,0.5\n5,0.9\n", "10;0.5\n", "rank,share\n", "10,0.1\n11,0.9\n"])
def test_a_bad_histogram_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=r"bad\.csv"):
        apply_settings({}, [f"embedding_access.law={path}"])


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("embedding_access.law=zipf", "zipf:EXPONENT"),
        ("embedding_access.law=none.csv", "cannot be read"),
        ("embedding_access.update=some", "is not known"),
        ("embedding_access.lawn=uniform", "no such strategy key"),
    ],
)
def test_bad_settings_say_what_to_try(setting: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        apply_settings({}, [setting])


def test_tiers_that_can_run_are_no_problem() -> None:
    assert strategy_problems(GRAPH, CLUSTER, WHOLE) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"embedding": (EmbeddingRule(module="table.0", tier="device"),)}, ["table.0", 'did you mean "tables.0"']),
        ({"embedding": (EmbeddingRule(module="tables.0", tier="sharded"),)}, ["hot_rows", "plan --strategy"]),
        ({"mesh": Mesh(dp_replicate=4, tp=2)}, ["mesh.tp = 1", "parameter-server"]),
        (
            {"embedding_access": EmbeddingAccess(tables=(("users", "uniform"),))},
            ["embedding_access.tables", "users", "known are"],
        ),
    ],
)  # fmt: skip
def test_what_cannot_run_is_named(change: dict[str, object], words: list[str]) -> None:
    found = strategy_problems(GRAPH, CLUSTER, replace(WHOLE, **change))
    assert any(all(word in message for word in words) for message in found), found


def test_unlike_devices_and_hosts_of_unknown_memory_are_refused() -> None:
    mixed = strategy_problems(GRAPH, load_cluster("a100-v100"), WHOLE)
    assert any("devices of one kind" in message for message in mixed), mixed
    unknown = strategy_problems(GRAPH, load_cluster("rtx4090:1x8"), WHOLE)
    assert any("does not say how much memory" in message for message in unknown), unknown
