"""What failures cost: the goodput of each way to recover, the interval between checkpoints, the time-outs.

Failures of the run come as a Poisson process of mean time `mtbf_s` (that of a device over the number of devices). Goodput is
useful work over what the devices, spares among them, would do without failures, checkpoints or waiting.

- *Checkpoints.* With interval t between saves of which each stops training for d, and a failure after which it takes R until
  training goes on from the last save, a second of work takes M exp(R/M) (exp((t + d)/M) - 1) / t seconds (M: `mtbf_s`). The
  best t is sqrt(2 d M) (1 + x/3 + x^2/9) - d with x = sqrt(d / 2M), or M where d >= 2M. Kind: formula. Source: J. T. Daly, A
  higher order estimate of the optimum checkpoint interval, FGCS 22 (2006), equations 20 and 37; J. W. Young, CACM 17 (1974),
  for its first term. A save that is written beside training counts as lost work of its length, as it is not there before.
- *Copies in memory.* A node's state is lost with it and the neighbour that has its copy. Of failures the share min(2, n - 1) / n
  (1 - exp(-R/M)) finds one of its neighbours away, n nodes and R seconds until copies are whole again; then the run goes back to
  storage, where checkpoints are as often as is best for failures that seldom.
- *A node less.* Where the global batch does not divide among the ranks that are left, more devices idle than have failed:
  the step on a node less is the caller's to say (`fewer_step_s`); further nodes cost their share.
- *Devices that are away.* A node is back after `replace_s`, so that `replace_s / mtbf_s` nodes are away on average, and their
  number is Poisson distributed (M/G/infinity). What goes on without them loses their share; what does not waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

POLICIES = ("restart", "peers", "replan", "spares", "drop-replica")
MOST_SPARES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Outages:
    """How a run fails. Seconds: between failures of the whole run, until one is noticed, until processes are started and
    connected again, until a failed node is back, for planning anew, for dropping a replica or taking it back."""

    mtbf_s: float
    detect_s: float
    restart_s: float
    replace_s: float
    replan_s: float = 3.0
    drop_s: float = 1.1  # Kind: measured, torchft 0.2 on Gloo, one replica of two killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The run that fails: its step, nodes and replicas; seconds that a save stops it (the copy to the host), that writing
    or reading the whole state takes at the storage, and that a node's share takes to a neighbour's memory and back."""

    step_s: float
    nodes: int
    replicas: int
    stall_s: float
    storage_s: float
    neighbour_s: float
    replica_step_s: float | None = None  # the step where replicas can be dropped; None: as `step_s`
    every_s: float = 0.0  # between checkpoints, where that is given; 0: what is best
    fewer_step_s: float | None = (
        None  # the step on a node less; None: longer by the node's share, inf: none can be made
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One way to recover: its goodput (0 to 1), and the interval between checkpoints that it is best with; where these are copies in
    memory, that between checkpoints in storage, too."""

    policy: str
    goodput: float
    checkpoint_every_s: float
    spares: int = 0
    storage_every_s: float = 0.0


def best_interval_s(save_s: float, mtbf_s: float) -> float:
    """Seconds of work between saves that stop training for `save_s` each: Daly's higher-order optimum."""
    if save_s <= 0:
        return 0.0
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    x = math.sqrt(save_s / (2 * mtbf_s))
    return math.sqrt(2 * save_s * mtbf_s) * (1 + x / 3 + x * x / 9) - save_s


def with_checkpoints(every_s: float, save_s: float, until_back_s: float, mtbf_s: float) -> float:
    """Goodput of a run that saves after every `every_s` of work and is back `until_back_s` after a failure."""
    if (every_s + save_s + until_back_s) / mtbf_s > 500:
        return 0.0  # it comes to no save between failures
    longer = mtbf_s * math.exp(until_back_s / mtbf_s) * math.expm1((every_s + save_s) / mtbf_s)
    return every_s / longer


def recoveries(outages: Outages, run: Saved) -> tuple[Recovery, ...]:
    """Every way that this run can recover in, the best first."""
    ways: list[Callable[[Outages, Saved], Recovery]] = [_restart]
    if run.nodes > 1:
        ways += [_peers, _replan, _spares]
    if run.replicas > 1:
        ways.append(_drop_replica)
    return tuple(sorted((way(outages, run) for way in ways), key=lambda found: -found.goodput))


def _interval_s(run: Saved, save_s: float, least_s: float, mtbf_s: float) -> float:
    """Whole steps; a save is not begun before the last one is written."""
    wanted = max(run.every_s or best_interval_s(save_s, mtbf_s), least_s, run.step_s)
    return math.ceil(wanted / run.step_s - 1e-9) * run.step_s


def _from_storage(outages: Outages, run: Saved, waits_s: float) -> tuple[float, float]:
    """Goodput and interval where state comes from storage, and `waits_s` pass before it is asked for."""
    every_s = _interval_s(run, run.stall_s, run.storage_s, outages.mtbf_s)
    # What is being written when a failure comes is lost with what was done since.
    until_back_s = waits_s + outages.detect_s + outages.restart_s + 2 * run.storage_s
    return with_checkpoints(every_s, run.stall_s, until_back_s, outages.mtbf_s), every_s


def _restart(outages: Outages, run: Saved) -> Recovery:
    """Wait until the node is back, start again, read the last checkpoint."""
    goodput, every_s = _from_storage(outages, run, outages.replace_s)
    return Recovery(policy="restart", goodput=goodput, checkpoint_every_s=every_s)


def _peers(outages: Outages, run: Saved) -> Recovery:
    """As `restart`, from copies that neighbouring nodes hold in memory, taken as often as pays; from storage where a neighbour
    is lost before the copies are whole again."""
    save_s = run.stall_s + run.neighbour_s
    every_s = _interval_s(run, save_s, 0.0, outages.mtbf_s)
    until_back_s = outages.replace_s + outages.detect_s + outages.restart_s + run.neighbour_s
    goodput = with_checkpoints(every_s, save_s, until_back_s, outages.mtbf_s)
    both = min(2, run.nodes - 1) / run.nodes * -math.expm1(-until_back_s / outages.mtbf_s)  # of failures
    both_s = outages.mtbf_s / both if both else math.inf
    stored_s = _interval_s(run, run.stall_s, run.storage_s, both_s) if both else run.storage_s
    lost_s = (stored_s / 2 + 2 * run.storage_s) / both_s
    goodput *= stored_s / (stored_s + run.stall_s) / (1 + lost_s)
    return Recovery(policy="peers", goodput=goodput, checkpoint_every_s=every_s, storage_every_s=stored_s)


def _replan(outages: Outages, run: Saved) -> Recovery:
    """Go on with the nodes that are left, and again with all once the node is back: saved before, so nothing is lost. A node that is
    back before the others run again begins with them."""
    if outages.replace_s <= outages.replan_s + outages.restart_s:
        return replace(_restart(outages, run), policy="replan")
    goodput, every_s = _from_storage(outages, run, outages.replan_s)
    away = min(outages.replace_s / outages.mtbf_s, run.nodes)
    comes_back_s = outages.restart_s + outages.replan_s + 2 * run.storage_s
    first = 1 / run.nodes if run.fewer_step_s is None else max(1 - run.step_s / run.fewer_step_s, 0.0)
    any_away = -math.expm1(-away)  # how often at least one is: what the first costs, then its share each
    lost = any_away * first + (away - any_away) / run.nodes
    goodput *= max(1 - lost, 0.0) / (1 + comes_back_s / outages.mtbf_s)
    return Recovery(policy="replan", goodput=goodput, checkpoint_every_s=every_s)


def _spares(outages: Outages, run: Saved) -> Recovery:
    """Nodes that wait, as many as pay: where more are away than wait, the run waits, too."""
    found = (spared(outages, run, spares) for spares in range(1, MOST_SPARES + 1))
    return max(found, key=lambda one: one.goodput)


def spared(outages: Outages, run: Saved, spares: int) -> Recovery:
    """With so many nodes that wait."""
    goodput, every_s = _from_storage(outages, run, 0.0)
    away = outages.replace_s / outages.mtbf_s
    enough = sum(math.exp(-away) * away**k / math.factorial(k) for k in range(spares + 1))
    share = goodput * enough * run.nodes / (run.nodes + spares)
    return Recovery(policy="spares", goodput=share, checkpoint_every_s=every_s, spares=spares)


def _drop_replica(outages: Outages, run: Saved) -> Recovery:
    """Go on with the replicas that are left; the one that comes back takes its state from another. Checkpoints are kept for
    the case that all are lost."""
    step_s = run.replica_step_s or run.step_s
    lost_s = outages.detect_s + 2 * outages.drop_s + step_s + run.neighbour_s
    away = min((outages.replace_s + outages.restart_s) / outages.mtbf_s, run.replicas)
    every_s = _interval_s(run, run.stall_s, run.storage_s, outages.mtbf_s)
    goodput = run.step_s / step_s * (1 - away / run.replicas) / (1 + lost_s / outages.mtbf_s)
    goodput *= every_s / (every_s + run.stall_s)
    return Recovery(policy="drop-replica", goodput=max(goodput, 0.0), checkpoint_every_s=every_s)


def timeout_s(longest_action_s: float) -> float:
    """How long a rank may be without a sign of progress: ten times the program's longest action, and ten seconds.

    Kind: choice; a link or a rank at a tenth of its speed is slow, not gone.
    """
    return 10.0 + 10.0 * longest_action_s
