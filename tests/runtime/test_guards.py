"""What goes wrong in one rank is found, and the rank named, on every rank; what does not is left alone."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from autoparallel import Trainer, UserError
from autoparallel.runtime.guards.checksums import Checksums, checksum
from autoparallel.runtime.guards.deadline import Deadline, Until, verdict
from autoparallel.runtime.guards.guards import GuardOptions
from autoparallel.runtime.guards.numbers import all_numbers, culprits
from autoparallel.runtime.guards.status import StatusFile, read_statuses
from autoparallel.runtime.monitor.monitor import MonitorOptions
from autoparallel.runtime.monitor.record import read_record, skipped_steps
from autoparallel.runtime.ranks.agreement import Agreement
from autoparallel.runtime.tensor.questions import local
from autoparallel.trainer import Step
from tests.runtime.harness import Processes
from tests.runtime.models import Mlp
from tests.runtime.train_elastic import Numbers

RANKS, STEPS, BATCH = 4, 6, 8
REPLICAS = "[mesh]\npp = 1\ndp_replicate = 4\ndp_shard = 1\n"
ISLANDS = '[mesh]\npp = 1\ndp_replicate = 2\ndp_shard = 1\ntp = 2\n[outer]\nalgorithm = "diloco"\nevery = 3\n'
TENSORS = "[mesh]\npp = 1\ndp_replicate = 2\ndp_shard = 1\ntp = 2\n"


class Broken(Numbers):
    """Sample 3 is no number."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = super().__getitem__(index)
        return inputs * (math.nan if index == 3 else 1.0), target


class Wider(Numbers):
    fingerprint = "as the others'"

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = super().__getitem__(index)
        return inputs.repeat(2), target


class Usual(Numbers):
    fingerprint = "as the others'"


def _run(
    folder: str,
    data: Any,
    options: GuardOptions,
    *,
    mesh: str = REPLICAS,
    after: Callable[[Trainer, Step], None] | None = None,
    steps: int = STEPS,
    pause_s: float = 0.0,
    shown: bool = False,
) -> dict[str, Any]:
    """Losses by step, what was said, and the error that ended it."""
    torch.manual_seed(0)
    said: list[str] = []
    losses: dict[int, float] = {}
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if torch.distributed.get_rank() == 0:
        (path / "mesh.toml").write_text(mesh)
    torch.distributed.barrier()

    def note(step: Step) -> None:
        losses[step.number] = step.loss
        if after is not None:
            after(trainer, step)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(pause_s)
        return F.cross_entropy(output, target)

    class Quiet(Trainer):
        def _say(self, text: str) -> None:
            said.append(text)

    trainer = Quiet(
        Mlp().double(), optimizer=partial(torch.optim.AdamW, lr=1e-2), data=data, global_batch=BATCH,
        loss_fn=loss, strategy=path / "mesh.toml", cluster="cpu-gloo:1x4", folder=path / "run", every=2,
        on_step=note, guards=options, monitor=MonitorOptions(tensorboard=shown),
    )  # fmt: skip
    error = ""
    try:
        trainer.fit(steps)
    except UserError as raised:
        error = str(raised)
    trainer.close()
    torch.distributed.barrier()
    return {"losses": losses, "said": said, "error": error, "skipped": trainer.ledger.skipped}


def _flip(parameter: torch.Tensor) -> None:
    """One bit of the first number."""
    words = local(parameter.detach()).view(torch.int64).view(-1)
    words[0] ^= 1 << 40


def cases(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    quiet = GuardOptions(checksums_every=1)
    found = {
        policy: _run(f"{folder}/{policy}", Broken(), GuardOptions(not_a_number=policy))
        for policy in ("stop", "skip", "roll-back")
    }
    found["clean"] = _run(f"{folder}/clean", Numbers(), quiet)
    flipped: list[int] = []

    def flip(trainer: Trainer, step: Step) -> None:
        if step.number == 5 and rank == 2 and not flipped:
            flipped.append(step.number)
            _flip(next(trainer.model.parameters()))

    found["flipped"] = _run(f"{folder}/flipped", Numbers(), quiet, after=flip)
    found["slow"] = _run(f"{folder}/slow", Numbers(), quiet, steps=26, pause_s=0.02 * (rank == 2), shown=True)
    found["tensors"] = _run(f"{folder}/tensors", Numbers(), quiet, mesh=TENSORS)
    found["islands"] = _run(f"{folder}/islands", Numbers(), quiet, mesh=ISLANDS)
    found["wider"] = _run(f"{folder}/wider", Wider() if rank == 1 else Usual(), quiet)

    torch.manual_seed(0)
    model = Mlp().double()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    sums = Checksums(model.named_parameters(), Agreement(60.0))
    clean = sums.find()
    if rank == 1:
        _flip(model.head.weight.grad)
    begun = time.perf_counter()
    found["gradient"] = ([str(d) for d in clean], [str(d) for d in sums.find()], time.perf_counter() - begun)
    return found


@pytest.mark.distributed
def test_what_goes_wrong_in_one_rank_is_named_on_all(gloo: Processes, tmp_path: Path) -> None:
    results = gloo.run(RANKS, cases, folder=str(tmp_path))
    first = results[0]
    clean = first["clean"]["losses"]
    for rank, found in enumerate(results):
        assert found["clean"]["losses"] == clean
        assert found["clean"]["said"] == found["tensors"]["said"] == []
        assert found["tensors"]["losses"] == pytest.approx(clean, rel=1e-9)
        assert "is not a number; look at these samples" in found["stop"]["error"]
        assert "the loss of rank " in found["stop"]["error"]
        assert found["flipped"]["losses"] == clean, "gone back to before the flip"
        assert (
            "ranks disagree about the shapes of the samples in step 1: rank 1 has [((2, 32)"
            in found["wider"]["error"]
        ), rank
    for policy in ("skip", "roll-back"):
        (said,) = [text for text in first[policy]["said"] if "not a number" in text]
        assert said.startswith("step ")
        (run,) = first[policy]["skipped"]
        assert run[2] - run[1] == BATCH
        kept = [loss for loss in first[policy]["losses"].values() if math.isfinite(loss)]
        assert len(kept) == STEPS - 1
    assert [first["skip"]["losses"][s] for s in (5, 6)] == pytest.approx(
        [first["roll-back"]["losses"][s] for s in (5, 6)]
    )
    for policy in ("skip", "roll-back"):
        (record,) = read_record(tmp_path / policy / "run")
        (left_out,) = [number for number, loss in first[policy]["losses"].items() if not math.isfinite(loss)]
        assert skipped_steps([record]) == [left_out]
        assert left_out not in [step["step"] for step in record.steps]
    (said,) = [text for text in first["flipped"]["said"] if "differs" in text]
    assert "of rank 2 differs from its other copies; going back" in said
    assert first["islands"]["said"] == [], "replicas that train by themselves are not each other's copies"
    assert len(first["islands"]["losses"]) == STEPS
    (said,) = first["slow"]["said"]
    assert ": rank 2 computes " in said
    assert "longer than its peers, which costs up to" in said
    (record,) = read_record(tmp_path / "slow" / "run")
    assert (record.start["cluster"]["name"], record.start["devices"]) == ("cpu-gloo:1x4", ["cpu-gloo"])
    steps = record.steps
    waits = [median(step["waiting_s"][rank] for step in steps) for rank in range(RANKS)]
    assert waits[2] == min(waits), "the others wait for it"
    events = EventAccumulator(str(tmp_path / "slow" / "run" / "tensorboard")).Reload()
    assert [image.step for image in events.Images("timeline")] == [5]
    before, after, _ = first["gradient"]
    assert before == []
    assert after == ["the gradient head.weight of rank 1 differs from its other copies"]


@settings(max_examples=100)
@given(
    numbers=st.lists(st.floats(width=32), min_size=1, max_size=50), place=st.integers(0, 10**6), bit=st.integers(0, 31),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int8]),
)  # fmt: skip
def test_any_flipped_bit_changes_a_checksum(
    numbers: list[float], place: int, bit: int, dtype: torch.dtype
) -> None:
    tensor = torch.tensor(numbers).nan_to_num(0.0, 1.0, 1.0).clamp(-100, 100).to(dtype)
    before, content = checksum(tensor), tensor.view(torch.uint8)
    content[place % len(content)] ^= 1 << (bit % 8)
    assert checksum(tensor) != before


def test_large_numbers_are_numbers_and_one_that_is_none_is_found() -> None:
    large, model = torch.full((100,), 1e30), torch.nn.Linear(10, 10)
    model.weight.grad, model.bias.grad = large.view(10, 10).clone(), torch.zeros(10)
    assert all_numbers(1.0, model.parameters())
    assert not all_numbers(math.nan, model.parameters())
    for wrong in (math.nan, math.inf, -math.inf):
        model.bias.grad[3] = wrong
        assert not all_numbers(1.0, model.parameters())
        assert culprits(model.named_parameters()) == ["bias"]


def test_who_is_behind_is_named_and_the_process_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ahead, behind = StatusFile(tmp_path, 0), StatusFile(tmp_path, 1)
    assert verdict(read_statuses(tmp_path)) is None
    for status, actions in ((ahead, ["F0", "B0", "REDUCE_GRAD"]), (behind, ["F0"])):
        status.begin(7)
        for action in actions:
            status.at(action, 2)
    ended: list[int] = []
    deadline = Deadline(tmp_path, 0, ahead, end=ended.append)
    deadline.begin(30.0)
    deadline.over()
    deadline.begin(0.3)
    time.sleep(1.0)
    assert ended == [1]
    said = capsys.readouterr().err
    assert (
        "error: no step in 0 s: rank 1 has not come further than step 7, stage 2, F0; the run goes on" in said
    )
    behind.failed("ValueError: no such token")
    deadline.begin(1.4, Until.NO_ACTION)
    for action in range(20):  # a long step whose actions go on is none that hangs, whichever rank they are of
        time.sleep(0.1)
        behind.at(f"F{action}", 2)
    assert ended == [1]
    until = time.monotonic() + 120
    while len(ended) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    assert ended == [1, 1]
    assert "error: no action in 1 s: rank 1 failed in step 7" in capsys.readouterr().err
    broken = str(deadline.broken(RuntimeError("Connection closed by peer")))
    assert broken.startswith("rank 1 failed in step 7, stage 2, F19: ValueError: no such token")
    for each in (deadline, ahead, behind):
        each.close()


def test_who_gave_up_because_of_others_is_not_to_blame(tmp_path: Path) -> None:
    files = [StatusFile(tmp_path, rank) for rank in range(4)]
    files[2].gives_up("rank 3 has not come further than step 7, stage 0, F0")
    statuses = read_statuses(tmp_path)
    for file in files:
        file.close()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    gave_up = replace(statuses[2], pid=gone.pid)
    assert not gave_up.alive
    reachable = [replace(status, address="") for status in statuses[:2]]
    assert verdict([*reachable, gave_up], 0) == gave_up.problem
    dead = replace(statuses[3], pid=gone.pid, step=7, action="F0")
    said = verdict([*reachable, gave_up, dead], 0)
    assert said is not None
    assert said.startswith("rank 3 (process ")
    assert "rank 2" not in said
    # its port is closed, its host answers: the link is not down
    assert verdict([*reachable, replace(gave_up, problem="")], 0) is None
