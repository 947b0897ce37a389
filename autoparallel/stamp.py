"""The stamp of a prediction: what of a strategy file it was made for, so that an edited file is told from its numbers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace

from autoparallel.errors import UserError
from autoparallel.planner.strategy.file import StrategyFile
from autoparallel.planner.strategy.types import RecoveryRule, Strategy
from autoparallel.profiles.record import is_whole

KEY = "strategy_hash"  # of [predicted]


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
    """Raise UserError where [predicted] of a file is not of the strategy, model and machines that stand in it.

    Files without a stamp, as earlier versions wrote them, are taken at their word.
    """
    said, problem = file.predicted.get(KEY), file.problem
    assert problem is not None
    made = stamp(strategy, graph_hash=problem.graph_hash, seq_len=problem.seq_len, cluster_hash=cluster_hash)
    if said in (None, made):
        return
    assert problem.cluster is not None
    cluster = "CLUSTER" if is_whole(problem.cluster) else problem.cluster["name"]
    command = f"{problem.model or 'MODEL'} --cluster {cluster} --strategy {file.path}"
    raise UserError(
        f"{file.path}: was edited after plan wrote it, so [predicted] and [search] are of another strategy: `autoparallel "
        f"score {command}` prices what it says now, `autoparallel plan {command} -o NEW.toml` writes it with its numbers"
    )
