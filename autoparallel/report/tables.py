"""Where a strategy keeps embedding tables, in words."""

from __future__ import annotations

from autoparallel.planner.strategy.types import EmbeddingRule, Strategy

RULES_SHOWN = 4


def tables_words(strategy: Strategy) -> tuple[str, str]:
    """In short, and what stands where, what a step does for it, and under which law of access."""
    rules = strategy.embedding
    told = [_rule_words(rule) for rule in rules[:RULES_SHOWN]]
    told += [f"and {len(rules) - RULES_SHOWN} more rules"] if len(rules) > RULES_SHOWN else []
    tiers = {rule.tier for rule in rules}
    text = f"{_sentence('; '.join(told))}. "
    text += "Each micro-batch fetches the cold rows that it looks up, each once, and gives back their gradients; nothing "
    text += "hides this, and a step computes what one process computes. "
    text += f"{_law_words(strategy)} {_update_words(strategy)}"
    names = ", ".join(str(tier) for tier in ("device", "sharded", "parameter-server") if tier in tiers)
    return names, text


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _rule_words(rule: EmbeddingRule) -> str:
    where = {
        "device": "whole on every device",
        "sharded": "rows dealt to the data-parallel ranks in turn",
        "parameter-server": "rows on the hosts",
    }[str(rule.tier)]
    hot = (
        f", the first {rule.hot_rows:,} rows on every device"
        if rule.hot_rows and rule.tier != "device"
        else ""
    )
    return f"{rule.module}: {where}{hot}"


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
