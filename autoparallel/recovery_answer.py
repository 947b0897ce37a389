"""`recovery` of an answer: what each way to recover leaves of a plan's speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from autoparallel.costmodel.prediction import Prediction, Span
from autoparallel.costmodel.recovery import timeout_s
from autoparallel.planner.recovery import plan_recovery
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles import Cluster


def recovery_table(
    cluster: Cluster, strategy: Strategy, prediction: Prediction, parameters: int, spans: Sequence[Span] = ()
) -> dict[str, Any]:
    """`recovery`, where the cluster states its failures: each policy's goodput, the best first, and the time-out
    by the longest of `spans` (else by the step)."""
    planned = plan_recovery(cluster, strategy, prediction, parameters)
    if planned is None:
        return {}
    longest = max((span.end_s - span.start_s for span in spans), default=prediction.step_time_s)
    best = planned.best
    return {
        "recovery": {
            "policy": best.policy,
            "goodput": best.goodput,
            "checkpoint_every_s": best.checkpoint_every_s,
            "spares": best.spares,
            "timeout_s": timeout_s(longest),
            "mtbf_s": planned.outages.mtbf_s,
            "state_bytes": planned.state_bytes,
            "policies": [asdict(way) for way in planned.ways],
        }
    }
