"""Copies of every rank's share in the memory of its own node and of a neighbouring one: a node that is lost loses no step.

A copy is a file in memory (tmpfs), so that it outlives the processes that an agent restarts; a node's memory is lost with the
node. Rank i of a node sends its share to rank i of the next node. Two copies are kept in turn: while one is written, the
other is whole. What makes one whole is a manifest with the checksum of every file, on every node; files are checked before
they are used, so that nothing has to be undone after a crash. A rank that needs a file which its node lacks gets it from one
that has it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlanner
from torch.futures import Future

from autoparallel.errors import UserError
from autoparallel.runtime.checkpoints.manifest import NAME, CheckpointDamaged, parsed, read_text, text_of
from autoparallel.runtime.checkpoints.shares import ShareFile, ShareReader, check_file
from autoparallel.runtime.ranks.agreement import Agreement

SLOTS = ("a", "b")
# Bytes that go in one message. Kind: choice.
_MESSAGE_BYTES = 64 * 2**20


def memory_root(folder: Path, given: str | os.PathLike[str] | None) -> Path:
    """Where a run in `folder` keeps its copies; for one process of the run, which makes the run's token."""
    token = folder / "memory-token"  # with the folder goes the claim to what is in memory
    if not token.exists():
        aside = token.with_name(f".{token.name}")
        aside.write_text(f"{os.getuid()}-{time.time_ns():x}", encoding="utf-8")
        aside.replace(token)
    return Path(given or "/dev/shm") / f"autoparallel-{token.read_text(encoding='utf-8')}"


@dataclass(slots=True, kw_only=True)
class _Slot:
    """What this rank has mapped of a slot: its own file and those that are sent to it, by name."""

    file: ShareFile
    own: Tensor
    from_others: dict[int, Tensor] = field(default_factory=dict)


class Neighbours:
    """The copies of one run under `root`, a folder in each node's memory. Collective: all ranks call alike."""

    def __init__(self, root: Path, everyone: Agreement) -> None:
        self.root, self._all = root, everyone
        places = everyone.gathered((socket.gethostname(), str(root)))
        nodes = list(dict.fromkeys(places))
        ranks = [[r for r, place in enumerate(places) if place == node] for node in nodes]
        self._node_of = [nodes.index(place) for place in places]
        self._leaders, own = [of[0] for of in ranks], self._node_of[everyone.rank]
        self._local = ranks[own]
        # Rank i of a node sends to rank i of the next.
        self._to = [
            ranks[(node + 1) % len(nodes)][ranks[node].index(r) % len(ranks[(node + 1) % len(nodes)])]
            for r, node in enumerate(self._node_of)
        ]
        self._alone = len(nodes) == 1
        self._slots: dict[str, _Slot] = {}
        self._turn, self.step = 0, -1  # of the last copy

    @property
    def nodes(self) -> int:
        """Nodes that hold copies."""
        return len(self._leaders)

    @property
    def _leads(self) -> bool:
        return self._all.rank == self._local[0]

    def save(
        self, manifest: Mapping[str, Any], file: ShareFile, planner: SavePlanner, values: Mapping[str, Any]
    ) -> None:
        """Keep a copy of what `file` plans, here and on the next node; `manifest` lacks files and values. Raises UserError,
        on every rank, where a node's memory does not take it."""
        name, self._turn = SLOTS[self._turn], 1 - self._turn
        slot = self._slots.get(name)
        if not all(self._all.gathered(slot is not None and slot.file is file)):
            slot = self._made(name, file)
        assert slot is not None
        file.take_into(planner, slot.own)
        crc = zlib.crc32(slot.own.numpy().data)
        rows = self._all.gathered((file.name, slot.own.numel(), crc, dict(values)))
        self._send(slot)
        if self._leads:
            files = {of: {"bytes": size, "crc32": code} for of, size, code, _ in rows}
            every = {key: value for *_, own in rows for key, value in own.items()}
            text = text_of({**manifest, "files": files, "values": every, "slot": name})
            aside = self.root / name / f".{NAME}"
            aside.write_text(text, encoding="utf-8")
            aside.replace(self.root / name / NAME)
        self.step = manifest["step"]

    def _made(self, name: str, file: ShareFile) -> _Slot:
        """The slot, emptied, with room for this rank's file and for those that it is sent."""
        folder = self.root / name

        def empty() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise UserError(f"{folder}: no copies in memory ({error.strerror})") from None

        self._all.alike(empty if self._leads else None)
        sizes = self._all.gathered((file.name, file.bytes_))
        made: list[_Slot] = []

        def room() -> None:
            try:
                slot = _Slot(file=file, own=_mapped(folder / file.name, file.bytes_))
                for rank, (of, size) in enumerate(sizes):
                    if self._to[rank] == self._all.rank and not self._alone:
                        slot.from_others[rank] = _mapped(folder / of, size)
            except OSError as error:
                raise UserError(f"{folder}: no room for copies in memory ({error.strerror})") from None
            made.append(slot)

        self._all.alike(room)
        self._slots[name] = made[0]
        return made[0]

    def _send(self, slot: _Slot) -> None:
        if self._alone:
            return
        group, works = self._all.group, []
        for rank, room in slot.from_others.items():
            works += [dist.irecv(piece, rank, group=group) for piece in room.split(_MESSAGE_BYTES)]
        works += [
            dist.isend(piece, self._to[self._all.rank], group=group)
            for piece in slot.own.split(_MESSAGE_BYTES)
        ]
        for work in works:
            assert work is not None
            work.wait()

    def find(self, after: int, identity: Mapping[str, str]) -> tuple[Path, dict[str, Any], NearReader] | None:
        """The latest copy after step `after` of which the nodes that are here have every file."""
        for manifest in self._manifests(after, identity):
            folder, files = self.root / manifest["slot"], manifest["files"]
            share = sorted(files)[self._local.index(self._all.rank) :: len(self._local)]
            good = [name for name in share if check_file(folder / name, files[name]) is None]
            holders: dict[str, list[int]] = {}
            for rank, names in enumerate(self._all.gathered(good)):
                for name in names:
                    holders.setdefault(name, []).append(rank)
            if holders.keys() == files.keys():
                self._turn = 1 - SLOTS.index(manifest["slot"])  # the other is written next
                return folder, manifest, NearReader(folder, manifest, self._all, self._node_of, holders)
        return None

    def _manifests(self, after: int, identity: Mapping[str, str]) -> list[dict[str, Any]]:
        """What any node says that it has, the latest first; the same on all ranks."""
        texts = []
        for name in SLOTS if self._leads else ():
            with contextlib.suppress(CheckpointDamaged, UserError):
                text = read_text(self.root / name)
                parsed(text, self.root / name)
                texts.append(text)
        found = {}
        for text in (t for of in self._all.gathered(texts) for t in of):
            manifest = json.loads(text)
            if manifest["step"] > after and all(
                manifest["identity"].get(k, v) == v for k, v in identity.items()
            ):
                found[manifest["step"]] = manifest
        return [found[step] for step in sorted(found, reverse=True)]

    def forget(self) -> None:
        """Remove the copies."""
        self._slots.clear()
        if self._leads:
            shutil.rmtree(self.root, ignore_errors=True)


def _mapped(path: Path, size: int) -> Tensor:
    """A file of so many bytes as a tensor."""
    with path.open("wb") as file:
        os.posix_fallocate(
            file.fileno(), 0, max(size, 1)
        )  # memory that is not there is told here, not by a signal
    return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r+", shape=(size,)))


class NearReader(ShareReader):
    """Reads a copy; files that its node lacks are asked of a rank that has them. `holders`: ranks that have a file."""

    def __init__(
        self, folder: Path, manifest: Mapping[str, Any], everyone: Agreement, node_of: Sequence[int],
        holders: Mapping[str, Sequence[int]],
    ) -> None:  # fmt: skip
        super().__init__(folder, manifest["tensors"])
        self._manifest, self._all, self._node_of, self._holders = manifest, everyone, node_of, holders

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        own = {self.file_of(item.storage_index) for item in plan.items}
        here = self._node_of[self._all.rank]
        lacking = sorted(n for n in own if all(self._node_of[r] != here for r in self._holders[n]))
        wanted: dict[tuple[str, int], int] = {}  # by file and node, the first rank that asks
        for rank, names in enumerate(self._all.gathered(lacking)):
            for name in names:
                wanted.setdefault((name, self._node_of[rank]), rank)
        for (name, _), rank in sorted(wanted.items()):
            self._move(name, self._holders[name][0], rank)
        self._all.gathered(None)  # all files are there
        return super().read_data(plan, planner)

    def _move(self, name: str, source: int, target: int) -> None:
        if self._all.rank not in (source, target):
            return
        size = self._manifest["files"][name]["bytes"]
        path = self._folder / name
        if self._all.rank == source:
            content = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c", shape=(size,)))
            for piece in content.split(_MESSAGE_BYTES):
                dist.send(piece, target, group=self._all.group)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        room = _mapped(path, size)
        for piece in room.split(_MESSAGE_BYTES):
            dist.recv(piece, source, group=self._all.group)
