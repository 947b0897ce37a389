"""What one rank meets alone: whatever it is, the others hear of it, and nobody waits for a rank that has left."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from autoparallel.errors import UserError
from autoparallel.runtime.checkpoints import keeper, shares
from autoparallel.runtime.checkpoints.folder import RunFolder
from autoparallel.runtime.checkpoints.keeper import Checkpoints
from autoparallel.runtime.checkpoints.signals import Signals, Wish
from autoparallel.runtime.elastic.worker import error_handler
from autoparallel.runtime.guards.deadline import Deadline, Until, from_peers
from autoparallel.runtime.guards.status import StatusFile, read_statuses
from autoparallel.runtime.monitor.record import Recorder, read_record
from autoparallel.runtime.ranks.agreement import Agreement
from tests.runtime.harness import Processes

# A time-out that a slow disk goes beyond, and how slow it is; neither is more than twice the other.
SHORT_S, SLOW_S = 3.0, 4.5


def _raises(error: Exception) -> Callable[..., Any]:
    def act(*_: Any) -> Any:
        raise error

    return act


def _end_of(act: Callable[[], Any]) -> str:
    try:
        return str(act())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def failing(rank: int, world_size: int, folder: str) -> list[str]:
    """What each call ends in of which one rank alone fails."""
    everyone, said, state = Agreement(600.0), list[str](), {"all": {"a": torch.ones(3)}}
    found = [
        _end_of(lambda: everyone.alike(_raises(KeyError("lost")) if rank == 1 else None)),
        _end_of(lambda: everyone.decided(_raises(KeyError("lost")))),
        _end_of(lambda: everyone.alike(_raises(UserError("mend it")) if rank == 1 else None)),
        str(everyone.gathered(rank)),
    ]
    on_disk, text = shares.sync, keeper.text_of
    kept = Checkpoints(f"{folder}/any", say=said.append)
    for number, broken in enumerate([(1, shares, "sync"), (0, keeper, "text_of")]):
        if rank == broken[0]:
            setattr(broken[1], broken[2], _raises(MemoryError("no room")))
        kept.save(number, state)
        kept.finish()
        shares.sync, keeper.text_of = on_disk, text
    found.append(_end_of(lambda: kept.save(3, state, extra={"odd": {1}} if rank == 1 else {})))
    kept.save(4, state)
    kept.close()

    kept = Checkpoints(f"{folder}/slow", say=said.append, timeout_s=SHORT_S)
    if rank == 1:
        shares.sync = lambda path: (time.sleep(SLOW_S), on_disk(path))[1]  # type: ignore[func-returns-value]
    kept.save(1, state)
    kept.finish()
    shares.sync = on_disk
    kept.save(2, state)
    kept.close()
    return [*found, *said, *map(str, kept.folder.steps())]


@pytest.mark.distributed
def test_whatever_one_rank_meets_is_told_to_all_and_the_next_save_is_kept(
    gloo: Processes, tmp_path: Path
) -> None:
    first, second = gloo.run(2, failing, folder=str(tmp_path))
    assert first[:4] == [
        "FailedElsewhere: rank 1 failed: KeyError: 'lost'",
        "KeyError: 'lost'",
        "UserError: mend it",
        "[0, 1]",
    ]
    assert second[:4] == [
        "KeyError: 'lost'",
        "FailedElsewhere: rank 0 failed: KeyError: 'lost'",
        "UserError: mend it",
        "[0, 1]",
    ]
    assert first[4] == second[4]
    assert first[4].startswith("UserError: extra= is nothing that JSON holds (Object of type set")
    on_disk, in_manifest, slow = first[5:8]
    assert "step 0 was not kept (rank 1: " in on_disk
    assert "MemoryError: no room" in on_disk
    assert "step 1 was not kept (rank 0: no room); training goes on; there is none yet" in in_manifest
    assert "step 1 was not kept (rank 0 did not hear of the others: " in slow
    assert (first[8:], second[5:]) == (["2"], ["2"]), "who did not hear of each other do so again"
    assert [path.name for path in (tmp_path / "any" / "checkpoints").iterdir()] == ["step-000000004"]


def test_who_waits_for_a_disk_waits_for_ranks_that_live(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoparallel.runtime.guards.status.SILENT_S", 1.0)
    own, gone, gives_up = (StatusFile(tmp_path, rank) for rank in range(3))
    (tmp_path / "rank-00009").symlink_to(tmp_path / "nowhere")  # as a file that goes while it is read
    (tmp_path / "rank-of-another").write_text("")
    ended: list[int] = []
    deadline = Deadline(tmp_path, 0, own, end=ended.append)

    def until_ended(times: int) -> str:
        until = time.monotonic() + 60
        while len(ended) < times and time.monotonic() < until:
            time.sleep(0.05)
        assert len(ended) == times
        return capsys.readouterr().err

    deadline.begin(2.0, Until.LOST)
    time.sleep(5.0)
    assert ended == [], "as long as it takes"
    gives_up.gives_up("rank 3 has not come further")
    deadline.begin(2.0, Until.LOST)
    assert "error: a rank is lost for 2 s: rank 3 has not come further; the run goes on" in until_ended(1)
    (tmp_path / "rank-00002").unlink()
    gone.close()
    deadline.begin(2.0, Until.LOST)
    assert f"error: a rank is lost for 2 s: rank 1 (process {os.getpid()} on " in until_ended(2)
    monkeypatch.setattr("autoparallel.runtime.guards.deadline.verdict", _raises(ValueError("odd")))
    deadline.begin(0.1)
    assert "who is to blame was not found out (ValueError: odd)" in until_ended(3)
    for each in (deadline, own, gives_up):
        each.close()


def test_a_run_that_was_stopped_as_a_whole_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a terminal stops it (Ctrl-Z), and lets it go on later."""
    later_s, ended, own = [0.0], list[int](), StatusFile(tmp_path, 0)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later_s[0])
    monkeypatch.setattr("autoparallel.runtime.guards.deadline.time", clock)
    deadline = Deadline(tmp_path, 0, own, end=ended.append)
    deadline.begin(3.0)
    time.sleep(0.2)
    later_s[0] = 600.0
    time.sleep(0.3)
    assert ended == []
    until = time.monotonic() + 60
    while not ended and time.monotonic() < until:
        time.sleep(0.05)
    assert ended == [1], "it has the time that it had"
    for each in (deadline, own):
        each.close()


def test_a_rank_that_cannot_say_what_it_does_does_not_begin(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(UserError, match="rank 7 cannot say there what it does"):
            StatusFile(tmp_path, 7)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_statuses(tmp_path) == []


def test_what_the_agent_reads_of_a_failure_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        error_handler().record_exception(ValueError("odd"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "error.json").exists()
    error_handler().record_exception(ValueError("odd"))
    (told,) = json.loads((tmp_path / "error.json").read_text()).values()
    assert told["message"] == "ValueError: odd"


def test_a_signal_at_any_moment_is_taken_once() -> None:
    with Signals() as signals:
        for moment in range(200):
            left = moment

            def at(frame: FrameType, event: str, _: Any) -> Any:
                nonlocal left
                frame.f_trace_opcodes = True
                if event == "opcode":
                    left -= 1
                    if left == 0:
                        signal.raise_signal(signal.SIGTERM)
                return at

            before = sys.gettrace()
            signal.raise_signal(signal.SIGUSR1)
            sys.settrace(at)
            first = signals.take()
            sys.settrace(before)
            came = Wish.STOP if left <= 0 and moment else Wish.SAVE
            assert max(first, signals.take()) is came, moment
            assert signals.take() is Wish.NOTHING, moment
        assert left > 0, "the last moments come after it"


def test_a_record_goes_on_after_any_line_that_was_cut_off(tmp_path: Path) -> None:
    Recorder(tmp_path).add("start", step=0)
    whole = (tmp_path / "record.jsonl").read_bytes()
    for cut in range(len(whole) + 1):
        (tmp_path / "record.jsonl").write_bytes(whole + whole[:cut])
        recorder = Recorder(tmp_path)
        recorder.add("start", step=7)
        recorder.add("step", step=8)
        records = read_record(tmp_path)
        assert [r.start["step"] for r in records] == [0, *([0] if cut >= len(whole) - 1 else []), 7], cut
        assert [step["step"] for step in records[-1].steps] == [8]


class _Killed(BaseException):
    pass


def test_a_checkpoint_that_takes_the_place_of_another_leaves_one_whenever_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, left = Path.rename, -1

    def counted(path: Path, target: Path) -> Path:
        nonlocal left
        left -= 1
        if left == 0:
            raise _Killed
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", counted)
    for moment in range(1, 4):
        folder = RunFolder(tmp_path / str(moment))
        for content in ("old", "new"):
            left = moment if content == "new" else -1
            folder.open()
            folder.writing(5).mkdir()
            (folder.writing(5) / "content").write_text(content)
            with contextlib.suppress(_Killed):
                folder.commit(5)
            left = -1
            folder.close()
        folder.open()
        assert [path.name for path in folder.checkpoints.iterdir()] == ["step-000000005"]
        assert (folder.at(5) / "content").read_text() == ("old" if moment < 3 else "new")
        folder.close()
    monkeypatch.setattr(Path, "rename", _raises(FileNotFoundError()))
    folder.retain(0)  # somebody else removes it


def test_what_a_data_loader_meets_is_no_other_ranks_fault() -> None:
    assert not from_peers(RuntimeError("DataLoader timed out after 3 seconds"))
    assert from_peers(RuntimeError("Timed out waiting 3000ms for send operation to complete"))
