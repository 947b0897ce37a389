"""How a plan recovers from failures, where the cluster says how often it fails: every way priced, and the rule of the best."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from autoparallel.costmodel.kernels import host_copy_bytes_per_s
from autoparallel.costmodel.prediction import Prediction
from autoparallel.costmodel.price import price_program
from autoparallel.costmodel.recovery import Outages, Recovery, Saved, recoveries, spared, timeout_s
from autoparallel.costmodel.timetable import action_seconds, message_seconds
from autoparallel.errors import UserError
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.expand.state import dtype_bytes, optimizer_bytes_per_parameter
from autoparallel.planner.score import at_home, score
from autoparallel.planner.strategy.lengths import graph_at
from autoparallel.planner.strategy.phases import starts, strategy_at
from autoparallel.planner.strategy.recovery import nodes_of, per_node
from autoparallel.planner.strategy.types import RecoveryRule, Strategy

HOUR_S = 3600.0
# Meshes of fewer data-parallel ranks that are priced before it is said that none fits. Kind: choice.
_FEWER_TRIED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """Every way to recover, the best first, and what they were priced with."""

    ways: tuple[Recovery, ...]
    outages: Outages
    saved: Saved
    state_bytes: int
    longest_s: float  # the program's longest action or message

    @property
    def best(self) -> Recovery:
        return self.ways[0]

    def way(self, policy: str) -> Recovery | None:
        """The best with a policy."""
        return next((way for way in self.ways if way.policy == policy), None)

    def with_spares(self, spares: int) -> Recovery:
        """The way by nodes that wait, with so many."""
        return spared(self.outages, self.saved, spares)

    def as_said(self, said: RecoveryRule) -> Recovery:
        """The way that a rule names, with its interval; the best where the strategy cannot recover so."""
        run = replace(self.saved, every_s=said.checkpoint_every_s)
        if said.policy == "spares" and said.spares:
            return spared(self.outages, run, said.spares)
        return next((way for way in recoveries(self.outages, run) if way.policy == said.policy), self.best)

    def rule(self, way: Recovery) -> RecoveryRule:
        """What the strategy file says of a way."""
        return RecoveryRule(
            policy=way.policy, checkpoint_every_s=way.checkpoint_every_s, peers=int(way.policy == "peers"),
            storage_every_s=way.storage_every_s, spares=way.spares, timeout_s=timeout_s(self.longest_s),
        )  # fmt: skip


def plan_recovery(
    expander: Expander,
    strategy: Strategy,
    prediction: Prediction,
    *,
    replicas: int | None = None,
    every_s: float = 0.0,
) -> RecoveryPlan | None:
    """Price the ways to recover of a plan for the expander's cluster; None where the cluster states no failures.

    `replicas` instead of those that it has: what another plan could have at best. A checkpoint is kept after `every_s` (0:
    what is best).
    """
    cluster = expander.cluster
    failures = cluster.failures
    if failures is None:
        return None
    execution, devices = strategy.execution, strategy.mesh.devices
    each = dtype_bytes(execution.param_dtype) + optimizer_bytes_per_parameter(execution)
    state_bytes = expander.graph.parameter_count * each
    share_bytes = state_bytes / devices
    device = cluster.device
    link_bytes_per_s = cluster.levels[-1].bytes_per_s if cluster.levels else host_copy_bytes_per_s(device)
    outages = Outages(
        mtbf_s=failures.mtbf_hours_per_device * HOUR_S / devices,
        detect_s=failures.detect_s, restart_s=failures.restart_s, replace_s=failures.replace_s,
    )  # fmt: skip
    saved = Saved(
        step_s=prediction.step_time_s,
        nodes=nodes_of(cluster, devices),
        replicas=replicas or strategy.mesh.dp_replicate,
        stall_s=share_bytes / host_copy_bytes_per_s(device),
        storage_s=state_bytes / failures.storage_bytes_per_s,
        neighbour_s=share_bytes / link_bytes_per_s,
        fewer_step_s=fewer_step_s(expander, strategy),
        every_s=every_s,
    )
    return RecoveryPlan(
        ways=recoveries(outages, saved), outages=outages, saved=saved, state_bytes=state_bytes,
        longest_s=longest_action_s(expander, strategy),
    )  # fmt: skip


def patient(expander: Expander, strategy: Strategy) -> Strategy:
    """A strategy whose rule waits for the longest action of any of its phases, not of its first steps alone."""
    rule = strategy.recovery
    if not (rule.timeout_s and strategy.phases):
        return strategy
    waits_s = [rule.timeout_s]
    for step in starts(strategy):
        own = strategy_at(strategy, step)
        with suppress(UserError):  # what is illegal is told where the phases are priced
            there = Expander(graph_at(expander.graph, own.batch.seq_len), expander.cluster)
            waits_s.append(timeout_s(longest_action_s(there, own)))
    return replace(strategy, recovery=replace(rule, timeout_s=max(waits_s)))


def longest_action_s(expander: Expander, strategy: Strategy) -> float:
    """Seconds of the longest action or message of a step."""
    home, alone = at_home(expander, strategy)
    costs = price_program(home.program(alone), home.cluster, home.pricer)
    return max(*action_seconds(costs), *message_seconds(costs))


def fewer_step_s(expander: Expander, strategy: Strategy) -> float | None:
    """Seconds per step on one node less: the same strategy with fewer data-parallel ranks, as many as the global batch
    divides among, or the strategy itself where it leaves a node alone. A plan made for what is left may be faster. Infinite where none of these fits; None where nodes are unlike
    or joined irregularly, so that it depends on the node."""
    cluster, mesh = expander.cluster, strategy.mesh
    if len(cluster.groups) > 1 or cluster.network is not None or mesh.groups or mesh.placement:
        return None
    left = min(cluster.devices - per_node(cluster), mesh.devices)
    tried = 0
    for smaller in _smaller(strategy, left):
        try:
            found = score(expander.graph, cluster, smaller, expander)
        except UserError:
            continue
        if found.feasible:
            return found.step_time_s
        tried += 1
        if tried == _FEWER_TRIED:
            break
    return math.inf


def _smaller(strategy: Strategy, devices: int) -> Iterator[Strategy]:
    """The strategy with fewer data-parallel ranks on at most so many devices, the most ranks first."""
    mesh, batch = strategy.mesh, strategy.batch
    ranks = devices // (mesh.devices // mesh.data_parallel)
    for data_parallel in range(ranks, 0, -1):
        if batch.global_ % (batch.micro * data_parallel):
            continue
        for shard in (mesh.dp_shard, data_parallel):  # fewer replicas, else smaller ones: the state must fit
            if data_parallel % shard == 0 and shard <= data_parallel:
                resized = replace(mesh, dp_replicate=data_parallel // shard, dp_shard=shard)
                zero = replace(strategy.shard, zero=strategy.shard.zero if shard > 1 else 0, secondary=0)
                yield replace(strategy, mesh=resized, shard=zero, recovery=RecoveryRule())
                if mesh.dp_shard == data_parallel:
                    break
