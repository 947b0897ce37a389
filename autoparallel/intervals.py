"""How often a run saves, as the strategy's `[recovery]` says it."""

from __future__ import annotations

from autoparallel.planner.strategy.types import RecoveryRule


def default_interval_s(rule: RecoveryRule) -> float | None:
    """Seconds between checkpoints in storage, where the rule says so."""
    return (rule.storage_every_s if rule.policy == "peers" else rule.checkpoint_every_s) or None


def steps_of(rule: RecoveryRule, step_s: float) -> int:
    """How many steps the rule's interval is; every step where it does not say."""
    return max(round(rule.checkpoint_every_s / step_s), 1) if step_s > 0 and rule.policy == "peers" else 1
