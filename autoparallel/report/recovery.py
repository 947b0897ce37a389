"""How a plan recovers, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoparallel.report.numbers import percent, seconds

POLICIES = {
    "restart": "wait for the node, start again, read the last checkpoint",
    "peers": "the same, from copies in the memory of neighbouring nodes",
    "replan": "go on with the nodes that are left, and with all once the node is back",
    "spares": "nodes that wait take the place of those that fail",
    "drop-replica": "the other replicas go on until it is back",
}


def recovery_words(recovery: Mapping[str, Any]) -> str:
    """What a plan recovers with, and what the other ways would leave of its speed."""
    chosen = recovery["policy"]
    spares = f" ({recovery['spares']} of them)" if recovery["spares"] else ""
    rest = ", ".join(
        f"{way['policy']} {percent(way['goodput'])}"
        for way in recovery["policies"]
        if way["policy"] != chosen
    )
    stored = (
        f" in memory and every {seconds(recovery['storage_every_s'])} in storage"
        if recovery["storage_every_s"]
        else ""
    )
    return (
        f"one every {seconds(recovery['mtbf_s'])}; {chosen}{spares} keeps {percent(recovery['goodput'])} of the speed "
        f"({rest}); a checkpoint every {seconds(recovery['checkpoint_every_s'])}{stored}, time-out {seconds(recovery['timeout_s'])}"
    )
