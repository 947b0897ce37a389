"""Alerts: what a run's record comes to, told to a command or to a local address, and told once.

A rule fires when its number is beyond its threshold in so many steps in a row; it fires again only after the number has been
clearly back (hysteresis) for as long. However many rules fire, no more than `MOST` messages go out in `WINDOW_S`: what came
meanwhile is counted in the next one. Messages go out beside training, which never waits for them.
"""

from __future__ import annotations

import ipaddress
import json
import math
import subprocess
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from autoparallel.errors import UserError

MOST, WINDOW_S = 5, 600.0  # Kind: choice
_TIMEOUT_S = 10.0
METRICS = (
    "seconds", "loss", "efficiency", "memory_bytes", "waiting_share", "communicating_share", "skipped_share",
)  # fmt: skip
_OF_THE_STEP = {"waiting_share": "waiting_s", "communicating_share": "communicating_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A threshold on a number of every recorded step: seconds, loss, efficiency (predicted over measured), memory_bytes (of
    the fullest rank), waiting_share and communicating_share (of the step, the mean of the ranks), skipped_share (of the last 50
    steps, those whose batch was left out: this one is held against such steps, too). It fires after `steps` steps in a row
    `above` or `below` it, and is over after as many that are `back` (a share of the threshold) on the other side."""

    metric: str
    above: float | None = None
    below: float | None = None
    steps: int = 10
    back: float = 0.05

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise UserError(f'Alert metric "{self.metric}": choose one of {", ".join(METRICS)}')
        if (self.above is None) == (self.below is None) or self.steps < 1 or self.back < 0:
            raise UserError(
                f"Alert on {self.metric}: give above= or below=, steps of at least 1, and back of at least 0"
            )

    @property
    def threshold(self) -> float:
        limit = self.above if self.above is not None else self.below
        assert limit is not None
        return limit

    def beyond(self, value: float) -> bool:
        """Whether a value is beyond the threshold; what is no number always is."""
        if math.isnan(value):
            return True
        return value > self.threshold if self.above is not None else value < self.threshold

    def well(self, value: float) -> bool:
        """Whether it is clearly back."""
        room = abs(self.threshold) * self.back
        return value <= self.threshold - room if self.above is not None else value >= self.threshold + room


class Alerts:
    """Holds the recorded steps of one run against `rules`; `send` gets each message (see `sender`)."""

    def __init__(
        self,
        rules: Sequence[Alert],
        send: Callable[[Mapping[str, Any]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules, self._send, self._clock = tuple(rules), send, clock
        self._runs = [0] * len(self._rules)  # steps in a row that speak for a change
        self._firing = [False] * len(self._rules)
        self._sent: deque[float] = deque()
        self._held_back = 0

    def step(self, entry: Mapping[str, Any]) -> list[str]:
        """What a step of the record sets off, in words."""
        told = []
        for i, rule in enumerate(self._rules):
            value = value_of(rule.metric, entry)
            if value is None:
                continue
            change = rule.well(value) if self._firing[i] else rule.beyond(value)
            self._runs[i] = self._runs[i] + 1 if change else 0
            if self._runs[i] < rule.steps:
                continue
            self._runs[i], self._firing[i] = 0, not self._firing[i]
            side = "above" if rule.above is not None else "below"
            now, steps = f"{value:.4g}", f"{rule.steps} step{'s' * (rule.steps != 1)}"
            text = (
                f"{rule.metric} has been {side} {rule.threshold:.4g} for {steps} ({now})"
                if self._firing[i]
                else f"{rule.metric} is back ({now}; the threshold is {rule.threshold:.4g})"
            )
            told.append(text)
            self.tell(entry["step"], text, firing=self._firing[i], metric=rule.metric, value=value)
        return told

    def tell(self, step: int, text: str, **more: Any) -> None:
        """Send a message, unless too many went out lately."""
        now = self._clock()
        while self._sent and now - self._sent[0] >= WINDOW_S:
            self._sent.popleft()
        if len(self._sent) >= MOST:
            self._held_back += 1
            return
        self._sent.append(now)
        self._send({"step": step, "text": text, "held_back": self._held_back, **more})
        self._held_back = 0


def value_of(metric: str, entry: Mapping[str, Any]) -> float | None:
    """A number of a step of the record; None where it is not there."""
    if metric in _OF_THE_STEP and "seconds" in entry:
        times = entry[_OF_THE_STEP[metric]]
        return sum(times) / len(times) / entry["seconds"] if entry["seconds"] > 0 else None
    value = entry.get(metric)
    return max(value) if isinstance(value, list) else value


def sender(
    command: Sequence[str] = (), webhook: str = "", problem: Callable[[str], None] = lambda _: None
) -> Callable[[Mapping[str, Any]], None]:
    """What sends a message as JSON: on the standard input of `command`, and by POST to `webhook`. `problem` is told, once, what
    did not work. Raises UserError for an address that is not local."""
    if webhook:
        check_local(webhook)
    told = threading.Event()

    def deliver(message: Mapping[str, Any]) -> None:
        content = json.dumps(message).encode()
        try:
            if command:
                subprocess.run(
                    list(command), input=content, timeout=_TIMEOUT_S, check=True, capture_output=True
                )
            if webhook:
                kind = {"Content-Type": "application/json"}
                asked = urllib.request.Request(webhook, data=content, headers=kind, method="POST")
                with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                    asked, timeout=_TIMEOUT_S
                ):
                    pass
        except Exception as error:  # whatever the other end answers
            if not told.is_set():
                told.set()
                problem(f"an alert was not delivered ({error}); training goes on")

    return lambda message: threading.Thread(
        target=deliver, args=(message,), daemon=True, name="alert"
    ).start()


def check_local(address: str) -> None:
    """Raise UserError for a webhook that is not on this machine or in a private network, by its number."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_private
    except ValueError:
        local = False
    if parts.scheme not in ("http", "https") or not local:
        raise UserError(
            f"webhook {address}: give http://ADDRESS with localhost or a private address (10.…, 172.16.…, 192.168.…); for others "
            "run something there that passes it on"
        )
