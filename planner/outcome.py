"""What a search hands back: a plan with its proof and its rejected rivals, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from autoparallel.costmodel.prediction import Prediction
from autoparallel.planner.problem import Value
from autoparallel.planner.search.space.certificate import SpaceKey
from autoparallel.planner.strategy.types import Strategy

GIB = 1024**3
ADVISING = "advise"  # the phase of a search for changes that would fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a search stands. The bound and the incumbent are in the objective's unit."""

    phase: str  # "solve", then ADVISING where nothing fits
    candidates: int
    pruned: int
    solved: int
    incumbent: float | None
    bound: float | None
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The best strategy of a kind that was not chosen, and why."""

    kind: str  # "data parallel only", "more tensor parallelism", …
    strategy: Strategy
    step_time_s: float
    peak_memory_gib: float
    feasible: bool
    reason: str
    proved: bool = False  # no strategy of its kind is better; else the best that was found
    value: Value = (0.0, 0.0)

    @property
    def rank(self) -> tuple[bool, Value, str]:
        """The best first, those that do not fit last."""
        return (not self.feasible, self.value, self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintCost:
    """What a constraint of the user costs: the best plan without it, after a bounded search.

    `cost` is the share by which the plan with it is worse in the objective than the best found without it, 0 where
    none better was found; it is no more than `at_most`, and the same where it is `proved`.
    """

    key: str  # "mesh.tp", or "all of them"
    value: object
    instead: object  # what the plan without it has
    cost: float
    at_most: float
    proved: bool
    step_time_s: float
    strategy: Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOff:
    """A strategy that no other found beats in all of time, memory and price."""

    strategy: Strategy
    step_time_s: float
    peak_memory_gib: float
    devices: int
    device_cost: float  # price of a step; device-seconds where not every device has a price


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Below `bytes_per_s` of a network level, one device's share, the plan's step is shorter with the method: 0 where it
    never is, infinite where it always is, as far as was looked. `now_bytes_per_s` is what the level has; `key` is what has the
    method: "grad_sync.compression" or, of ZeRO-3's parameters, "grad_sync.weights"."""

    method: str
    level: str
    bytes_per_s: float
    now_bytes_per_s: float
    key: str = "grad_sync.compression"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """One strategy that was simulated on the way, for the time-memory scatter."""

    step_time_s: float
    peak_memory_gib: float
    feasible: bool
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """A complete strategy, what the cost model says of it, and how far it is proved best.

    `status` is "optimal" when no strategy of the space is better under the cost model, else "feasible".
    No strategy that is as good in the objective takes fewer than `lower_bound_s` seconds per step on as many
    devices; `gap` is 1 - bound / value of the objective, 0 when optimal. `candidates` counts the strategies of
    the space up to the partition of blocks to stages, `pruned` those that a bound alone ruled out.
    """

    strategy: Strategy
    prediction: Prediction
    status: str
    lower_bound_s: float
    gap: float
    candidates: int
    pruned: int
    seconds: float
    alternatives: tuple[Alternative, ...] = ()
    explored: tuple[Explored, ...] = ()
    constraints: tuple[ConstraintCost, ...] = ()  # where an explanation was asked for
    tradeoffs: tuple[TradeOff, ...] = ()  # likewise: the frontier of time, memory and price
    break_evens: tuple[BreakEven, ...] = ()  # likewise: where compressing gradients would pay
    optimum: Strategy | None = None  # what the proof is about, where something simpler was chosen
    optimum_s: float = 0.0  # its seconds per step; the plan's own where it is the optimum
    instead: str = ""  # why the plan was chosen instead, in words
    space: tuple[SpaceKey, ...] = ()  # what the search covered, key by key
    broken: tuple[
        str, ...
    ] = ()  # simulations below their bounds: bugs of ours, with which nothing is called proved


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """A change that would make an infeasible problem feasible, and what it gives."""

    change: str  # "mesh.pp = 2 instead of 1", "4 devices instead of 2"
    step_time_s: float
    peak_memory_gib: float


class InfeasiblePlan(ValueError):
    """No strategy fits: which constraint binds, by how much, and the nearest changes that would fit."""

    def __init__(
        self, constraint: str, *, excess_gib: float = 0.0, relaxations: tuple[Relaxation, ...] = ()
    ) -> None:
        self.constraint = constraint
        self.excess_gib = excess_gib
        self.relaxations = relaxations
        lines = [f"no strategy fits: {constraint}"]
        if relaxations:
            lines.append("the nearest changes that would fit:")
            lines += [
                f"  - {r.change}: {r.peak_memory_gib:.4g} GiB per device, {r.step_time_s:.4g} s per step"
                for r in relaxations
            ]
        super().__init__("\n".join(lines))


class SearchTimeout(TimeoutError):
    """The time limit (or an interrupt) ended the search before any strategy was found. Nothing is below `bound`, in the unit of the
    objective."""

    def __init__(self, message: str, *, bound: float = 0.0) -> None:
        super().__init__(message)
        self.bound = bound
