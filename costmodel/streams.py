"""One compute stream and one communication stream side by side, with what each costs the other.

Work is fluid: while both streams are busy, computation runs at 1 / (1 + compute_slowdown + contention) of its speed
and a collective at 1 / (1 + comm_slowdown + contention); alone, each runs at full speed. Gathers go before reductions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """Further time, as a share, that each stream takes per second in which the other is busy too."""

    compute_slowdown: float = 0.0
    comm_slowdown: float = 0.0


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of computation that waits for `gather_s`, and reductions that may start when a fraction is done.

    `reductions`: (fraction of `compute_s`, seconds), in order. `contention`: further time, as a share, that it and
    the communication beside it take from each other, because collectives within it use the same links.
    """

    compute_s: float
    gather_s: float = 0.0
    reductions: tuple[tuple[float, float], ...] = ()
    contention: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTimes:
    """`end_s`: computation has ended; `tail_s`: what is then left on the communication stream.

    `exposed_s` = end_s less all computation: stalls, and what the collectives slowed it down.
    """

    end_s: float
    tail_s: float
    exposed_s: float


@dataclass(slots=True)
class _Streams:
    """The clock, and the communication that is queued: gathers (in order), then reductions (in order)."""

    interference: Interference
    now_s: float = 0.0
    gathers: deque[float] = field(default_factory=deque)
    reductions: deque[float] = field(default_factory=deque)

    def compute(self, work_s: float, contention: float) -> None:
        """Pass the time of `work_s` of computation, communicating beside it."""
        slow = 1.0 + self.interference.compute_slowdown + contention
        slow_comm = 1.0 + self.interference.comm_slowdown + contention
        while work_s > 0.0 and (self.gathers or self.reductions):
            queue = self.gathers or self.reductions
            passed_s = min(work_s * slow, queue[0] * slow_comm)
            if work_s * slow <= queue[0] * slow_comm:
                work_s = 0.0
                queue[0] -= passed_s / slow_comm
                if queue[0] <= 0.0:
                    queue.popleft()
            else:
                work_s -= passed_s / slow
                queue.popleft()
            self.now_s += passed_s
        self.now_s += max(work_s, 0.0)

    def wait_for_gathers(self) -> None:
        """Pass the time, without computation, until every queued gather is done."""
        while self.gathers:
            self.now_s += self.gathers.popleft()


def run_streams(segments: Sequence[Segment], interference: Interference) -> StreamTimes:
    """Compute the segments one after the other; the gather of the next is issued when one starts."""
    streams = _Streams(interference)
    if segments and segments[0].gather_s > 0.0:
        streams.gathers.append(segments[0].gather_s)
    for position, segment in enumerate(segments):
        streams.wait_for_gathers()
        if position + 1 < len(segments) and segments[position + 1].gather_s > 0.0:
            streams.gathers.append(segments[position + 1].gather_s)
        done = 0.0
        for fraction, reduce_s in segment.reductions:
            streams.compute(segment.compute_s * (fraction - done), segment.contention)
            streams.reductions.append(reduce_s)
            done = fraction
        streams.compute(segment.compute_s * (1.0 - done), segment.contention)
    work_s = sum(segment.compute_s for segment in segments)
    return StreamTimes(
        end_s=streams.now_s,
        tail_s=sum(streams.gathers) + sum(streams.reductions),
        exposed_s=max(0.0, streams.now_s - work_s),
    )
