"""The graph of a drawn model: captured once, in a process of its own, and kept by a hash of what was drawn."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

from autoparallel.costmodel.graph import SCHEMA
from benchmarks.random_problems.families import Model

ROOT = Path(__file__).resolve().parents[2]
GRAPHS = ROOT / "benchmarks" / ".graphs"
CAPTURE_LIMIT_S = 300.0


class CaptureFailed(RuntimeError):
    """A drawn model that could not be captured; the last lines of what was said."""


def graph_path(model: Model, folder: Path = GRAPHS) -> Path:
    """Where the graph is kept."""
    drawn = json.dumps([SCHEMA, model.settings, model.seq_len], sort_keys=True)
    return folder / f"random-{model.family}-{hashlib.sha256(drawn.encode()).hexdigest()[:16]}.json"


def ensure_graph(model: Model, folder: Path = GRAPHS) -> Path:
    """The file of the graph, captured if it is not there. Raises CaptureFailed."""
    path = graph_path(model, folder)
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    settings, made = path.with_suffix(".settings"), path.with_suffix(".part")
    settings.write_text(json.dumps({"settings": model.settings, "seq_len": model.seq_len}), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.random_problems.capture", str(settings), str(made)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=CAPTURE_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise CaptureFailed(f"not captured within {CAPTURE_LIMIT_S:.0f} s") from None
    finally:
        settings.unlink()
    if done.returncode:
        raise CaptureFailed(" | ".join(done.stderr.strip().splitlines()[-3:]))
    made.rename(path)
    return path
