"""Candidates that offload without need: where every deal fits with less on the host, more there only takes time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autoparallel.planner.search.bounds.outer import Outer
from autoparallel.planner.search.space.candidates import Candidate
from autoparallel.planner.search.stages.inner import price_candidate, stage_problem
from autoparallel.planner.search.stages.problem import without_idle_rows


@dataclass(frozen=True, slots=True)
class Twins:
    """Of a search's candidates those that differ in what they offload alone."""

    outer: Outer
    _roomy: dict[Candidate, bool] = field(default_factory=dict)

    def make_needless(self, chosen: Candidate) -> bool:
        """Whether a twin with less on the host is no slower, whatever the deal."""
        away = chosen.offload
        return any(
            less != away
            and less.optimizer <= away.optimizer
            and less.activations <= away.activations
            and self._always_fits(replace(chosen, offload=less))
            for less in self.outer.space.offloads
        )

    def _always_fits(self, chosen: Candidate) -> bool:
        """Whether no deal of a candidate has too many bytes."""
        if chosen not in self._roomy:
            outer = self.outer
            priced = price_candidate(outer.problem, outer.chain, outer.book, chosen)
            states = outer.book.expander.prepared(priced.strategy).states
            stages = stage_problem(
                outer.problem, outer.chain, outer.book, priced, states, outer.capacity_bytes
            )
            self._roomy[chosen] = not without_idle_rows(stages).memory
        return self._roomy[chosen]
