"""Runs the command line inside the test's process: what it prints, writes and returns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from autoparallel.cli import app
from autoparallel.costmodel.graph import ModelGraph
from autoparallel.costmodel.graph_json import graph_to_json

# A whole strategy for four devices and the four blocks of the toy graphs.
COMPLETE: Mapping[str, Mapping[str, Any]] = {
    "batch": {"global": 16, "micro": 2},
    "mesh": {
        "pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "ep": 1,
        "order": ["pp", "dp_replicate", "dp_shard", "cp", "tp"],
    },
    "shard": {"zero": 1, "sequence_parallel": False},
    "pipeline": {"schedule": "1f1b", "virtual_stages": 1, "stage_blocks": [2, 2]},
    "recompute": {"mode": "none", "per_stage": []},
    "offload": {"optimizer": 0.0, "activations": 0.0},
    "grad_sync": {"algorithm": "auto", "bucket_mib": 25.0, "overlap": True, "compression": [], "weights": "none"},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How a command ended."""

    status: int
    out: str
    err: str
    crash: BaseException | None

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(*arguments: str | Path) -> Answer:
    """`autoparallel ARGUMENTS`."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    crash = None if isinstance(result.exception, SystemExit) else result.exception
    return Answer(status=result.exit_code, out=result.stdout, err=result.stderr, crash=crash)


def refused(*arguments: str | Path, words: list[str], status: int = 2) -> str:
    """The message of a command that must end with `status`, say all of `words`, and print nothing else."""
    answer = run(*arguments)
    shown = f"{answer.err}\n{answer.out}\n{answer.crash!r}"
    assert answer.crash is None, shown
    assert answer.status == status, shown
    assert answer.out == "", shown
    assert "Traceback" not in answer.err, shown
    for word in words:
        assert word in " ".join(answer.err.split()), f"{word!r} missing from: {answer.err}"
    return answer.err


def save(graph: ModelGraph, path: Path) -> Path:
    """A graph file."""
    path.write_text(graph_to_json(graph), encoding="utf-8")
    return path


def strategy_toml(changes: Mapping[str, Any] | None = None, *, leave_out: tuple[str, ...] = ()) -> str:
    """The complete strategy as TOML, with dotted keys changed or left out."""
    lines = ["schema = 1"]
    for section, keys in COMPLETE.items():
        lines.append(f"[{section}]")
        for key, value in keys.items():
            dotted = f"{section}.{key}"
            if dotted not in leave_out and section not in leave_out:
                lines.append(f"{key} = {json.dumps((changes or {}).get(dotted, value))}")
    return "\n".join(lines) + "\n"
