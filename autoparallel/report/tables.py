"""Where a strategy keeps embedding tables, in words."""

from __future__ import annotations

from autoparallel.planner.strategy.types import EmbeddingRule, Strategy

PLACES_SHOWN = 4
_PLACES = {
    "device": "whole on every device",
    "sharded": "rows dealt in turn to the devices of the data-parallel ranks",
    "parameter-server": "rows on the hosts",
}


def tables_words(strategy: Strategy) -> tuple[str, str]:
    """In short, and what stands where, what a step does for it, and under which law of access."""
    alike: dict[tuple[str, int], list[str]] = {}
    for rule in strategy.embedding:
        alike.setdefault((str(rule.tier), rule.hot_rows or 0), []).append(rule.module)
    told = [f"{_names(modules)}: {_place_words(*place)}" for place, modules in alike.items()]
    more = [f"and {len(told) - PLACES_SHOWN} other places"] if len(told) > PLACES_SHOWN else []
    text = (
        f"{'; '.join([*told[:PLACES_SHOWN], *more])}. Each micro-batch fetches the cold rows that it looks up, each once, "
        "and gives back their gradients; nothing hides this, and a step computes what one process computes. "
        f"{_law_words(strategy)} {_update_words(strategy)}"
    )
    tiers = {tier for tier, _ in alike}
    return ", ".join(tier for tier in _PLACES if tier in tiers), text


def rule_words(rule: EmbeddingRule) -> str:
    """A rule in short."""
    return _place_words(str(rule.tier), rule.hot_rows or 0)


def _names(modules: list[str]) -> str:
    """`tables.0`, or `7 tables (tables.0 … tables.6)`."""
    if len(modules) == 1:
        return modules[0]
    return f"{len(modules)} tables ({modules[0]} … {modules[-1]})"


def _place_words(tier: str, hot_rows: int) -> str:
    hot = f", the first {hot_rows:,} on every device" if hot_rows and tier != "device" else ""
    return _PLACES[tier] + hot


def _law_words(strategy: Strategy) -> str:
    access = strategy.embedding_access
    own = f", {len(access.tables)} tables by laws of their own" if access.tables else ""
    if access.law == "uniform" and not access.tables:
        return (
            "No access frequency was given (embedding_access.law): every row counts as equally likely, which is where hot "
            "rows help least."
        )
    law = "a measured histogram" if access.law.startswith("steps:") else access.law
    return f"Rows are looked up by {law}{own}, and numbered by frequency, the most wanted first."


def _update_words(strategy: Strategy) -> str:
    update, optimizer = strategy.embedding_access.update, strategy.execution.optimizer
    if update == "touched" or (update == "auto" and optimizer == "sgd"):
        exact = "" if optimizer == "sgd" else ", as a sparse optimizer does"
        return f"A step updates the cold rows that it looked up{exact}."
    return (
        f"A step updates every cold row, as {optimizer} with dense gradients does; embedding_access.update = "
        '"touched" prices a sparse optimizer.'
    )
