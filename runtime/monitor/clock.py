"""Seconds of a step by kind of action, and its actions one by one, on this rank.

An action lasts until the next one begins. On an accelerator, whose work runs behind, it lasts in the host's time: what waits
for the device waits in the action that asks for a number, so that a step's sum is right and its parts are the host's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

# What each kind of action is in the prediction's words; others are "other".
KINDS = {
    "F": "forward", "B": "backward", "I": "backward", "W": "backward", "REDUCE_GRAD": "dp_comm", "LOSS": "dp_comm",
    "STEP": "optimizer", "SEND_F": "pp_comm", "SEND_B": "pp_comm", "RECV_F": "pp_comm", "RECV_B": "pp_comm",
    "DATA": "data",
}  # fmt: skip
COMPUTED = ("forward", "backward")
SENT = ("dp_comm", "pp_comm")
_MICRO = re.compile(r"\d+$")


class StepClock:
    """A `Progress` that adds up."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._kind, self._since = "", time.perf_counter()
        self._begun, self._actions = self._since, list[tuple[str, int, float]]()

    def begin(self) -> None:
        """A step begins."""
        self._seconds, self._kind, self._since = {}, "", time.perf_counter()
        self._begun, self._actions = self._since, []

    def at(self, action: str, stage: int) -> None:
        """An action begins."""
        now = time.perf_counter()
        self._actions.append((action, stage, now - self._begun))
        if self._kind:
            self._seconds[self._kind] = self._seconds.get(self._kind, 0.0) + now - self._since
        self._kind, self._since = KINDS.get(_MICRO.sub("", action), "other"), now

    def end(self) -> Mapping[str, float]:
        """Seconds by kind of the step that ends."""
        self.at("", 0)
        self._kind = ""
        return self._seconds

    def spans(self) -> list[tuple[str, int, float, float]]:
        """Action, stage, and seconds from the step's beginning to its own and to its end, of the step that has ended."""
        ends = [begin for _, _, begin in self._actions[1:]]
        return [
            (action, stage, begin, end)
            for (action, stage, begin), end in zip(self._actions, ends, strict=False)
            if action
        ]


def kind_of(action: str) -> str:
    """The prediction's word for an action: `F3` is "forward"."""
    return KINDS.get(_MICRO.sub("", action), "other")
