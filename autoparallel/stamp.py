"""The stamps of a prediction: what of a strategy file it was made for, so that an edited file is told from its numbers, and what
the numbers were, so that edited numbers are told, too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from autoparallel.errors import UserError
from autoparallel.planner.strategy.file import StrategyFile
from autoparallel.planner.strategy.types import RecoveryRule, Strategy
from autoparallel.profiles.record import is_whole

KEY, NUMBERS_KEY = "strategy_hash", "numbers_hash"  # of [predicted]


def stamp(strategy: Strategy, *, graph_hash: str | None, seq_len: int | None, cluster_hash: str) -> str:
    """Sixteen hex digits of all that a prediction depends on: every decision, the model and the machines."""
    decided = asdict(_plain(strategy))
    if strategy.recovery == RecoveryRule():  # as files said before there was such a section
        del decided["recovery"]
    elif not strategy.recovery.storage_every_s:
        del decided["recovery"]["storage_every_s"]
    if strategy.grad_sync.weights == "none":  # likewise
        del decided["grad_sync"]["weights"]
    if not strategy.shard.secondary:
        del decided["shard"]["secondary"]
    made_for = {
        "strategy": decided, "graph": graph_hash, "seq_len": seq_len, "cluster": cluster_hash,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(made_for, sort_keys=True).encode()).hexdigest()[:16]


def numbers_stamp(predicted: Mapping[str, Any], search: Mapping[str, Any]) -> str:
    """Sixteen hex digits of [predicted], its stamps aside, and [search]; the same of both as they are written and as they are read."""
    numbers = {key: value for key, value in predicted.items() if key not in (KEY, NUMBERS_KEY)}
    text = json.dumps([_as_read(numbers), _as_read(search)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_read(value: Any) -> Any:
    """As TOML gives it back: what is None is not written; empty tables, which may not be either, count as nothing."""
    if isinstance(value, Mapping):
        inner = {str(key): _as_read(one) for key, one in value.items()}
        return {key: one for key, one in inner.items() if one is not None and one != {}}
    if isinstance(value, list | tuple):
        return [_as_read(one) for one in value]
    return str(value) if isinstance(value, str) else value


def _plain(strategy: Strategy) -> Strategy:
    """Whole numbers of keys that hold any number are the same as with a point."""
    offload, sync = strategy.offload, strategy.grad_sync
    recovery = strategy.recovery
    return replace(
        strategy,
        recovery=replace(
            recovery,
            checkpoint_every_s=float(recovery.checkpoint_every_s),
            storage_every_s=float(recovery.storage_every_s),
            timeout_s=float(recovery.timeout_s),
        ),
        offload=replace(offload, optimizer=float(offload.optimizer), activations=float(offload.activations)),
        grad_sync=replace(sync, bucket_mib=float(sync.bucket_mib)),
        execution=replace(strategy.execution, dropout=float(strategy.execution.dropout)),
    )


def check_stamp(file: StrategyFile, strategy: Strategy, cluster_hash: str) -> None:
    """Raise UserError where [predicted] of a file is not of the strategy, model and machines that stand in it, or is not what was
    predicted.

    Files without a stamp, as earlier versions wrote them, are taken at their word.
    """
    said, problem = file.predicted.get(KEY), file.problem
    assert problem is not None
    made = stamp(strategy, graph_hash=problem.graph_hash, seq_len=problem.seq_len, cluster_hash=cluster_hash)
    was = file.predicted.get(NUMBERS_KEY)
    numbers = was in (None, numbers_stamp(file.predicted, file.search))
    if said in (None, made) and numbers:
        return
    assert problem.cluster is not None
    cluster = "CLUSTER" if is_whole(problem.cluster) else problem.cluster["name"]
    command = f"{problem.model or 'MODEL'} --cluster {cluster} --strategy {file.path}"
    what = (
        "so [predicted] and [search] are of another strategy"
        if numbers
        else "[predicted] or [search] among it"
    )
    raise UserError(
        f"{file.path}: was edited after plan wrote it, {what}: `autoparallel "
        f"score {command}` prices what it says now, `autoparallel plan {command} -o NEW.toml` writes it with its numbers"
    )
