"""Sizes as affine functions of the micro-batch, recovered from traces at two micro-batches and checked at a third."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autoparallel.costmodel.graph import Size, TensorSpec
from autoparallel.planner.capture.nodes import Meta


@dataclass(slots=True)
class Fit:
    """Fits sizes over `batches`; `misses` counts those that are not affine (they follow the last two points)."""

    batches: tuple[int, ...]
    misses: int = 0

    def size(self, values: Sequence[int]) -> Size:
        """const + per_sample · b through `values`, one for each micro-batch."""
        slope, rest = divmod(values[-1] - values[-2], self.batches[-1] - self.batches[-2])
        const = values[-1] - slope * self.batches[-1]
        if rest or any(const + slope * b != v for b, v in zip(self.batches, values, strict=True)):
            self.misses += 1
        return Size(const, slope)

    def rounds(self, calls: Sequence[fx.Node]) -> Size:
        """How often a call runs, from its likes at each micro-batch."""
        return self.size([call.meta.get("rounds", 1) for call in calls])

    def spec(self, metas: Sequence[Meta]) -> TensorSpec:
        """The spec of a tensor from its shapes at each micro-batch."""
        shape = tuple(self.size(sizes) for sizes in zip(*(m.shape for m in metas), strict=True))
        return TensorSpec(shape=shape, dtype=metas[0].dtype)
