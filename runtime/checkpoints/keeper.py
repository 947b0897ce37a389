"""`Checkpoints`: the state of a run, kept beside training and found again under any strategy and number of ranks.

    checkpoints = Checkpoints("run", every=100, keep=3, identity={"model": model_identity(module)})
    restored = checkpoints.load({"model": model, "optimizer": optimizer})     # None: nothing there yet
    for step in …:
        …
        if checkpoints.due(step):
            checkpoints.save(step, {"model": model, "optimizer": optimizer}, extra={"ledger": ledger.state()})
    checkpoints.finish()

Method: a save copies this rank's share to the host (that is all that training waits for); a thread writes it aside, with a
checksum. Once every rank has written, rank 0 adds the manifest and renames the folder: a checkpoint is there whole or not at
all. What the disk does not take ends in a warning, on every rank, and training goes on with the last good one kept. The
threads agree over a process group of their own. A load checks all checksums first (each rank a part of the files); what is
damaged is named, moved out of the way, and the one before is taken.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load

from autoparallel.errors import UserError
from autoparallel.runtime.checkpoints.folder import RunFolder, sync
from autoparallel.runtime.checkpoints.manifest import (
    NAME,
    SCHEMA,
    CheckpointDamaged,
    as_json,
    check_identity,
    decoded,
    encoded,
    parsed,
    read_text,
    text_of,
)
from autoparallel.runtime.checkpoints.neighbours import Neighbours, memory_root
from autoparallel.runtime.checkpoints.nests import leaves_of, put_back, states_of, states_to_load
from autoparallel.runtime.checkpoints.results import Restored, Timing
from autoparallel.runtime.checkpoints.shares import (
    ShareFile,
    ShareReader,
    Written,
    check_file,
    described_tensors,
)
from autoparallel.runtime.ranks.agreement import Agreement

# How long the threads of a save wait for each other, seconds. Kind: choice; the slowest disk of the run decides.
TIMEOUT_S = 1800.0


class Checkpoints:
    """See the module's docstring. Collective in `save`, `load` and `finish`: all ranks call them alike."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int | None = None,
        every_s: float | None = None,
        keep: int = 3,
        identity: Mapping[str, str] | None = None,
        allow_pickle: bool = False,
        asynchronous: bool = True,
        timeout_s: float = TIMEOUT_S,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`every` steps, or `every_s` seconds, a checkpoint is `due`; the last `keep` are kept.

        `identity` are hashes that must be equal at the next start. `say` gets what a person should read (default:
        `warnings.warn`). Raises UserError, on every rank, for a folder that cannot be written or that another run holds.
        """
        if keep < 1 or (every is not None and every < 1) or (every_s is not None and every_s <= 0):
            raise UserError("Checkpoints takes keep and every of at least 1, and every_s above 0")
        self.folder, self.every, self.every_s, self._keep = RunFolder(folder), every, every_s, keep
        self._identity, self._allow_pickle, self._asynchronous = (
            dict(identity or {}),
            allow_pickle,
            asynchronous,
        )
        self._say = say or (lambda text: warnings.warn(text, stacklevel=3))
        self._timeout_s = timeout_s
        self._all, self._threads = Agreement(timeout_s), Agreement(timeout_s)
        self._rank, self._ranks = self._all.rank, self._all.ranks
        self._all.alike(self.folder.open if self._rank == 0 else None)
        self.timing = Timing()
        self.last_good: int | None = next(iter(self.folder.steps()), None)
        self._saved_at = time.monotonic()
        self._saving: threading.Thread | None = None
        self._outcome: list[str] = []
        self._parted = False  # the threads did not hear of each other: their group is of no use any more
        self._planned: _Planned | None = None
        self._near: Neighbours | None = None

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be saved after `step` steps. Of `every_s`, rank 0's clock decides, for all."""
        if self.every is not None and step % self.every == 0:
            return True
        if self.every_s is None:
            return False
        return bool(self._all.from_first(time.monotonic() - self._saved_at >= self.every_s))

    def save(self, step: int, state: Mapping[str, Any], *, extra: Mapping[str, Any] | None = None) -> None:
        """Keep `state` (by name: tensors, or what has `state_dict` and `load_state_dict`) after `step` steps.

        Returns once it is copied (with `asynchronous`; waits for the save before, if that is still being written).
        `extra` is JSON that `load` hands back: rank 0's is kept. Raises UserError for what JSON does not hold, and for
        nothing that a disk does.
        """
        begun = time.monotonic()
        self.finish()
        if self._all.most(float(self._parted))[0]:
            self._parted, self._threads = False, Agreement(self._timeout_s)
        tensors, values = leaves_of(states_of(state))
        found: dict[str, Any] = {}
        self._all.alike(lambda: found.update(self._encoded(values, extra or {})))
        planned = self._plan(tensors)
        planned.file.take(planned.planner)
        self._saved_at = copied = time.monotonic()
        self.timing.last_copy_s = copied - begun
        work = threading.Thread(
            target=self._write, args=(step, planned, found["values"], found["extra"], begun), daemon=True
        )
        self._saving = work
        work.start()
        if not self._asynchronous:
            self.finish()
        self.timing.waited_s += time.monotonic() - begun

    def hold_copies(self, memory: str | os.PathLike[str] | None = None) -> int:
        """From now on `copy` keeps copies in memory, in a folder under `memory` (a tmpfs on every node; default: /dev/shm), and
        `load` looks there first. Collective. The number of nodes that hold them; on one they outlive its processes alone."""
        root = self._all.decided(lambda: memory_root(self.folder.path, None).name)
        self._near = Neighbours(Path(memory or "/dev/shm") / root, self._all)
        return self._near.nodes

    def copy(self, step: int, state: Mapping[str, Any], *, extra: Mapping[str, Any] | None = None) -> None:
        """Keep `state` after `step` steps in this node's memory and in a neighbour's; done when it returns.

        Raises UserError, on every rank, where memory does not take it.
        """
        assert self._near is not None, "hold_copies comes first"
        begun = time.monotonic()
        tensors, values = leaves_of(states_of(state))
        found: dict[str, Any] = {}
        self._all.alike(lambda: found.update(self._encoded(values, extra or {})))
        planned = self._plan(tensors)
        manifest = self._manifest(step, planned, self._all.from_first(found["extra"]))
        self._near.save(manifest, planned.file, planned.planner, found["values"])
        self.timing.last_neighbour_s = time.monotonic() - begun

    def forget_copies(self) -> None:
        """Remove the copies in memory where the disk has as late a state."""
        if self._near is not None and self.last_good is not None and self.last_good >= self._near.step:
            self._near.forget()

    def finish(self) -> None:
        """Wait for the save that is being written, if there is one, and tell what became of it."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None
        self._tell()

    def poll(self) -> None:
        """Tell what became of a save that has ended meanwhile; costs nothing."""
        if self._saving is not None and not self._saving.is_alive():
            self.finish()

    def close(self) -> None:
        """`finish`, and let the folder's lock go, and copies in memory where the disk has as late a state."""
        self.finish()
        self.forget_copies()
        self.folder.close()

    def load(
        self, state: Mapping[str, Any], *, step: int | None = None, from_memory: bool = True
    ) -> Restored | None:
        """Load the last checkpoint that is whole (or that of `step`) into `state`; None where there is none. Copies in memory
        are taken where they are later (unless not `from_memory`: then they are forgotten). An item with
        `state_to_load(names)` says what is read for it of a checkpoint that has these names.

        Raises UserError, on every rank, where there are checkpoints and none can be read, for a newer version's, and
        for another model's or dataset's.
        """
        self.finish()
        steps = self._all.from_first(self.folder.steps())
        wanted = [step] if step is not None else steps
        if self._near is not None and not from_memory:
            self._near.forget()
        elif self._near is not None and step is None:
            near = self._near.find(steps[0] if steps else -1, self._identity)
            if near is not None:
                path, manifest, reader = near
                self._fill(state, path, manifest, reader)
                return Restored(step=manifest["step"], extra=manifest["extra"], in_memory=True)
        refused: list[str] = []
        for candidate in wanted:
            path = self.folder.at(candidate)
            manifest, problem = self._read(path)
            if problem is None:
                self._fill(state, path, manifest)
                self.last_good = candidate
                return Restored(step=candidate, extra=manifest["extra"], refused=tuple(refused))
            refused.append(f"step {candidate}: {problem}")
            if self._rank == 0:
                self.folder.refuse(candidate)
                self._say(f"checkpoint refused: {problem}; the one before is taken")
        if refused:
            raise UserError(
                f'none of the checkpoints in "{self.folder.path}" can be read: {"; ".join(refused)}. They are kept there '
                'as "refused-…"; give another folder to begin anew'
            )
        return None

    # What follows runs on all ranks alike, except `_write`'s thread.

    def _read(self, path: Path) -> tuple[dict[str, Any], str | None]:
        """The manifest of the checkpoint in `path`, and what is wrong with it."""

        def first() -> tuple[dict[str, Any], str | None]:
            try:
                manifest = parsed(read_text(path), path)
            except CheckpointDamaged as error:
                return {}, str(error)
            check_identity(manifest, self._identity, path)
            return manifest, None

        manifest, problem = self._all.decided(first)
        if problem is not None:
            return {}, problem
        names = sorted(manifest["files"])[self._rank :: self._ranks]
        own = [p for name in names if (p := check_file(path / name, manifest["files"][name])) is not None]
        problems = [p for found in self._all.gathered(own) for p in found]
        return manifest, f"{path}: {'; '.join(problems)}" if problems else None

    def _fill(
        self,
        state: Mapping[str, Any],
        path: Path,
        manifest: Mapping[str, Any],
        reader: ShareReader | None = None,
    ) -> None:
        states = states_to_load(state, [*manifest["tensors"], *manifest["values"]])
        tensors, values = leaves_of(states)

        def check() -> None:
            missing = [n for n in tensors if n not in manifest["tensors"]]
            missing += [n for n in values if n not in manifest["values"]]
            other = [
                f"{name} is {list(tensor.shape)} here and {said['size']} there"
                for name, tensor in tensors.items()
                if (said := manifest["tensors"].get(name)) and list(tensor.shape) != said["size"]
            ]
            if missing or other:
                shown = [*other, *(f"nothing for {name}" for name in missing)]
                raise UserError(
                    f"{path} does not fit: {'; '.join(shown[:3])}{' and others' * (len(shown) > 3)}; load it into the "
                    "model and the class of optimizer that it was saved from"
                )

        self._all.alike(check)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(
                tensors,
                storage_reader=reader or ShareReader(path, manifest["tensors"]),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._all.group,
                no_dist=self._ranks == 1,
            )
        loaded = {
            name: decoded(manifest["values"][name], name=name, allow_pickle=self._allow_pickle)
            for name in values
        }
        put_back(state, states, {**tensors, **loaded})

    def _encoded(self, values: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
        allow = self._allow_pickle
        coded = {name: encoded(v, name=name, allow_pickle=allow) for name, v in values.items()}
        return {"values": coded, "extra": as_json(extra, name="extra=")}

    def _plan(self, tensors: dict[str, Tensor]) -> _Planned:
        """Who writes what. Decided once for all saves of tensors of the same names and shapes."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors, is_coordinator=self._rank == 0)
        local = planner.create_local_plan()
        shapes = [(i.index.fqn, i.tensor_data) for i in local.items]
        same = self._planned is not None and shapes == self._planned.shapes
        if self._planned is not None and all(self._all.gathered(same)):
            self._planned.planner = planner
            planner.finish_plan(self._planned.plan)
            return self._planned
        plans, metadata = planner.create_global_plan(self._all.gathered(local))
        plan = planner.finish_plan(plans[self._rank])
        file = ShareFile(f"rank-{self._rank:05d}.safetensors", plan)
        held = self._all.gathered((file.name, file.chunks()))
        wanted = self._rank == 0 or self._near is not None
        described = described_tensors(metadata, held) if wanted else {}
        self._planned = _Planned(shapes=shapes, plan=plan, planner=planner, file=file, tensors=described)
        return self._planned

    def _write(
        self, step: int, planned: _Planned, values: dict[str, Any], extra: dict[str, Any], begun: float
    ) -> None:
        """Write this rank's file; on rank 0, commit once all have. In a thread: only the thread's group is used."""
        problem = None
        try:
            written = planned.file.write(self.folder.writing(step))
            every: list[tuple[Written, dict[str, Any]]] = self._threads.gathered((written, values))
            problems = [f"rank {rank}: {w.problem}" for rank, (w, _) in enumerate(every) if w.problem]
            if not problems and self._rank == 0:
                try:
                    self._commit(step, planned, every, extra)
                except Exception as error:  # whatever it is, the others wait to hear of it
                    problems = [f"rank 0: {error}"]
            if problems and self._rank == 0:
                self.folder.abandon(step)
            problems = self._threads.gathered(problems)[0]
            problem = "; ".join(problems)
            self.timing.bytes_ = written.bytes_
        except Exception as error:  # a peer that is gone, most of all: training meets that by itself
            self._parted = True
            problem = f"rank {self._rank} did not hear of the others: {error}"
        if problem:
            last = (
                f"the last good one is of step {self.last_good}"
                if self.last_good is not None
                else "there is none yet"
            )
            self._outcome.append(
                f"checkpoint of step {step} was not kept ({problem}); training goes on; {last}"
            )
        else:
            self.last_good = step
        self.timing.last_save_s = time.monotonic() - begun

    def _commit(
        self,
        step: int,
        planned: _Planned,
        every: list[tuple[Written, dict[str, Any]]],
        extra: dict[str, Any],
    ) -> None:
        self.folder.hold()
        folder = self.folder.writing(step)
        manifest = {
            **self._manifest(step, planned, extra),
            "files": {w.file: {"bytes": w.bytes_, "crc32": w.crc32} for w, _ in every},
            "values": {name: value for _, values in every for name, value in values.items()},
        }
        (folder / NAME).write_text(text_of(manifest), encoding="utf-8")
        sync(folder / NAME)
        sync(folder)
        self.folder.commit(step)
        self.folder.retain(self._keep)

    def _manifest(self, step: int, planned: _Planned, extra: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint says of itself, but for its files and values."""
        from autoparallel import __version__

        return {
            "schema": SCHEMA,
            "written_by": f"autoparallel {__version__}, torch {torch.__version__}",
            "written_at": time.time(),
            "step": step,
            "world_size": self._ranks,
            "identity": self._identity,
            "extra": dict(extra),
            "tensors": planned.tensors,
        }

    def _tell(self) -> None:
        while self._outcome:
            text = self._outcome.pop(0)
            if self._rank == 0:
                self._say(text)


@dataclass(slots=True, kw_only=True)
class _Planned:
    """Who writes what."""

    shapes: list[Any]
    plan: SavePlan
    planner: DefaultSavePlanner
    file: ShareFile
    tensors: dict[str, Any] = field(default_factory=dict)
