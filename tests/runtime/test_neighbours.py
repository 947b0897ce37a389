"""Copies in memory: any one node may be lost, and any file of the last copy damaged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from autoparallel.errors import UserError
from autoparallel.runtime.checkpoints.keeper import Checkpoints
from tests.runtime.harness import Processes
from tests.runtime.holder import Holder

WHOLE = torch.arange(36, dtype=torch.float64).view(6, 6)


def _state(value: float, dim: int) -> Holder:
    """A matrix sharded over all ranks along `dim`, a replicated one, and a number."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return Holder(
        {
            "sharded": distribute_tensor(WHOLE + value, mesh, [Shard(dim)]),
            "whole": distribute_tensor(WHOLE * value, mesh, [Replicate()]),
            "lr": value,
        }
    )


def _values(held: Holder) -> tuple[Tensor, Tensor, float]:
    state = held.state
    return state["sharded"].full_tensor(), state["whole"].full_tensor(), state["lr"]


def _again(folder: str, memory: str, dim: int, **options: Any) -> tuple[Any, Holder, Checkpoints]:
    """What processes that begin anew find, sharded along `dim`."""
    kept, held = Checkpoints(folder, say=lambda _: None, **options), _state(0.0, dim)
    kept.hold_copies(memory)
    return kept.load({"all": held}), held, kept


def copying(rank: int, world_size: int, folder: str) -> list[str]:
    """Four steps are copied, the second is on the disk, too; then nodes are lost, and files damaged."""
    node = rank // (world_size // 2)
    memory = f"{folder}/node-{node}"
    kept = Checkpoints(folder, say=lambda _: None)
    found = [f"{kept.hold_copies(memory)} nodes"]
    for step in range(1, 5):
        held = _state(float(step), 0)
        kept.copy(step, {"all": held}, extra={"position": step})
        if step == 2:
            kept.save(step, {"all": held}, extra={"position": step})
    kept.finish()
    kept.folder.close()
    roots = sorted(Path(folder).glob("node-*/autoparallel-*"))

    def expect(what: str, step: int, dim: int, *, near: bool) -> None:
        dist.barrier()
        restored, held, again = _again(folder, memory, dim)
        sharded, whole, lr = _values(held)
        good = restored is not None and restored.step == step == restored.extra["position"]
        good = good and torch.equal(sharded, WHOLE + step) and torch.equal(whole, WHOLE * step) and lr == step
        found.append(f"{what}: {'good' if good and restored.in_memory == near else restored}")
        again.folder.close()
        dist.barrier()

    def act(on: int, change: Any) -> None:
        dist.barrier()
        if rank == on:
            change()

    expect("nothing lost", 4, 0, near=True)
    expect("sharded otherwise", 4, 1, near=True)
    for lost in (0, 1):
        backup = Path(folder) / f"backup-{lost}"
        act(0, lambda lost=lost, backup=backup: shutil.move(roots[lost], backup))
        expect(f"node {lost} lost", 4, 0, near=True)
        act(0, lambda lost=lost: shutil.rmtree(roots[lost], ignore_errors=True))
        act(0, lambda lost=lost, backup=backup: shutil.move(backup, roots[lost]))
    last = "b"  # the fourth copy
    name = "rank-00000.safetensors"
    act(0, lambda: (roots[1] / last / name).write_bytes(b"torn"))
    expect("a file damaged on one node", 4, 0, near=True)
    act(0, lambda: [(root / last / name).write_bytes(b"torn") for root in roots])
    expect("a file damaged on both", 3, 0, near=True)
    act(0, lambda: [shutil.rmtree(root) for root in roots])
    expect("both lost", 2, 0, near=False)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 4])
def test_one_node_may_be_lost_and_one_copy_torn(gloo: Processes, tmp_path: Path, world_size: int) -> None:
    for rank, found in enumerate(gloo.run(world_size, copying, folder=str(tmp_path))):
        assert found[0] == "2 nodes"
        assert all(line.endswith(": good") for line in found[1:]), (rank, found)
        assert len(found) == 8


def test_a_process_alone_keeps_a_copy_that_goes_with_the_folder(tmp_path: Path) -> None:
    memory, run = tmp_path / "memory", tmp_path / "run"
    plain = {"weight": torch.ones(3)}
    kept = Checkpoints(run)
    assert kept.hold_copies(memory) == 1
    kept.copy(7, {"all": Holder(plain)}, extra={})
    kept.folder.close()

    def found(folder: Path, **options: Any) -> Any:
        again, held = Checkpoints(folder, **options), Holder({"weight": torch.zeros(3)})
        again.hold_copies(memory)
        try:
            return again.load({"all": held})
        finally:
            again.folder.close()

    assert found(run).step == 7
    assert found(tmp_path / "another") is None
    assert found(run, identity={"model": "another"}).step == 7, "written without one"
    shutil.rmtree(run)
    assert found(run) is None, "whoever removes the folder begins anew"


def test_no_room_is_told(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path / "run")
    (tmp_path / "memory").write_text("a file")
    kept.hold_copies(tmp_path / "memory")
    with pytest.raises(UserError, match="no copies in memory"):
        kept.copy(1, {"all": Holder({"weight": torch.ones(3)})}, extra={})
    kept.close()
