"""A lower bound for pipelines over unlike devices: all ranks together are no faster than the sum of their paces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.prices import PriceBook
from autoparallel.planner.search.bounds.tables import PriceTable, representative, settings_of
from autoparallel.planner.search.bounds.variants import Bounds
from autoparallel.planner.search.partition.forms import Chain
from autoparallel.planner.search.partition.unlike import rank_devices
from autoparallel.planner.search.space.build import Shapes
from autoparallel.planner.search.space.meshes import Floats


def pace_of_ranks(problem: Problem, chain: Chain, book: PriceBook, shapes: Shapes) -> Floats | None:
    """By pipeline rank and shape, how much of the fastest device a rank is worth; None where they are alike.

    A rank's pace is the largest ratio, over the kinds of layer group, of the fastest device's seconds to its own: no share
    of the layer groups takes it less than its share of the fastest device's time over that pace.
    """
    devices = rank_devices(problem)
    if len({device.name for device in devices}) == 1:
        return None
    distinct, rows = settings_of(problem, shapes)
    table = [
        [_pace(problem, chain, book, book.on(device), key) for key in distinct.tolist()] for device in devices
    ]
    return np.array(table, dtype=np.float64)[:, rows]


def _pace(problem: Problem, chain: Chain, book: PriceBook, other: PriceBook, key: list[float]) -> float:
    if other is book:
        return 1.0
    strategy = representative(problem, chain, key)
    mode = strategy.recompute.mode

    def seconds(own: PriceBook, group: tuple[int, ...]) -> float:
        prices = [
            own.block_price(strategy, block, mode if i == 0 else "none") for i, block in enumerate(group)
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
