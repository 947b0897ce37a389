from __future__ import annotations

from autoparallel.planner.strategy.types import (
    Batch,
    EmbeddingAccess,
    EmbeddingRule,
    Execution,
    Mesh,
    Strategy,
)
from autoparallel.report.tables import tables_words

RULES = (
    *(EmbeddingRule(module=f"tables.{i}", tier="sharded", hot_rows=1024) for i in range(3)),
    EmbeddingRule(module="users", tier="parameter-server", hot_rows=0),
    EmbeddingRule(module="days", tier="device"),
)


def words(access: EmbeddingAccess, optimizer: str = "adamw") -> tuple[str, str]:
    return tables_words(
        Strategy(
            batch=Batch(global_=8, micro=1), mesh=Mesh(dp_replicate=8), embedding=RULES, embedding_access=access,
            execution=Execution(optimizer=optimizer),
        )
    )  # fmt: skip


def test_tables_in_the_same_place_are_told_together() -> None:
    setting, text = words(EmbeddingAccess(law="zipf:1.1"))
    assert setting == "device, sharded, parameter-server"
    assert "3 tables (tables.0 … tables.2): rows dealt in turn" in text
    assert "the first 1,024 on every device" in text
    assert "users: rows on the hosts." in text or "users: rows on the hosts;" in text
    assert "zipf:1.1" in text


def test_without_a_law_the_answer_says_that_rows_count_as_alike() -> None:
    assert "No access frequency was given" in words(EmbeddingAccess())[1]


def test_what_a_step_updates_is_said() -> None:
    assert "updates every cold row, as adamw" in words(EmbeddingAccess())[1]
    assert "as a sparse optimizer does" in words(EmbeddingAccess(update="touched"))[1]
    assert "it looked up." in words(EmbeddingAccess(), "sgd")[1]
