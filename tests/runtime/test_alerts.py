"""Alerts: told once for every time that something is wrong, however it trembles, and never a storm of them."""

from __future__ import annotations

import http.server
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.errors import UserError
from autoparallel.runtime.monitor.alerts import MOST, WINDOW_S, Alert, Alerts, sender, value_of


def _entry(step: int, efficiency: float) -> dict[str, Any]:
    return {
        "step": step, "seconds": 2.0, "loss": 1.0, "efficiency": efficiency, "memory_bytes": [1.0, 3.0],
        "waiting_s": [0.0, 1.0], "communicating_s": [0.5, 0.5],
    }  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    levels=st.lists(st.tuples(st.booleans(), st.integers(10, 40)), min_size=1, max_size=8),
    noise=st.lists(st.floats(-0.02, 0.02), min_size=400, max_size=400),
)
def test_every_fall_is_told_once_and_every_recovery(
    levels: list[tuple[bool, int]], noise: list[float]
) -> None:
    sent: list[dict[str, Any]] = []
    alerts = Alerts(
        [Alert(metric="efficiency", below=0.8, steps=10)], lambda m: sent.append(dict(m)), clock=lambda: 0.0
    )
    expected, good, step = [], True, 0
    for fine, length in levels:
        for _ in range(length):
            alerts.step(_entry(step, (0.95 if fine else 0.6) + noise[step % 400]))
            step += 1
        if fine != good:
            good = fine
            expected.append(not fine)
    assert [m["firing"] for m in sent] == expected[:MOST]


@settings(max_examples=50, deadline=None)
@given(noise=st.lists(st.floats(-0.04, 0.04), min_size=300, max_size=300))
def test_what_trembles_around_the_threshold_is_told_at_most_once(noise: list[float]) -> None:
    sent: list[Any] = []
    alerts = Alerts([Alert(metric="efficiency", below=0.8, steps=5)], sent.append)
    for step, off in enumerate(noise):
        alerts.step(_entry(step, 0.79 + off))
    assert len(sent) <= 1


def test_no_storm_and_what_was_held_back_is_counted() -> None:
    sent: list[Any] = []
    now = [0.0]
    alerts = Alerts([], sent.append, clock=lambda: now[0])
    for step in range(1000):
        alerts.tell(step, "again")
    assert len(sent) == MOST
    now[0] = WINDOW_S
    alerts.tell(1000, "later")
    assert sent[-1]["held_back"] == 1000 - MOST


def test_numbers_are_those_of_the_record() -> None:
    entry = _entry(1, 0.9)
    assert value_of("memory_bytes", entry) == 3.0
    assert value_of("waiting_share", entry) == 0.25
    assert value_of("efficiency", {**entry, "efficiency": None}) is None
    assert Alert(metric="loss", above=3.0).beyond(float("nan"))


def test_a_command_and_a_local_address_hear_of_it_and_others_are_refused(tmp_path: Path) -> None:
    heard: list[Any] = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    out = tmp_path / "out.json"
    write = f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"
    send = sender([sys.executable, "-c", write], f"http://127.0.0.1:{server.server_port}/hook")
    send({"step": 3, "text": "slow"})
    end = time.monotonic() + 120
    while not heard and time.monotonic() < end:
        time.sleep(0.02)
    server.shutdown()
    assert heard == [{"step": 3, "text": "slow"}] == [json.loads(out.read_text())]
    told: list[str] = []
    failing = sender([sys.executable, "-c", "raise SystemExit(3)"], problem=told.append)
    failing({"step": 4})
    while not told and time.monotonic() < end:
        time.sleep(0.02)
    assert "an alert was not delivered" in told[0]
    for address in ("http://example.com/x", "ftp://127.0.0.1/", "http://8.8.8.8/", "nonsense"):
        with pytest.raises(UserError, match="private address"):
            sender(webhook=address)
    with pytest.raises(UserError, match="choose one of"):
        Alert(metric="speed", above=1.0)
    with pytest.raises(UserError, match="above= or below="):
        Alert(metric="loss")
