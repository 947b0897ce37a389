"""The memory of hosts in the bounds by rank: how many layer groups ranks can hold whose activations or optimizer state are there.

Ranks share hosts: one of them, a few neighbours, or, where it is not known, all share all hosts. Of n[r] layer groups on rank
r, L[r] micro-batches are in flight at least; k of them all are recomputed, which then keep `least` instead of `kept` bytes:

    sum of (state + kept L[r]) n[r] - (kept - least) max(L) k <= room
    sum of work n[r] + recomputation k <= sum of the time that the ranks have
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoparallel.costmodel.host_memory import host_capacity_bytes
from autoparallel.planner.expand import state
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.rows import EPSILON, Rows
from autoparallel.planner.search.space.meshes import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRoom:
    """The variants `rows` that keep something on hosts, of which so many neighbouring ranks `share` the same ones; by variant, but
    for `flight` [rank, variant]: micro-batches in flight of the layer groups of a rank at least."""

    rows: Ints
    share: Ints
    room_bytes: Floats  # of their hosts, for one device of each rank
    state_bytes: Floats  # of a layer group
    kept_bytes: Floats  # likewise, of a micro-batch
    least_bytes: Floats  # likewise, if it is recomputed where that needs less
    recompute_s: Floats  # what that takes, all micro-batches
    flight: Floats

    def hold(self, repeated: int, blocks: Floats, spare_s: Floats, per_block_s: Floats) -> Bools:
        """Whether so many layer groups may be divided into at most `blocks` [rank, variant] on ranks that have `spare_s` for
        them [rank, variant], `per_block_s` each at least, and their recomputation; all variants, not `rows` alone."""
        found = np.ones(blocks.shape[1], dtype=np.bool_)
        for share in np.unique(self.share).tolist():
            some = np.flatnonzero(self.share == share)
            at, held = self.rows[some], np.zeros(len(some))
            for first in range(0, len(blocks), share):
                ranks = slice(first, first + share)
                most, time_s = np.maximum(blocks[ranks, at], 0.0), np.maximum(spare_s[ranks, at], 0.0)
                held += self._held(some, self.flight[ranks, some], most, time_s.sum(axis=0), per_block_s[at])
            found[at] = held >= repeated * (1 - EPSILON)
        return found

    def _held(self, some: Ints, flight: Floats, most: Floats, time_s: Floats, per_block_s: Floats) -> Floats:
        """No fewer layer groups than some ranks that share their hosts hold together."""
        order = np.argsort(flight, axis=0, kind="stable")
        flight, most = np.take_along_axis(flight, order, axis=0), np.take_along_axis(most, order, axis=0)
        room, state_, kept, least, again_s = (
            column[some]
            for column in (
                self.room_bytes, self.state_bytes, self.kept_bytes, self.least_bytes, self.recompute_s,
            )
        )  # fmt: skip
        kept_each, least_each = state_ + kept * flight, state_ + least * flight
        with np.errstate(divide="ignore", invalid="ignore"):
            freed = np.where(again_s > 0.0, (kept - least) * flight[-1] / again_s, np.inf)  # in a second
        timed = np.isfinite(freed)
        freed = np.where(timed, freed, 0.0)
        recomputed = _filled(kept_each + freed * per_block_s, room + freed * time_s, most)
        recomputed = np.where(timed, recomputed, most.sum(axis=0))
        unless = np.maximum(_filled(kept_each, room, most), recomputed)
        return np.minimum(unless, _filled(least_each, room, most))


def _filled(each_bytes: Floats, room_bytes: Floats, most: Floats) -> Floats:
    """How many layer groups, at most so many on each rank, fit a room; those that weigh least first."""
    held, left = np.zeros(len(room_bytes)), np.maximum(room_bytes, 0.0)
    for each, here in zip(each_bytes, most, strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            fits = np.where(each > 0.0, np.minimum(left / each, here), here)
        held, left = held + fits, left - fits * each
    return np.where(room_bytes < 0.0, 0.0, held)


def host_room(problem: Problem, rows: Rows, flight: Ints | Floats) -> HostRoom | None:
    """What hosts have room for; None where nothing is kept there, or nobody knows their memory."""
    each_bytes = host_capacity_bytes(problem.cluster)
    offloads = (rows.shapes.activations_offloaded > 0) | (rows.shapes.optimizer_offloaded > 0)
    kept_there = np.flatnonzero(offloads)
    if not each_bytes or not len(kept_there) or not rows.repeated:
        return None
    rows = rows.take(kept_there)
    flying = np.broadcast_to(flight, (len(flight), len(offloads)))[:, kept_there].astype(np.float64)
    shapes, u, devices = rows.shapes, rows.table, rows.shapes.devices
    per_node = np.minimum(max(group.devices_per_node for group in problem.cluster.groups), devices)
    share = _sharing(rows, per_node)
    hosts = np.where(share < shapes.pp, share / per_node, -(-devices // per_node) * shapes.pp / devices)
    stepped = state.optimizer_bytes_per_parameter(problem.execution) * shapes.optimizer_offloaded
    ranks = np.where(rows.zero >= 1, shapes.dp_shard * shapes.cp, 1)
    alike = np.where(rows.zero >= 1, np.maximum(shapes.dp_shard * shapes.cp * shapes.tp // shapes.ep, 1), 1)
    group_bytes = stepped * (u.group_trainable / ranks + u.group_expert_trainable / alike)
    all_bytes = stepped * (u.all_trainable / ranks + u.all_expert_trainable / alike)
    ends_bytes = np.where(share < shapes.pp, 0.0, np.maximum(all_bytes - rows.repeated * group_bytes, 0.0))
    return HostRoom(
        rows=kept_there, share=share, room_bytes=hosts * each_bytes - ends_bytes, state_bytes=group_bytes,
        kept_bytes=u.of_kinds("host_saved").min(axis=1), least_bytes=u.of_kinds("least_host_saved").min(axis=1),
        recompute_s=shapes.micro_batches * u.recompute_s, flight=flying,
    )  # fmt: skip


def _sharing(rows: Rows, per_node: Ints) -> Ints:
    """How many neighbouring pipeline ranks share their hosts with no others; all, where it is not known."""
    pp, stride = rows.shapes.pp, np.maximum(rows.pp_stride, 1)
    inside = np.maximum(per_node // stride, 1)
    alone = (rows.pp_stride > 0) & (stride % per_node == 0)
    few = (rows.pp_stride > 0) & (per_node % stride == 0) & (pp % inside == 0)
    return np.where(alone, 1, np.where(few, np.minimum(inside, pp), pp))
