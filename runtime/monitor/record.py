"""The record of a run: `record.jsonl` in its folder.

{"event": "start", "step", "world", "strategy", "graph" (files), "shape" (NODESxPER_NODE),
 "cluster" (as `profiles/record.py` has it), "devices" (their names), both where a cluster is known,
 "predicted": {"step_time_s", "breakdown_s", "timeline", "collectives": as of a step}, "stages": [stage by rank], "time"}
{"event": "step", "step", "time" (s, of its end), "loss", "seconds", "breakdown_s": {kind: of the slowest}, "computing_s": [by rank],
 "communicating_s": [by rank], "waiting_s": [by rank], "memory_bytes": [by rank], "efficiency", "skipped_share",
 "collectives": [{"op", "level" (outermost that they cross), "count", "bytes" (sent by a rank), "seconds", "bytes_per_s" (None where nobody
 knows), "priced_bytes_per_s"} …], of the rank that spends longest on them; left out where they were not counted}
{"event": "skipped", "step", "time"}, a step whose batch was left out: nothing was learnt of it, and it has no times
{"event": "timeline", "step", "ranks": [[[action, stage, begin, end] …] by pipeline rank: of its slowest rank]}, seconds
{"event": "links", "step", "passed": [[rank, rank, bytes, seconds] …]}, messages that neighbours sent each other
{"event": "said", "step", "text"}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoparallel.errors import UserError

NAME = "record.jsonl"


@dataclass(slots=True, kw_only=True)
class Record:
    """One start of a run: how it began, its steps, and what people were told."""

    start: Mapping[str, Any]
    steps: list[Mapping[str, Any]] = field(default_factory=list)
    said: list[Mapping[str, Any]] = field(default_factory=list)
    timelines: list[Mapping[str, Any]] = field(default_factory=list)
    links: list[Mapping[str, Any]] = field(default_factory=list)
    skipped: list[Mapping[str, Any]] = field(default_factory=list)


class Recorder:
    """Adds lines to the record in `folder`; a disk that takes no more is told once, and the run goes on."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self.problem: str | None = None

    def add(self, event: str, **content: Any) -> None:
        """Add one line; one that a process was killed in, or that a full disk cut off, is ended first."""
        line = json.dumps({"event": event, **content}).encode() + b"\n"
        try:
            with self._path.open("a+b") as file:
                if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                    line = b"\n" + line
                file.write(line)
        except OSError as error:
            self.problem = self.problem or f"{self._path}: {error.strerror}"


def read_record(folder: Path) -> list[Record]:
    """Every start that is recorded so far, at least one. Raises UserError where there is none; a line that is being written
    is left out."""
    path = folder / NAME
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}): give the folder of a run that Trainer records"
        ) from None
    found: list[Record] = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry["event"] == "start":
            found.append(Record(start=entry))
        elif found:
            _add(found[-1], entry)
    if not found:
        raise UserError(f"{path}: no run has started here yet")
    return found


def _add(record: Record, entry: Mapping[str, Any]) -> None:
    """Put a line where it belongs; one of a kind that a later version writes is left out."""
    lists = {
        "step": record.steps, "said": record.said, "timeline": record.timelines, "links": record.links,
        "skipped": record.skipped,
    }  # fmt: skip
    if entry["event"] in lists:
        lists[entry["event"]].append(entry)


def skipped_steps(records: Sequence[Record]) -> list[int]:
    """The steps whose batch was left out, in order; of those that a later start does again the later one counts."""
    found: set[int] = set()
    for record in records:
        kept = {step for step in found if step <= record.start["step"]}
        found = kept | {entry["step"] for entry in record.skipped}
    return sorted(found)


def skipped_words(records: Sequence[Record]) -> str:
    """`3 batches were left out, the last one in step 12`; empty where none was."""
    steps = skipped_steps(records)
    if not steps:
        return ""
    if len(steps) == 1:
        return f"1 batch was left out, in step {steps[0]}"
    return f"{len(steps)} batches were left out, the last one in step {steps[-1]}"
