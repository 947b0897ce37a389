"""What blocks take where their tensor, context or expert parallelism is not between neighbours.

The table of layer groups has every setting with these axes as near as can be. A variant that places them further apart
takes longer, and often much longer; to price each of its settings there would cost more than the rest of the search. So
one setting of a placement is priced, nothing recomputed and nothing on the host, with the largest micro-batch; for all
others

    seconds(mode, micro) >= seconds(none, M) * micro / M     for every M that micro divides

as recomputation and copies only take time, and no kernel or collective is faster per sample when it has fewer of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from autoparallel.planner.expand.axes import axes_of, inner_axes, tensor_stride
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.prices import PriceBook
from autoparallel.planner.search.bounds.settings import placed_row
from autoparallel.planner.search.bounds.tables import BY_KIND, KIND_TIMES, SINGLE, PriceTable
from autoparallel.planner.search.partition.forms import Chain
from autoparallel.planner.search.space.meshes import Bools, Floats, Ints, alike
from autoparallel.planner.search.space.shapes import Shapes
from autoparallel.planner.strategy.types import Mesh

TIMES = tuple(name for name in SINGLE if name.endswith("_s") and name != "recompute_s")
Key = tuple[int, ...]  # tp, sequence parallelism, cp, ep, and the number of the placement


@dataclass(frozen=True, slots=True, kw_only=True)
class FarPrices:
    """Seconds of a sample, by placement and by the micro-batch that they were priced with."""

    problem: Problem
    chain: Chain
    book: PriceBook
    _known: dict[Key, dict[int, tuple[Floats, Floats]]] = field(
        default_factory=dict
    )  # [name of `TIMES`], and [kind, the first of `BY_KIND`]

    def price(self, mesh: Mesh, shapes: Shapes, row: int, placed: int) -> None:
        """Price a shape's setting where this mesh has it. Raises UserError where it cannot be."""
        found = placed_row(
            self.problem, self.chain, self.book, shapes, row, inner_axes(axes_of(mesh)),
            tensor_stride(mesh, self.problem.cluster),
        )  # fmt: skip
        micro = int(shapes.micro[row])
        each = np.array([found[SINGLE.index(name)] for name in TIMES]) / micro
        by_kind = np.array(found[len(SINGLE) :]).reshape(-1, len(BY_KIND))[:, :KIND_TIMES] / micro
        self._known.setdefault(self._key(shapes, row, placed), {})[micro] = each, by_kind

    def knows(self, shapes: Shapes, row: int, placed: int) -> bool:
        """Whether something is known of a shape's setting at a placement."""
        known = self._known.get(self._key(shapes, row, placed), {})
        return any(most % int(shapes.micro[row]) == 0 for most in known)

    def widest(self, shapes: Shapes, owners: Ints, row: int) -> int:
        """Of some shapes that one whose price tells of `row` and of most others: with the largest micro-batch."""
        same = shapes.micro[owners] % shapes.micro[row] == 0
        for name in ("tp", "sequence_parallel", "cp", "ep"):
            column = getattr(shapes, name)
            same &= column[owners] == column[row]
        wider = owners[same]
        return int(wider[np.argmax(shapes.micro[wider])]) if len(wider) else row

    def told_by(self, shapes: Shapes, owners: Ints, placed: Ints, row: int, at: int) -> Bools:
        """Which rows of `owners` a price of `row` at a placement tells of."""
        same = placed == at
        for name in ("tp", "sequence_parallel", "cp", "ep"):
            column = getattr(shapes, name)
            same &= column[owners] == column[row]
        return np.asarray(same & (shapes.micro[row] % shapes.micro[owners] == 0))

    def apply(self, table: PriceTable, shapes: Shapes, placed: Ints) -> PriceTable:
        """The layer groups, whose rows are those of `shapes`, with what is known of their placements."""
        rows = np.flatnonzero(placed > 0) if self._known else placed[:0]
        if not len(rows):
            return table
        keys = (shapes.tp, shapes.sequence_parallel, shapes.cp, shapes.ep, placed)
        first, which = alike(*(column[rows] for column in keys))
        known = [
            (number, self._known[key])
            for number, row in enumerate(rows[first].tolist())
            if (key := self._key(shapes, row, int(placed[row]))) in self._known
        ]
        if not known:
            return table
        columns = {name: getattr(table, name).copy() for name in (*TIMES, "by_kind")}
        for number, prices in known:
            own = rows[which == number]
            for most, (each, by_kind) in prices.items():
                fits = own[most % shapes.micro[own] == 0]
                least = by_kind * shapes.micro[fits][:, None, None]
                before = columns["by_kind"][fits, :, :KIND_TIMES]
                columns["by_kind"][fits, :, :KIND_TIMES] = np.maximum(before, least)
                for name, seconds in zip(TIMES, each.tolist(), strict=True):
                    columns[name][fits] = np.maximum(columns[name][fits], seconds * shapes.micro[fits])
        return replace(table, **columns)

    def _key(self, shapes: Shapes, row: int, placed: int) -> Key:
        return (
            int(shapes.tp[row]), int(shapes.sequence_parallel[row]), int(shapes.cp[row]), int(shapes.ep[row]), placed,
        )  # fmt: skip
