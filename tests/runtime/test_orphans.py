"""A process of a run ends with its agent, also while it is still starting; the agent with a process that no start will mend."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A script whose traceback is written in two halves, as any is that the machine stops in the middle of.
_TELLS_SLOWLY = (
    "sys.excepthook = lambda *_: (print('what it', file=sys.stderr, flush=True), time.sleep(1), "
    "print('ended of', file=sys.stderr))"
)


@pytest.mark.distributed
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's part is Linux'")
def test_a_process_whose_agent_goes_while_it_starts_goes_too(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(120)\n")
    agent = subprocess.Popen(
        [sys.executable, "-m", "autoparallel", "run", "--nproc-per-node", "1", str(tmp_path / "sleeps.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
        _until(lambda: agent.poll() is None and bool(_workers(children)))
        (worker,) = _workers(children)
    finally:
        agent.kill()
        agent.wait()
    _until(lambda: not _runs(worker))


@pytest.mark.sweep(1)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ("raise UserError('mesh.tp = 3: try 2')", "error: mesh.tp = 3: try 2"),
        ("print(nothing)", "error: NameError: name 'nothing' is not defined ({script}, line 3)"),
    ],
)
def test_what_the_user_has_to_mend_is_started_twice_and_not_ten_times(
    tmp_path: Path, ends: str, words: str
) -> None:
    script, files = tmp_path / "refused.py", tmp_path / "files"
    script.write_text(f"import sys, time; from autoparallel.errors import UserError; {_TELLS_SLOWLY}\n"
                      f"print('started', flush=True)\n{ends}\n")  # fmt: skip
    gone = subprocess.Popen(["true"])
    gone.wait()
    (files / f"autoparallel-agent-{gone.pid}-killed").mkdir(parents=True)
    (files / f"autoparallel-agent-{os.getpid()}-here").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "autoparallel", "run", "--nproc-per-node", "1", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(files)}, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout.count("started") == 2
    assert words.format(script=script) in done.stderr.splitlines()
    assert done.stderr.splitlines().count("ended of") == 2, "the agent cuts nobody's traceback off"
    left = [file.name for file in files.iterdir()]
    assert left == [f"autoparallel-agent-{os.getpid()}-here"], (
        "what killed agents left goes, and what this one had"
    )


@pytest.mark.distributed
def test_a_run_that_is_told_to_end_again_and_again_waits_until_its_processes_have_saved(
    tmp_path: Path,
) -> None:
    (tmp_path / "saves.py").write_text(
        "import signal, sys, time\n"
        "def told(*_):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    time.sleep(3)\n"
        "    print('saved', flush=True)\n"
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, told)\n"
        "print('started', flush=True)\n"
        "time.sleep(120)\n"
    )
    agent = subprocess.Popen(
        [sys.executable, "-m", "autoparallel", "run", "--nproc-per-node", "1", str(tmp_path / "saves.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert agent.stdout is not None
    assert agent.stdout.readline() == "started\n"
    for _ in range(4):
        agent.terminate()
        time.sleep(0.3)
    assert agent.communicate(timeout=120)[0] == "saved\n"
    assert agent.returncode == 143


def _workers(children: Path) -> list[int]:
    return [pid for pid in map(int, children.read_text().split()) if b"elastic.worker" in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _runs(pid: int) -> bool:
    return b"elastic.worker" in _command(pid)


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)
