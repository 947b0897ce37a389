"""A lower bound for pipelines over unlike devices: all ranks together are no faster than the sum of their paces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoparallel.planner.expand.axes import nearest_axes
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.prices import PriceBook
from autoparallel.planner.search.bounds.settings import Key, SettingPrices, representative
from autoparallel.planner.search.bounds.tables import SINGLE, PriceTable
from autoparallel.planner.search.bounds.variants import Bounds
from autoparallel.planner.search.partition.forms import Chain
from autoparallel.planner.search.partition.unlike import rank_devices
from autoparallel.planner.search.space.meshes import Floats
from autoparallel.planner.search.space.shapes import Shapes


def pace_of_ranks(problem: Problem, chain: Chain, book: PriceBook, settings: SettingPrices) -> Floats | None:
    """By pipeline rank and shape, how much of the fastest device a rank is worth; None where they are alike. Of shapes
    that do not fit nothing is said.

    A rank's pace is the largest ratio, over the kinds of layer group, of the fastest device's seconds to its own: no share
    of the layer groups takes it less than its share of the fastest device's time over that pace.
    """
    devices = rank_devices(problem)
    if len({device.name for device in devices}) == 1:
        return None
    fit = np.isfinite(settings.rows[:, SINGLE.index("group_forward_s")])
    paces = {
        name: [
            _pace(problem, chain, book, book.on(device), key) if some else 1.0
            for key, some in zip(settings.keys, fit, strict=True)
        ]
        for name, device in {device.name: device for device in devices}.items()
    }
    return np.array([paces[device.name] for device in devices], dtype=np.float64)[:, settings.setting_of]


def _pace(problem: Problem, chain: Chain, book: PriceBook, other: PriceBook, key: Key) -> float:
    if other is book:
        return 1.0
    strategy = representative(problem, chain, key)
    mode, added = strategy.recompute.mode, key[-2] > 0
    axes = nearest_axes(strategy.mesh, ordered=problem.fixed.order is not None)  # as the table has them

    def seconds(own: PriceBook, group: tuple[int, ...]) -> float:
        prices = [
            own.block_price(strategy, block, mode if i == 0 else "none", axes=axes, added=added)
            for i, block in enumerate(group)
        ]
        return sum(price.forward_s + price.backward_s for price in prices)

    return max((seconds(book, group) / seconds(other, group) for group in chain.groups), default=1.0)


def no_faster_than(bounds: Bounds, shapes: Shapes, table: PriceTable, pace: Floats) -> Bounds:
    """T >= micro-batches * seconds of all layer groups on the fastest device / pace of all ranks."""
    with np.errstate(invalid="ignore"):
        groups_s = table.all_forward_s + table.all_backward_s - table.head_s - table.tail_s
        return replace(
            bounds, time_s=np.maximum(bounds.time_s, shapes.micro_batches * groups_s / pace.sum(axis=0))
        )
