"""`recovery` of an answer: what each way to recover leaves of a plan's speed."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import Any

from autoparallel.costmodel.prediction import Prediction
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.recovery import plan_recovery
from autoparallel.planner.strategy.types import RecoveryRule, Strategy


def recovery_table(expander: Expander, strategy: Strategy, prediction: Prediction) -> dict[str, Any]:
    """`recovery`, where the cluster states its failures: what the strategy says or else the best, and each policy's
    goodput, the best first."""
    planned = plan_recovery(expander, strategy, prediction)
    if planned is None:
        return {}
    said = strategy.recovery
    way = planned.best if said == RecoveryRule() else planned.as_said(said)
    rule, fewer_s = planned.rule(way), planned.saved.fewer_step_s
    return {
        "recovery": {
            "policy": way.policy,
            "goodput": way.goodput,
            "checkpoint_every_s": way.checkpoint_every_s,
            "storage_every_s": way.storage_every_s,
            "peers": said.peers or rule.peers,
            "spares": way.spares,
            "timeout_s": said.timeout_s or rule.timeout_s,
            "mtbf_s": planned.outages.mtbf_s,
            "state_bytes": planned.state_bytes,
            "fewer_step_s": fewer_s if fewer_s is not None and isfinite(fewer_s) else None,
            "policies": [asdict(one) for one in planned.ways],
        }
    }
