"""What the search covers: for each key of the strategy file whether it is searched, fixed, stated, or left out and why.

"optimal" speaks of exactly this space. `besides` says what of a searched key is left out all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoparallel.costmodel.host_memory import host_capacity_bytes
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.space.build import MAX_VIRTUAL_STAGES
from autoparallel.planner.search.space.meshes import LEAST_TOKENS
from autoparallel.planner.search.space.syncs import METHODS, open_weights
from autoparallel.planner.strategy.schema import SECTIONS, keys_of

_RECOVERY = tuple(f"recovery.{key}" for key in keys_of(SECTIONS["recovery"]))
_STATED = ("batch.global", "batch.seq_len", "phase")
ENTRIES = ("tensor", "embedding", "phase")  # lists of tables in the file, a key each here


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceKey:
    """One key: `how` is "searched", "fixed", "stated" or "left-out: REASON"."""

    key: str
    how: str
    besides: str = ""


def space_of(problem: Problem, *, tables: bool = False) -> tuple[SpaceKey, ...]:
    """Every key of the strategy file, in the file's order; `tables` says that embedding placement is searched."""
    left_out = _left_out(problem, tables=tables)
    besides = _besides(problem)
    found = []
    for key in every_key():
        if key in problem.constraints and key not in _STATED and not key.startswith("execution."):
            found.append(SpaceKey(key=key, how="fixed"))
        elif key == "outer.algorithm" and any(k.startswith("outer.") for k in problem.constraints):
            found.append(
                SpaceKey(
                    key=key, how="searched", besides="inner plans but the fastest of each number of islands"
                )
            )
        elif key in _STATED or key.startswith(("execution.", "embedding_access.", "servers.", "outer.")):
            found.append(SpaceKey(key=key, how="stated"))
        elif key in left_out:
            found.append(SpaceKey(key=key, how=f"left-out: {left_out[key]}"))
        else:
            found.append(SpaceKey(key=key, how="searched", besides=besides.get(key, "")))
    return tuple(found)


def every_key() -> tuple[str, ...]:
    """The keys of a strategy, dotted; what a file says of its own origin is none."""
    tables = [f"{section}.{key}" for section, model in SECTIONS.items() for key in keys_of(model)]
    return (*tables, *ENTRIES)


def _left_out(problem: Problem, *, tables: bool) -> Mapping[str, str]:
    cluster = problem.cluster
    unlike = len({group.device.name for group in cluster.groups}) > 1
    found = {}
    if not unlike:
        found["mesh.groups"] = "all devices are alike"
    if cluster.network is None:
        found["mesh.placement"] = "nodes are joined alike: their order changes nothing"
        found["mesh.per_node"] = "nodes are joined alike: all of their devices are taken"
    if not problem.allow_lossy and any_lossless_alone(problem):
        found["grad_sync.compression"] = "compression loses digits: allow_lossy permits it"
    if not problem.allow_lossy and "grad_sync.weights" not in problem.constraints:
        found["grad_sync.weights"] = "compression loses digits: allow_lossy permits it"
    if not host_capacity_bytes(cluster):
        unknown = "the cluster does not state how much memory every host has (host.memory_bytes)"
        found |= dict.fromkeys(("offload.optimizer", "offload.activations"), unknown)
    if cluster.failures is None:
        found |= dict.fromkeys(_RECOVERY, "the cluster states no failures")
    if not tables:
        found["embedding"] = "tables are less than half of the model: they stay on the devices"
    return found


def any_lossless_alone(problem: Problem) -> bool:
    """Whether nothing is said of compression."""
    return "grad_sync.compression" not in problem.constraints


def _besides(problem: Problem) -> Mapping[str, str]:
    found = {
        "mesh.cp": f"shares of the sequence below {LEAST_TOKENS} tokens, and a divisor of the micro-batch that ZeRO could take over",
        "mesh.ep": "of more than six sizes every other",
        "mesh.order": "cp anywhere but right outside tp",
        "pipeline.schedule": "program",
        "pipeline.virtual_stages": f"more than {MAX_VIRTUAL_STAGES}",
        "offload.optimizer": "of other shares than 0, 0.5 and 1 only the least that fits, but for the plan itself",
        "offload.activations": "of other shares than 0 and 1 only the least that fits, but for the plan itself",
        "grad_sync.algorithm": "all but auto, unless for the plan itself, which may be hierarchical or have a parameter server",
        "grad_sync.bucket_mib": "sizes but the one with which a stage's last backward and its reduction are likely to end first, unless for the plan itself",
        "grad_sync.overlap": "reductions that wait for the end, unless for the plan itself",
        "grad_sync.compression": f"methods other than {', '.join(problem.lossy or METHODS)}, and several at once",
        "grad_sync.weights": f"methods other than {', '.join(open_weights(problem))}",
        "shard.secondary": "others than the ranks that share a unit of a level of the network",
        "recovery.policy": "plans of slower steps, but for replicas of whole nodes to drop (the three smallest numbers) and nodes that wait, where they could win 2 %",
        "recovery.checkpoint_every_s": "others than Daly's optimum in whole steps",
        "recovery.storage_every_s": "others than Daly's optimum for neighbours that are lost at once, in whole steps",
        "recovery.peers": "more copies than one",
        "recovery.spares": "more than eight, and numbers that would not pay were work in proportion to nodes",
        "recovery.timeout_s": "others than ten times the longest action, and ten seconds",
        "tensor": "plans that are neither the fastest nor the leanest at a price of memory",
    }
    if problem.cluster.network is not None:
        found["mesh.order"] = "tp anywhere but innermost"
    return found
