"""The backward pass of glue under FSDP2: its modules are units of their own, gathered and reduced one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from autoparallel.planner.expand.backward_memory import Moment


class Coming(StrEnum):
    """When a unit's whole parameters are there: while its module runs (ZeRO-3), from the beginning until it is through (the only
    micro-batch of ZeRO-1 and 2), or all along."""

    GATHERED = "gathered"
    PASSING = "passing"
    STAYING = "staying"


@dataclass(frozen=True, slots=True, kw_only=True)
class GlueUnit:
    """A module and its parameters (names as in the block). Bytes: of its parameters and of their `gradients`, whole, of what its
    reduction takes in and of what it makes, and of the last of its gradients, which stands until the reduction has begun; and what
    else its parameters take while they are gathered."""

    module: str
    names: frozenset[str]
    whole: int
    gradients: int
    reduced: int
    share: int
    last: int
    gathering: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Glue:
    """The units of glue, and the root unit, what is left of it, whose parameters are counted elsewhere; `ending`, what is reduced when all
    is over. Gradients of the tensors `twice` are added to those that another block has made. `makes`: shares of gradients are not
    counted before they are made."""

    units: tuple[GlueUnit, ...]
    root: GlueUnit
    ending: GlueUnit | None
    coming: Coming
    makes: bool
    twice: frozenset[str] = frozenset()


@dataclass(slots=True, kw_only=True)
class _Standing:
    """Bytes that stand at a moment of a pass, beside what its kernels hand on."""

    parameters: dict[str, int]  # by module
    gradients: dict[str, int] = field(default_factory=dict)  # by name
    reduction: int = 0  # the last one, which goes when another is under way
    shares: int = 0

    def total(self) -> int:
        return sum(self.parameters.values()) + sum(self.gradients.values()) + self.reduction + self.shares

    def reduce(self, unit: GlueUnit, before: int, *, makes: bool) -> int:
        """The most that stands while a unit's gradients are copied and reduced."""
        own = sum(self.gradients.pop(name, 0) for name in unit.names)
        self.parameters.pop(unit.module, None)
        self.reduction = -before
        peak = self.total() + unit.reduced + max(own, min(own, unit.last) + unit.share)
        self.reduction += unit.reduced
        self.shares += unit.share if makes else 0
        return peak


def glue_peak(glue: Glue, moments: Sequence[Moment], *, before: int) -> int:
    """Largest moment of the backward above what the glue saved and what stands beside it in its stage: `before` bytes of the last
    reduction, which are counted all along.

    When a module is through, its parameters go, and what was reduced last; its gradients are copied into what is reduced; that
    makes a share, beside which the last gradient still stands. FSDP2 hears of that by the gradients of what the module was given;
    where these have none (look-ups of tokens) all is over first, and the root unit is reduced before them.
    """
    passing = glue.coming is Coming.PASSING
    standing = _Standing(parameters={u.module: u.whole for u in glue.units} if passing else {})
    counted = sum(standing.parameters.values())  # in the state of the stage
    unit_of = [next((u for u in glue.units if _runs_in(m, u)), None) for m in moments]
    lasts = {unit.module: n for n, unit in enumerate(unit_of) if unit is not None}
    peak, after, waiting = 0, 0, dict[str, GlueUnit]()
    for n, (moment, unit) in enumerate(zip(moments, unit_of, strict=True)):
        if unit is not None and glue.coming is Coming.GATHERED and unit.module not in standing.parameters:
            standing.parameters[unit.module] = unit.whole
            peak = max(peak, after + standing.total() + unit.gathering)
        standing.gradients |= {name.removeprefix("param:"): size for name, size in moment.made.items()}
        peak, after = max(peak, moment.running + standing.total() - counted), moment.after
        if unit is not None and lasts[unit.module] == n:
            if moment.flows:
                peak = max(peak, after - counted + standing.reduce(unit, before, makes=glue.makes))
            else:
                waiting[unit.module] = unit
    for name in glue.twice:  # added to the first ones
        standing.gradients.pop(name, None)
    if glue.ending is not None:
        standing.reduction = -before
        peak = max(peak, after - counted + standing.total() + ending_reduction(glue.ending, glue.coming))
        for name in glue.ending.names:
            standing.gradients.pop(name, None)
        standing.shares += glue.ending.share if glue.makes else 0
    for unit in waiting.values():
        peak = max(peak, after - counted + standing.reduce(unit, before, makes=glue.makes))
    standing.reduction = -before
    return max(peak, after + standing.total() - counted)


def ending_reduction(unit: GlueUnit, coming: Coming) -> int:
    """As for other units, less its gradients, which stand, and its parameters, which are counted all along."""
    gone = 0 if coming is Coming.STAYING else unit.whole
    return max(unit.reduced, unit.reduced + unit.share - unit.whole + unit.last) - gone


def _runs_in(moment: Moment, unit: GlueUnit) -> bool:
    return f"{moment.module}.".startswith(f"{unit.module}.")
