"""Checkpoints of a run: whole or not there, damage named, a full disk survived, other runs kept out."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from autoparallel.errors import UserError
from autoparallel.runtime.checkpoints.identity import dataset_identity, model_identity
from autoparallel.runtime.checkpoints.keeper import Checkpoints
from autoparallel.runtime.checkpoints.manifest import parsed, text_of
from autoparallel.runtime.checkpoints.signals import Signals, Wish
from tests.runtime.harness import Processes
from tests.runtime.holder import Holder
from tests.runtime.test_checkpoint import ON_TWO, _made, _one_process


def _state(value: float, size: int = 64) -> dict[str, Any]:
    """Tensors and values that all say `value`."""
    return {
        "model": {
            "weight": torch.full((size, 3), value),
            "half": torch.full((5,), value, dtype=torch.bfloat16),
        },
        "optimizer": {"lr": value, "betas": (0.9, value), "steps": torch.tensor(value), "none": None},
    }


def _saved(folder: Path, steps: int, **options: Any) -> Checkpoints:
    kept = Checkpoints(folder, every=1, **options)
    for step in range(1, steps + 1):
        kept.save(step, {"all": Holder(_state(float(step)))}, extra={"position": step})
    kept.close()
    return kept


def _loaded(folder: Path, **options: Any) -> tuple[int, dict[str, Any], list[str]]:
    said: list[str] = []
    kept, held = Checkpoints(folder, say=said.append, **options), Holder(_state(0.0))
    try:
        restored = kept.load({"all": held})
    finally:
        kept.close()
    assert restored is not None
    assert restored.extra == {"position": restored.step}
    return restored.step, held.state, said


def _same(state: Any, step: int) -> None:
    torch.testing.assert_close(state, _state(float(step)), rtol=0, atol=0)


def test_the_last_one_comes_back_and_the_last_three_are_kept(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "new").load({"all": Holder(_state(0.0))}) is None
    kept = _saved(tmp_path, 5)
    assert kept.folder.steps() == [5, 4, 3]
    step, state, said = _loaded(tmp_path)
    assert (step, said) == (5, [])
    _same(state, 5)


def test_what_is_copied_is_what_is_saved_though_training_goes_on(tmp_path: Path) -> None:
    kept, state = Checkpoints(tmp_path), _state(1.0, size=400_000)
    kept.save(1, {"all": Holder(state)}, extra={"position": 1})
    state["model"]["weight"].zero_()
    kept.close()
    restored = Holder(_state(0.0, size=400_000))
    Checkpoints(tmp_path).load({"all": restored})
    assert bool((restored.state["model"]["weight"] == 1.0).all())


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), manifest=st.booleans(), cut=st.booleans()
)
def test_any_damage_is_named_and_the_one_before_is_taken(
    tmp_path: Path, place: float, bit: int, manifest: bool, cut: bool
) -> None:
    shutil.rmtree(tmp_path)
    kept = _saved(tmp_path, 2)
    file = kept.folder.at(2) / ("manifest.json" if manifest else "rank-00000.safetensors")
    content = bytearray(file.read_bytes())
    at = int(place * len(content))
    if cut:
        del content[at:]
    else:
        content[at] ^= 1 << bit
    file.write_bytes(content)
    step, state, said = _loaded(tmp_path)
    if step == 2:
        assert manifest
        assert json.loads(bytes(content)), "only white space was changed"
        return
    assert step == 1
    _same(state, 1)
    assert str(kept.folder.at(2)) in said[0]
    assert file.name in said[0]
    assert (kept.folder.checkpoints / "refused-step-000000002").is_dir()


def test_where_all_are_damaged_nothing_begins_anew_by_itself(tmp_path: Path) -> None:
    kept = _saved(tmp_path, 2)
    for step in (1, 2):
        (kept.folder.at(step) / "rank-00000.safetensors").unlink()
    with pytest.raises(UserError, match=r"step 2: .*rank-00000.* step 1: .*give another folder"):
        _loaded(tmp_path)


def test_a_full_disk_is_a_message_and_the_last_good_one_stays(tmp_path: Path) -> None:
    said: list[str] = []
    kept = Checkpoints(tmp_path, say=said.append)
    kept.save(1, {"all": Holder(_state(1.0))}, extra={"position": 1})
    kept.finish()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # what a disk does that has no more room
    try:
        kept.save(2, {"all": Holder(_state(2.0, size=10_000))})
        kept.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "step 2 was not kept (rank 0: " in said[0]
    assert "File too large" in said[0]
    assert "the last good one is of step 1" in said[0]
    assert [p.name for p in kept.folder.checkpoints.iterdir()] == ["step-000000001"]
    shutil.rmtree(tmp_path)  # a folder that has gone is made again
    kept.save(3, {"all": Holder(_state(3.0))}, extra={"position": 3})
    kept.finish()
    assert kept.folder.steps() == [3]
    with pytest.raises(UserError, match="in use by"):  # and its lock is taken again
        Checkpoints(tmp_path)
    shutil.rmtree(tmp_path)
    tmp_path.write_text("in the way")
    kept.save(4, {"all": Holder(_state(4.0))})
    kept.close()
    assert "step 4 was not kept" in said[1]
    assert "training goes on" in said[1]
    tmp_path.unlink()


def test_a_run_whose_folder_was_removed_and_taken_by_another_one_keeps_out_of_it(tmp_path: Path) -> None:
    said: list[str] = []
    kept = Checkpoints(tmp_path / "run", say=said.append)
    kept.save(1, {"all": Holder(_state(1.0))})
    kept.finish()
    shutil.rmtree(tmp_path / "run")
    other = Checkpoints(tmp_path / "run")
    kept.save(2, {"all": Holder(_state(2.0))})
    kept.close()
    (text,) = said
    assert "step 2 was not kept (rank 0: the run's folder" in text
    assert "in use by" in text
    assert other.folder.steps() == []
    other.close()


SAVING = """
import sys
from autoparallel.runtime.checkpoints.keeper import Checkpoints
from tests.runtime.test_checkpoints import Holder, _state
kept = Checkpoints(sys.argv[1])
print("ready", flush=True)
for step in range(1, 100_000):
    kept.save(step, {"all": Holder(_state(float(step)))}, extra={"position": step})
"""


def test_a_run_that_is_killed_while_it_saves_leaves_whole_ones_alone(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SAVING, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    while not any(p.name.startswith("step-") for p in (tmp_path / "checkpoints").iterdir()):
        time.sleep(0.01)
    with pytest.raises(UserError, match=rf"in use by process {process.pid} on .*a folder of its own"):
        Checkpoints(tmp_path)
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    step, state, said = _loaded(tmp_path)
    _same(state, step)
    assert said == []
    assert all(p.name.startswith("step-") for p in (tmp_path / "checkpoints").iterdir())


def test_another_model_another_dataset_and_a_newer_version_are_refused(tmp_path: Path) -> None:
    model, data = model_identity(nn.Linear(2, 3)), dataset_identity([torch.ones(2)] * 5)
    assert model == model_identity(nn.Linear(2, 3)) != model_identity(nn.Linear(3, 2))
    assert data == dataset_identity([torch.ones(2)] * 5)
    assert len({data, dataset_identity([torch.ones(2)] * 6), dataset_identity([torch.zeros(2)] * 5)}) == 3
    kept = _saved(tmp_path, 1, identity={"model": model, "dataset": data})
    with pytest.raises(UserError, match=r"another dataset \(hash .*another folder"):
        _loaded(tmp_path, identity={"model": model, "dataset": "other"})
    assert _loaded(tmp_path, identity={"model": model})[0] == 1
    file = kept.folder.at(1) / "manifest.json"
    file.write_text(text_of({**parsed(file.read_text(), file), "schema": 2}))
    with pytest.raises(UserError, match=r"newer version.*update this installation"):
        _loaded(tmp_path)
    assert kept.folder.steps() == [1]


class _Surprise:
    def __reduce__(self) -> Any:
        return os.system, ("touch surprise",)


def test_no_pickle_is_written_or_read_unless_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"all.odd is a _Surprise.*allow_pickle=True"):
        Checkpoints(tmp_path / "a").save(1, {"all": {"odd": _Surprise()}})
    willing = Checkpoints(tmp_path / "b", allow_pickle=True)
    willing.save(1, {"all": {"odd": _Surprise()}})
    willing.close()
    with pytest.raises(UserError, match=r"all.odd was saved as a pickle"):
        Checkpoints(tmp_path / "b").load({"all": {"odd": None}})
    assert not (tmp_path / "surprise").exists()


def test_state_that_does_not_fit_is_told_before_anything_changes(tmp_path: Path) -> None:
    _saved(tmp_path, 1)
    held = Holder(_state(0.0, size=7) | {"more": {"a": torch.zeros(1)}})
    with pytest.raises(
        UserError, match=r"all.model.weight is \[7, 3\] here and \[64, 3\] there; nothing for all.more.a"
    ):
        Checkpoints(tmp_path).load({"all": held})
    assert not held.state["model"]["half"].any()


def test_signals_are_noted_and_the_strongest_counts() -> None:
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (signals.take(), signals.take(), signals.name) == (Wish.SAVE, Wish.NOTHING, "SIGUSR1")
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.take() is Wish.STOP
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


FORKED = """
import os, signal, time
from autoparallel.runtime.checkpoints.signals import Signals
with Signals() as signals:
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), signals.take().name)
"""


def test_a_forked_child_ends_when_it_is_told_to_as_a_data_loader_wants() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == [str(-signal.SIGTERM), "NOTHING"]


def changing(rank: int, world_size: int, folder: str) -> tuple[list[float], list[str], list[int]]:
    """Losses under one strategy after another; after each, two checkpoints, of which the later is damaged."""
    losses, said, steps = [], [], []
    for index, case in enumerate(ON_TWO.values()):
        model, optimizer, step = _made(case, "mlp")
        kept = Checkpoints(f"{folder}/run", say=said.append)
        if index:
            restored = kept.load({"model": model, "optimizer": optimizer})
            assert restored is not None
            steps.append(restored.step)
        else:
            import torch.distributed.checkpoint as dcp

            dcp.load({"model": model}, checkpoint_id=f"{folder}/0")
            for group in optimizer.param_groups:
                group["lr"] = 0.01
        losses.append(step())
        kept.save(2 * index + 1, {"model": model, "optimizer": optimizer})
        kept.save(2 * index + 2, {"model": model, "optimizer": optimizer})
        kept.close()
        torch.distributed.barrier()
        file = kept.folder.at(2 * index + 2) / f"rank-{world_size - 1:05d}.safetensors"
        if rank == 0:
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        torch.distributed.barrier()
    return losses, said, steps


@pytest.mark.distributed
def test_a_run_goes_on_under_other_strategies_from_the_one_before_the_damaged(
    gloo: Processes, tmp_path: Path
) -> None:
    cases, ranks = ON_TWO, 2
    straight = _one_process("mlp", len(cases), f"{tmp_path}/0")
    for rank, (losses, said, steps) in enumerate(gloo.run(ranks, changing, folder=str(tmp_path))):
        assert dict(zip(cases, losses, strict=True)) == pytest.approx(
            dict(zip(cases, straight, strict=True)), rel=1e-9
        )
        assert steps == [2 * n + 1 for n in range(len(cases) - 1)]
        assert len(said) == (len(cases) - 1 if rank == 0 else 0)
        assert all(f"rank-{ranks - 1:05d}.safetensors is damaged" in text for text in said)


def no_room(rank: int, world_size: int, folder: str) -> list[str]:
    """What a save says of which the second rank's disk is full."""
    said: list[str] = []
    kept = Checkpoints(folder, say=said.append)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {"all": {f"of {rank}": torch.ones(10_000)}}
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    kept.save(1, state)
    kept.finish()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    kept.save(2, state)
    kept.close()
    return [*said, *map(str, kept.folder.steps())]


@pytest.mark.distributed
def test_one_full_disk_keeps_no_half_and_names_the_rank(gloo: Processes, tmp_path: Path) -> None:
    first, second = gloo.run(2, no_room, folder=str(tmp_path))
    assert "step 1 was not kept (rank 1: " in first[0]
    assert (first[1:], second) == (["2"], ["2"])
