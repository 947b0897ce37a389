"""Plans how to train a PyTorch model on a cluster, proves the plan under its cost model, and runs it."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["ReplicaTrainer", "Strategy", "Trainer", "UserError", "__version__", "auto_parallelize"]


def __getattr__(name: str) -> Any:
    # Lazy: the command line must start without torch.
    if name == "auto_parallelize":
        from autoparallel.api import auto_parallelize

        return auto_parallelize
    if name == "Trainer":
        from autoparallel.trainer import Trainer

        return Trainer
    if name == "ReplicaTrainer":
        from autoparallel.replicated import ReplicaTrainer

        return ReplicaTrainer
    if name == "Strategy":
        from autoparallel.planner.strategy.types import Strategy

        return Strategy
    if name == "UserError":
        from autoparallel.errors import UserError

        return UserError
    raise AttributeError(f"module 'autoparallel' has no attribute {name!r}")
