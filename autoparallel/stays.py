"""What of a strategy stays when the processes are others than it was made for: all that says what is computed, not where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoparallel.planner.strategy.lengths import phases_of
from autoparallel.planner.strategy.types import Phase
from autoparallel.profiles import Cluster

# Keys, and tables of keys, that hold on any number of devices.
_OF_BATCHES = ("batch.global", "batch.seq_len")
_ALWAYS = (*_OF_BATCHES, "grad_sync.weights", "recovery.checkpoint_every_s", "recovery.timeout_s")
_ALWAYS_TABLES = ("execution", "embedding", "servers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stays:
    """The constraints that stay, and what was asked for and does not, in words."""

    constraints: Mapping[str, object]
    left_out: tuple[str, ...] = ()


def stays_of(constraints: Mapping[str, object], cluster: Cluster | None, devices: int) -> Stays:
    """What a strategy says for any number of processes, as far as it fits on so many devices, of `cluster` (None: not known): the global batch,
    `execution`, what gradients and parameters travel as, replicas that train by themselves, where rows of tables are, how the run
    recovers, and what phases say of `[grad_sync]`, the global batch and the length of sequences. The mesh, and what follows from it, is
    planned anew."""
    kept = {k: v for k, v in constraints.items() if k in _ALWAYS or k.split(".")[0] in _ALWAYS_TABLES}
    left_out = []
    for found in (
        _compression(constraints, cluster),
        _outer(constraints, devices),
        _recovery(constraints, cluster),
    ):
        if isinstance(found, str):
            left_out.append(found)
        else:
            kept |= found
    phases, words = _phases(constraints, cluster)
    kept |= {"phase": phases} if phases else {}
    left_out += [words] if words else []
    return Stays(constraints=kept, left_out=tuple(left_out))


def _compression(constraints: Mapping[str, object], cluster: Cluster | None) -> dict[str, object] | str:
    key = "grad_sync.compression"
    methods = _methods(constraints.get(key, ()), cluster)
    if methods is None:
        return f"{key} (the network has other levels here)"
    return {key: methods} if any(method != "none" for method in methods) else {}


def _methods(given: Any, cluster: Cluster | None) -> tuple[str, ...] | None:
    """A method for each level of the cluster's network; None where it is not known which."""
    if not given or cluster is None or len(given) == len(cluster.levels):
        return tuple(given)
    return tuple(given[:1]) * len(cluster.levels) if len(set(given)) == 1 else None


def _outer(constraints: Mapping[str, object], devices: int) -> dict[str, object] | str:
    if constraints.get("outer.algorithm", "none") == "none":
        return {}
    if devices == 1:
        return "[outer] (there is one device)"
    return {k: v for k, v in constraints.items() if k.startswith("outer.")}


def _recovery(constraints: Mapping[str, object], cluster: Cluster | None) -> dict[str, object] | str:
    policy = constraints.get("recovery.policy", "restart")
    if policy == "restart":
        return {}
    several = cluster is None or cluster.nodes > 1
    if policy in ("spares", "drop-replica") or (policy == "peers" and not several):
        return f'recovery.policy = "{policy}"'
    return {k: v for k, v in constraints.items() if k.startswith("recovery.")}


def _phases(constraints: Mapping[str, object], cluster: Cluster | None) -> tuple[tuple[Phase, ...], str]:
    """The phases with the keys that stay, and what does not in words. Batches that change are cut into single sequences, which fit any
    mesh."""
    kept, left_out = [], False
    for phase in phases_of(constraints):
        keys = tuple(pair for pair in phase.keys if _stays_in_phase(*pair, cluster))
        left_out |= keys != phase.keys
        if any(key in _OF_BATCHES for key, _ in keys):
            keys += (("batch.micro", 1),)
        if dict(keys).get("grad_sync.weights", "none") != "none":  # which ZeRO-3 alone gathers
            keys += (("shard.zero", 3),)
        if keys:
            kept.append(Phase(from_step=phase.from_step, keys=keys))
    return tuple(kept), "[[phase]] (made for the other mesh)" if left_out else ""


def _stays_in_phase(key: str, value: object, cluster: Cluster | None) -> bool:
    if key == "grad_sync.compression":
        return _methods(value, cluster) == value
    return key in _OF_BATCHES or key.startswith("grad_sync.")
