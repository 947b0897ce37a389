from __future__ import annotations

import gc
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# Imports, tracing and planning make many objects that stay for a while: looking at them as often as usual takes 15 % of the time of
# the ones, and 7 % of dry runs'.
gc.set_threshold(50_000)
# The same code gets the same answer every time, on machines that others use too.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("repeatable")
# A shell has what it starts in the background ignore interrupts, and so would all processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="every case of the tests that sweep over many")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out(config, items)
    _order(items)


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test that sweeps over many cases as many as its mark says, evenly spread: all of them with `--thorough`, and
    where the cases are asked for by name."""
    if config.getoption("--thorough") or any("::" in str(argument) for argument in config.args):
        return
    sweeps: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sweep") is not None:
            sweeps.setdefault((item.path, item.nodeid.split("[")[0]), []).append(item)
    left_out = set[pytest.Item]()
    for cases in sweeps.values():
        mark = cases[0].get_closest_marker("sweep")
        assert mark is not None
        keep = min(mark.args[0], len(cases))
        kept = {number * len(cases) // keep for number in range(keep)}
        left_out |= {case for number, case in enumerate(cases) if number not in kept}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _order(items: list[pytest.Item]) -> None:
    """Files that take minutes come first, so that nobody waits for them alone in the end; of the others, those whose processes wait
    for each other and those that only compute come by turns, so that the ones use the time of the others."""
    long, waiting = (
        {item.path for item in items if item.get_closest_marker(marker) is not None}
        for marker in ("long", "distributed")
    )
    files = list(dict.fromkeys(item.path for item in items))
    at: dict[Path, float] = {}
    for kind in ([path for path in files if (path in waiting) == waits] for waits in (True, False)):
        at |= {path: number / len(kind) for number, path in enumerate(kind)}
    items.sort(key=lambda item: (item.path not in long, at[item.path], item.path))


def pytest_collection_finish() -> None:
    """What was imported is never garbage: every later collection would look at all of it again."""
    gc.collect()
    gc.freeze()
