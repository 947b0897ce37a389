"""What collectives reached, by kind and level of the network, beside what they were priced at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from autoparallel.runtime.monitor.differences import WARM_UP
from autoparallel.runtime.monitor.record import Record
from autoparallel.runtime.monitor.slow_links import rate_text

# Below which share of its priced bandwidth a collective is a difference to be told. Kind: choice.
FAR_BELOW = 0.7
ADVICE = (
    "measure the links (`autoparallel profile`), see whether `watch` names one of them or a rank that is late, and whether others "
    "use this level of the network"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Collectives of a kind over a level, a step: how many, the bytes that a rank sends, seconds and bytes per second (medians over the
    steps); None where it is not measured, or not priced."""

    op: str
    level: str
    count: int | None = None
    sent_bytes: float | None = None
    seconds: float | None = None
    bytes_per_s: float | None = None
    priced_bytes: float | None = None
    priced_s: float | None = None
    priced_bytes_per_s: float | None = None

    @property
    def name(self) -> str:
        """`all_reduce over infiniband`."""
        return f"{self.op} over {self.level}"

    @property
    def costs_s(self) -> float:
        """Seconds that what is sent takes longer than it would at the priced bandwidth."""
        if self.seconds is None or self.sent_bytes is None or not self.priced_bytes_per_s:
            return 0.0
        return self.seconds - self.sent_bytes / self.priced_bytes_per_s

    @property
    def far_below(self) -> bool:
        """Whether it reaches far less than it was priced at."""
        return (
            self.bytes_per_s is not None
            and self.priced_bytes_per_s is not None
            and self.bytes_per_s < FAR_BELOW * self.priced_bytes_per_s
        )

    def __str__(self) -> str:
        assert self.bytes_per_s is not None
        assert self.priced_bytes_per_s is not None
        return (
            f"{self.name}: {rate_text(self.bytes_per_s)} where {rate_text(self.priced_bytes_per_s)} were priced "
            f"({self.costs_s:.3g} s longer a step, beside computation or not)"
        )


def bandwidths(record: Record) -> list[Bandwidth]:
    """Of one start, those that take or should take longest first; the first steps are left out."""
    priced: Sequence[Mapping[str, Any]] = (record.start.get("predicted") or {}).get("collectives") or ()
    by_kind: dict[tuple[str, str], list[Mapping[str, Any]]] = {
        (one["op"], one["level"]): [] for one in priced
    }
    for step in record.steps[WARM_UP:]:
        for one in step.get("collectives") or ():
            by_kind.setdefault((one["op"], one["level"]), []).append(one)
    plans = {(one["op"], one["level"]): one for one in priced}
    found = [
        Bandwidth(
            op=kind[0],
            level=kind[1],
            count=round(median(one["count"] for one in measured)) if measured else None,
            sent_bytes=_median(measured, "bytes"),
            seconds=_median(measured, "seconds"),
            bytes_per_s=_median(measured, "bytes_per_s"),
            priced_bytes=plans.get(kind, {}).get("bytes"),
            priced_s=plans.get(kind, {}).get("seconds"),
            priced_bytes_per_s=plans.get(kind, {}).get("bytes_per_s"),
        )
        for kind, measured in by_kind.items()
    ]
    return sorted(found, key=lambda one: -max(one.seconds or 0.0, one.priced_s or 0.0))


def _median(measured: Sequence[Mapping[str, Any]], key: str) -> float | None:
    known = [one[key] for one in measured if one[key] is not None]
    return median(known) if known else None
