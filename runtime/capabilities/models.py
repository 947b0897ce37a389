"""What a model's own code leaves open: rows about models, beside those about strategies in `table.py`. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.errors import UserError
from autoparallel.planner.strategy.types import Strategy

DIVIDING = (
    "mesh.pp",
    "mesh.tp",
    "mesh.cp",
    "mesh.ep",
    "mesh.dp_shard",
)  # axes of which no rank holds the whole model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """What some models do, `found` in a graph (as a sentence begins; None where it does not), and the strategies beside which that
    `runs`."""

    models: str
    found: Callable[[ModelGraph], str | None]
    runs: Callable[[Strategy], bool]
    where: str  # it runs, in words
    why: str  # else
    instead: str


def _writes(*, from_samples: bool) -> Callable[[ModelGraph], str | None]:
    def found(graph: ModelGraph) -> str | None:
        names = [one.name for one in graph.written if one.from_samples == from_samples]
        if not names:
            return None
        more = f" and {len(names) - 1} other parameters" if len(names) > 1 else ""
        what = " what it makes of its samples" if from_samples else ""
        return f"the forward pass of {graph.name} writes to {names[0]}{more}{what}"

    return found


def _differentiates(graph: ModelGraph) -> str | None:
    return f"the forward pass of {graph.name} takes derivatives of its own" if graph.differentiates else None


def _alone(strategy: Strategy) -> bool:
    return strategy.mesh.devices == 1


def _whole(strategy: Strategy) -> bool:
    return strategy.mesh.devices == strategy.mesh.dp_replicate


_DRAWN = ModelRow(
    models="their forward pass writes to parameters what it makes of its samples",
    found=_writes(from_samples=True), runs=_alone, where="one device", why="each rank would write something else",
    instead=(
        "if layers initialise themselves so from their first batch, call the model once on one, on every rank, before it is planned "
        "and run: all ranks then start from rank 0's numbers"
    ),
)  # fmt: skip
_ONLY_REPLICAS = "set mesh.dp_replicate to the number of devices and the other axes to 1"
ROWS = (
    _DRAWN,
    ModelRow(
        models="their forward pass writes to parameters otherwise", found=_writes(from_samples=False), runs=_whole,
        where="`mesh.dp_replicate` alone", why="a rank that holds a share of what is written to would lose that",
        instead=f"{_ONLY_REPLICAS}, or write to it after the optimizer's step",
    ),
    ModelRow(
        models="their forward pass takes derivatives (forces of an energy, penalties, differential equations)",
        found=_differentiates, runs=lambda s: _whole(s) and (_alone(s) or s.execution.kernels != "compiled"),
        where='`mesh.dp_replicate` alone, `execution.kernels = "eager"`',
        why="FSDP2 frees what it gathered in the backward pass inside, DTensor and compiled blocks have no derivative of theirs",
        instead=f'{_ONLY_REPLICAS}, with kernels = "eager"',
    ),
)  # fmt: skip


def check_devices(graph: ModelGraph, devices: int) -> None:
    """Raises UserError where a model runs on no mesh of so many devices."""
    if devices > 1 and (what := _DRAWN.found(graph)):
        raise UserError(_said(what, _DRAWN))


def model_refusals(graph: ModelGraph, strategy: Strategy) -> Iterator[str]:
    """What a model does that is not run under a strategy, why, and the remedy; nothing where it runs."""
    for row in ROWS:
        if not row.runs(strategy) and (what := row.found(graph)):
            yield _said(what, row)


def check_model(graph: ModelGraph, strategy: Strategy) -> None:
    """Raises UserError with the first of `model_refusals`."""
    for problem in model_refusals(graph, strategy):
        raise UserError(problem)


def model_limits(graph: ModelGraph) -> dict[str, object]:
    """The sizes of the mesh that what a model does asks for, by dotted key."""
    return dict.fromkeys(DIVIDING, 1) if any(row.found(graph) for row in ROWS) else {}


def model_page() -> str:
    """The rows as docs/runtime.md has them."""
    lines = ["| models | run with | else |", "|---|---|---|"]
    lines += [f"| {row.models} | {row.where} | {row.why} |" for row in ROWS]
    return "\n".join(lines) + "\n"


def _said(what: str, row: ModelRow) -> str:
    return f"{what}: {row.why}; {row.instead}"
