"""Draws what one device trains: a model of any family, and a complete strategy that the runtime runs there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.costmodel.graph_json import graph_from_json
from autoparallel.planner.score import score
from autoparallel.planner.strategy.file import strategy_from_constraints, strategy_to_constraints
from autoparallel.planner.strategy.stacks import OWN_STACK
from autoparallel.planner.strategy.types import Batch, Execution, Offload, Pipeline, Recompute, Strategy
from autoparallel.profiles import Cluster, load_cluster
from autoparallel.runtime.limits import refuser
from benchmarks.random_problems.capture import capture_settings
from benchmarks.random_problems.families import draw_model

DRAWN_FOR = "h100-sxm:1x1"
MEMORY_BYTES = 66e9  # predicted at most
LEAST_S, MOST_S = 0.015, 2.0  # of a predicted step
MOST_OF_FAMILY = 0.15  # of all cases
# (weight, settings): 16-bit training with and without a float32 copy, mixed precision, float32.
DTYPES: tuple[tuple[int, dict[str, Any]], ...] = (
    (4, {"dtype": "bf16", "param_dtype": "bf16", "master_weights": False, "grad_dtype": "bf16"}),
    (3, {"dtype": "bf16", "param_dtype": "fp32", "master_weights": False, "grad_dtype": "fp32"}),
    (2, {"dtype": "bf16", "param_dtype": "bf16", "master_weights": True, "grad_dtype": "fp32"}),
    (1, {"dtype": "fp32", "param_dtype": "fp32", "master_weights": False, "grad_dtype": "fp32"}),
    (2, {"dtype": "tf32", "param_dtype": "fp32", "master_weights": False, "grad_dtype": "fp32"}),
)
OPTIMIZERS = ("adamw", "adamw", "adamw", "adam", "sgd-momentum")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnCase:
    """One training step: a model (as `benchmarks.random_problems.families` says it) and a strategy."""

    id: str
    told: str
    settings: dict[str, Any]
    seq_len: int | None
    strategy: Strategy
    predicted_s: float
    predicted_bytes: float


def draw_cases(seed: int, count: int) -> Iterator[tuple[DrawnCase, str]]:
    """So many cases, each with the JSON text of its graph; models that no drawn strategy suits are left out."""
    cluster, number, families = load_cluster(DRAWN_FOR), 0, Counter[str]()
    for index in range(10 * count):
        if number == count:
            return
        rng = Random(f"{seed}:{index}")
        model = draw_model(rng, 1, MEMORY_BYTES)
        if families[model.family] >= MOST_OF_FAMILY * count:
            continue
        text = capture_settings(model.settings, model.seq_len)
        found = drawn(rng, graph_from_json(text), cluster)
        if found is None:
            continue
        strategy, seconds, peak = found
        case = DrawnCase(
            id=f"{seed}-{number:02}", told=model.told, settings=model.settings, seq_len=model.seq_len, strategy=strategy,
            predicted_s=seconds, predicted_bytes=peak,
        )  # fmt: skip
        number, families[model.family] = number + 1, families[model.family] + 1
        yield case, text


def drawn(rng: Random, graph: ModelGraph, cluster: Cluster) -> tuple[Strategy, float, float] | None:
    """A strategy that runs and is predicted to fit, with its seconds and bytes; None where many draws gave none."""
    refused = refuser(graph, cluster)
    for _ in range(60):
        strategy = _strategy(rng, graph)
        if refused(strategy) is not None:
            continue
        found = score(graph, cluster, strategy)
        if found.peak_bytes <= MEMORY_BYTES and LEAST_S <= found.step_time_s <= MOST_S:
            return strategy, found.step_time_s, found.peak_bytes
    return None


def _strategy(rng: Random, graph: ModelGraph) -> Strategy:
    micro, count = 2 ** rng.randint(0, 9), rng.choice((1, 1, 1, 2, 4))
    blocks = len(graph.repeated_positions)
    dtypes = rng.choices([each for _, each in DTYPES], [weight for weight, _ in DTYPES])[0]
    mode = rng.choice(("none", "none", "none", "selective", "full"))
    partly = blocks > 1 and mode != "full" and rng.random() < 0.2
    offload = rng.choice(
        (
            *(Offload(),) * 6,
            Offload(optimizer=1.0),
            Offload(optimizer=0.5),
            Offload(activations=1.0),
            Offload(activations=0.5),
        )
    )
    return Strategy(
        batch=Batch(global_=micro * count, micro=micro),
        pipeline=Pipeline(stage_blocks=(blocks,) if blocks else ()),
        recompute=Recompute(mode=mode, per_stage=(rng.randint(1, blocks - 1),) if partly else ()),
        offload=offload,
        execution=Execution(
            stack=OWN_STACK,
            dtensor=True,
            fsdp2=True,
            kernels=rng.choice(("eager",) * 5 + ("compiled",)),
            optimizer=rng.choice(OPTIMIZERS),
            dropout=graph.dropout,
            **dtypes,
        ),
    )


def write_cases(folder: Path, cases: Iterator[tuple[DrawnCase, str]]) -> None:
    """`cases.json`, and the graph of each case."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    for case, graph in cases:
        (folder / f"{case.id}.graph.json").write_text(graph, encoding="utf-8")
        listed.append(
            {
                "id": case.id, "told": case.told, "settings": case.settings, "seq_len": case.seq_len,
                "strategy": strategy_to_constraints(case.strategy), "predicted_s": case.predicted_s,
                "predicted_bytes": case.predicted_bytes,
            }
        )  # fmt: skip
        (folder / "cases.json").write_text(json.dumps(listed, indent=1), encoding="utf-8")


def read_cases(folder: Path) -> list[DrawnCase]:
    """Inverse of `write_cases`."""
    listed = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    return [_case_of(row) for row in listed]


def _case_of(row: dict[str, Any]) -> DrawnCase:
    """A row of `cases.json`; JSON has lists where strategies have tuples."""
    constraints = {
        key: tuple(value) if isinstance(value, list) else value for key, value in row["strategy"].items()
    }
    return DrawnCase(**{**row, "strategy": strategy_from_constraints(constraints, name=row["id"])})


def graph_of(folder: Path, case: DrawnCase) -> ModelGraph:
    """The graph of a case."""
    return graph_from_json((folder / f"{case.id}.graph.json").read_text(encoding="utf-8"))
