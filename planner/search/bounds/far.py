"""What blocks take where their tensor, context or expert parallelism is not between neighbours.

The table of units has every setting with these axes as near as can be. A variant that places them further apart takes longer,
and often much longer; to price each of its settings there would cost more than the rest of the search. So one setting of a
placement is priced, nothing recomputed and nothing on the host, with the largest micro-batch; for all others

    seconds(mode, micro) >= seconds(none, M) * micro / M     for every M that micro divides

as recomputation and copies only take time, and no kernel or collective is faster per sample when it has fewer of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np

from autoparallel.planner.expand.axes import axes_of, inner_axes, tensor_stride
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.prices import PriceBook
from autoparallel.planner.search.bounds.tables import Units, placed_row
from autoparallel.planner.search.partition.forms import Chain
from autoparallel.planner.search.space.build import Shapes
from autoparallel.planner.search.space.meshes import Bools, Floats, Ints
from autoparallel.planner.strategy.types import Mesh

TIMES = tuple(f.name for f in fields(Units) if f.name.endswith("_s") and f.name != "recompute_s")
Key = tuple[int, ...]  # tp, sequence parallelism, cp, ep, and the number of the placement


@dataclass(frozen=True, slots=True, kw_only=True)
class FarPrices:
    """Seconds of a sample, by placement and by the micro-batch that they were priced with."""

    problem: Problem
    chain: Chain
    book: PriceBook
    _known: dict[Key, dict[int, Floats]] = field(default_factory=dict)  # [name of `TIMES`]

    def price(self, mesh: Mesh, shapes: Shapes, row: int, placed: int) -> None:
        """Price a shape's setting where this mesh has it. Raises UserError where it cannot be."""
        found = placed_row(
            self.problem, self.chain, self.book, shapes, row, inner_axes(axes_of(mesh)),
            tensor_stride(mesh, self.problem.cluster),
        )  # fmt: skip
        names = [f.name for f in fields(Units)]
        micro = int(shapes.micro[row])
        each = np.array([found[names.index(name)] for name in TIMES]) / micro
        self._known.setdefault(self._key(shapes, row, placed), {})[micro] = each

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

    def told(self, shapes: Shapes, owners: Ints, placed: Ints) -> Bools:
        """Which variants, of these shapes and placements, something is known of."""
        table = np.stack([owners, placed], axis=1)
        distinct, which = np.unique(table, axis=0, return_inverse=True)
        known = np.array([self.knows(shapes, owner, at) for owner, at in distinct.tolist()], dtype=np.bool_)
        return np.asarray(known[which.reshape(-1)])

    def alike(self, shapes: Shapes, owners: Ints, placed: Ints, row: int, at: int) -> Bools:
        """Which rows of `owners` a price of `row` at a placement tells of."""
        same = placed == at
        for name in ("tp", "sequence_parallel", "cp", "ep"):
            column = getattr(shapes, name)
            same &= column[owners] == column[row]
        return np.asarray(same & (shapes.micro[row] % shapes.micro[owners] == 0))

    def apply(self, units: Units, shapes: Shapes, placed: Ints) -> Units:
        """The units, whose rows are those of `shapes`, with what is known of their placements."""
        rows = np.flatnonzero(placed > 0) if self._known else placed[:0]
        if not len(rows):
            return units
        table = np.stack([shapes.tp, shapes.sequence_parallel, shapes.cp, shapes.ep, placed], axis=1)[rows]
        distinct, which = np.unique(table, axis=0, return_inverse=True)
        columns = {name: getattr(units, name).copy() for name in TIMES}
        for number, key in enumerate(distinct.tolist()):
            own = rows[which.reshape(-1) == number]
            for most, each in self._known.get(tuple(key), {}).items():
                fits = own[most % shapes.micro[own] == 0]
                for name, seconds in zip(TIMES, each.tolist(), strict=True):
                    columns[name][fits] = np.maximum(columns[name][fits], seconds * shapes.micro[fits])
        return replace(units, **columns)

    def _key(self, shapes: Shapes, row: int, placed: int) -> Key:
        return (
            int(shapes.tp[row]), int(shapes.sequence_parallel[row]), int(shapes.cp[row]), int(shapes.ep[row]), placed,
        )  # fmt: skip
