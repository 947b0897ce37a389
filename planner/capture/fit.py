"""Sizes as functions of the micro-batch, recovered from traces at three: a line through two is checked at the third; what is no
line but a whole parabola, as the costs of what every sample does with every other one, is that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autoparallel.costmodel.graph import Size, TensorSpec
from autoparallel.planner.capture.nodes import Meta


@dataclass(slots=True)
class Fit:
    """Fits sizes over `batches`; `misses` counts those that are neither (they follow the last two points)."""

    batches: tuple[int, ...]
    misses: int = 0

    def size(self, values: Sequence[int]) -> Size:
        """const + per_sample · b through `values`, one for each micro-batch."""
        slope, rest = divmod(values[-1] - values[-2], self.batches[-1] - self.batches[-2])
        const = values[-1] - slope * self.batches[-1]
        if rest or any(const + slope * b != v for b, v in zip(self.batches, values, strict=True)):
            self.misses += 1
        return Size(const, slope)

    def cost(self, values: Sequence[int]) -> Size:
        """FLOPs or bytes: as `size`, or const + per_sample · b + per_pair · b² where that is through `values`."""
        found = _parabola(self.batches, values)
        return found if found and found.per_pair > 0 else self.size(values)

    def rounds(self, calls: Sequence[fx.Node]) -> Size:
        """How often a call runs, from its likes at each micro-batch."""
        return self.size([call.meta.get("rounds", 1) for call in calls])

    def spec(self, metas: Sequence[Meta]) -> TensorSpec:
        """The spec of a tensor from its shapes at each micro-batch."""
        shape = tuple(self.size(sizes) for sizes in zip(*(m.shape for m in metas), strict=True))
        return TensorSpec(shape=shape, dtype=metas[0].dtype)


def _parabola(batches: Sequence[int], values: Sequence[int]) -> Size | None:
    """The function of second degree through three points, where it has whole numbers (Newton's divided differences)."""
    if len(batches) != 3:
        return None
    (a, b, c), (at_a, at_b, at_c) = batches, values
    first, rest = divmod(at_b - at_a, b - a)
    second, rest_2 = divmod(at_c - at_b, c - b)
    per_pair, rest_3 = divmod(second - first, c - a)
    if rest or rest_2 or rest_3:
        return None
    per_sample = first - per_pair * (a + b)
    return Size(at_a - per_sample * a - per_pair * a * a, per_sample, per_pair)
