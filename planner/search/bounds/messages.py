"""The messages between stages: what those on a micro-batch's way take at least, wherever the model is cut.

Chunks that are not at an end of the model have a layer group each, so that no two cuts are at one place of the chain: n cuts send
no less together than the n shortest messages of all places, and the longest of them is no shorter than the n-th.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoparallel.planner.search.bounds.flight import is_v_shaped, most_on_their_way
from autoparallel.planner.search.bounds.rows import Rows
from autoparallel.planner.search.space.build import SCHEDULES
from autoparallel.planner.search.space.meshes import Floats, Ints

_MANY = 1 << 30  # more than any model has cuts
_MOST = 16  # messages told apart: a column for each rank and variant. Kind: choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """The messages of some variants, the shortest first."""

    each_s: Floats  # [variant, message]
    places: Ints  # of the chain that send it, likewise

    @staticmethod
    def of(rows: Rows) -> Messages:
        """Where cuts may be at one place, or messages are too many, as if every place sent the shortest."""
        if not 1 < np.count_nonzero(rows.places) <= _MOST:
            return Messages(each_s=rows.send_s[:, None], places=np.full((len(rows.send_s), 1), _MANY))
        sent = np.flatnonzero(rows.places)
        each_s, places = rows.sends_s[:, sent], np.array(rows.places)[sent]
        order = np.argsort(each_s, axis=1, kind="stable")
        places = places[order]
        places[rows.least_per_chunk == 0, 0] = _MANY
        return Messages(each_s=np.take_along_axis(each_s, order, axis=1), places=places)

    def together_s(self, cuts: Ints | Floats) -> Floats:
        """Seconds of one message through each of so many cuts [..., variant]."""
        if self.each_s.shape[1] == 1:
            return np.asarray(cuts * self.each_s[:, 0])
        before = np.cumsum(self.places, axis=1) - self.places
        sent = np.clip(np.asarray(cuts)[..., None] - before, 0, self.places)
        return np.asarray((sent * self.each_s).sum(axis=-1))

    def longest_s(self, cuts: Ints) -> Floats:
        """Seconds of the longest message of so many cuts [variant]; 0 of none."""
        if self.each_s.shape[1] == 1:
            return np.asarray(np.where(cuts > 0, self.each_s[:, 0], 0.0))
        before = np.cumsum(self.places, axis=1) - self.places
        return np.asarray(np.where(cuts[:, None] > before, self.each_s, 0.0).max(axis=1))


def forth_s(rows: Rows, sent: Messages) -> Floats:
    """Seconds of messages alone until the last micro-batch has passed all stages on its way forth; 0 where it sends none.

    Of a single chunk the link of the longest message carries one for each micro-batch, of several that between the first two ranks one
    for each of their cuts and each micro-batch, in the shape of a V the first half of these.
    """
    chunks, m, pp = rows.chunks, rows.shapes.micro_batches, rows.shapes.pp
    v_shaped = is_v_shaped(rows.schedule)
    hops = pp * chunks - 1 - v_shaped
    single_s = sent.together_s(hops) + (m - 1) * sent.longest_s(hops)
    several_s = m * sent.together_s(chunks) + (pp - 2) * rows.send_s
    shaped_s = (m + hops - 1) * rows.send_s
    found_s = np.where(v_shaped, shaped_s, np.where(chunks > 1, several_s, single_s))
    return np.asarray(np.where(pp > 1, found_s, 0.0))


def messages_s(rows: Rows, sent: Messages, forward_s: Floats, back_s: Floats) -> Floats:
    """Seconds that messages make a step take at least, several ranks: `forward_s` and `back_s` of one micro-batch through the
    whole model and back.

    A micro-batch passes all links both ways, and no more than `most_on_their_way` do so at a time. A link carries one message for
    each of its cuts and each micro-batch, one after the other; before the first one, or after the last one, comes the rest
    of a micro-batch's way: of single chunks the link may be that of the longest message, of several that between the first two ranks. In the
    shape of a V each link carries messages of both directions, and the last rank turns without one.
    """
    schedule, chunks, m, pp = rows.schedule, rows.chunks, rows.shapes.micro_batches, rows.shapes.pp
    send_s = rows.send_s
    v_shaped, gpipe = is_v_shaped(schedule), schedule == SCHEDULES.index("gpipe")
    hops = pp * chunks - 1 - v_shaped
    there_and_back_s = forward_s + back_s + 2 * sent.together_s(hops)
    in_turns_s = there_and_back_s * m / most_on_their_way(schedule, chunks, m, pp)
    # GPipe's way back begins with the last micro-batch's arrival, that of others of a single chunk with the first one's.
    single_s = there_and_back_s + (m - 1) * np.where(gpipe, 2, 1) * sent.longest_s(hops)
    in_line_s = m * sent.together_s(chunks)
    several_s = np.maximum(forward_s, back_s) + in_line_s + (hops + pp - 2) * send_s
    shaped_s = np.maximum((2 * m + hops - 1) * send_s, back_s + (m + 2 * hops - 1) * send_s)
    linked_s = np.where(v_shaped, shaped_s, np.where(chunks > 1, several_s, single_s))
    return np.asarray(np.maximum(in_turns_s, linked_s))
