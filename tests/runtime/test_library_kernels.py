"""Layers that another library has kernels for run whole under tensor and context parallelism: the gradients are those of one process,
and what a dry run holds and sends is what is priced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from autoparallel import auto_parallelize
from autoparallel.dryrun import dry_run_of
from autoparallel.planner.capture import capture
from autoparallel.planner.strategy.types import Batch, Mesh, Pipeline, Strategy
from autoparallel.profiles import load_cluster
from tests.hybrid_models import VOCABULARY, hybrid
from tests.runtime.harness import Processes
from tests.runtime.test_dryrun_own_models import EXECUTION

SAMPLES, MICRO, STEPS, BLOCKS = 4, 2, 32, 4
NAMES = ("qwen3_next", "jamba", "lfm2")
MESHES = {"tp": Mesh(tp=2), "cp": Mesh(cp=2)}


def _strategy(mesh: Mesh) -> Strategy:
    return Strategy(
        batch=Batch(global_=SAMPLES, micro=MICRO), mesh=mesh, pipeline=Pipeline(stage_blocks=(BLOCKS,)),
        execution=EXECUTION,
    )  # fmt: skip


def _model(name: str) -> Any:
    torch.manual_seed(0)
    return hybrid(name, attn_implementation="sdpa")


def _inputs() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (SAMPLES, STEPS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def _in_shares(rank: int, world_size: int) -> None:
    inputs = _inputs()
    for name in NAMES:
        expected = _model(name)
        for at in range(0, SAMPLES, MICRO):
            share = {key: value[at : at + MICRO] for key, value in inputs.items()}
            (expected(**share).loss * MICRO / SAMPLES).backward()
        for kind, mesh in MESHES.items():
            made = auto_parallelize(
                _model(name), inputs, strategy=_strategy(mesh), cluster=f"cpu-gloo:1x{world_size}", cache=None
            )
            made.step(inputs)
            for key, gradient in made.full_gradients().items():
                torch.testing.assert_close(
                    gradient,
                    expected.get_parameter(key).grad,
                    rtol=1e-3,
                    atol=1e-5,
                    msg=lambda told, where=(name, kind, key): f"{where}: {told}",
                )


@pytest.mark.distributed
def test_gradients_are_those_of_one_process(gloo: Processes) -> None:
    gloo.run(2, _in_shares)


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_holds_and_sends_what_is_priced(name: str, kind: str) -> None:
    strategy = _strategy(MESHES[kind])
    module = _model(name).to("meta")
    inputs = {key: value[:MICRO].to("meta") for key, value in _inputs().items()}
    graph = capture(copy.deepcopy(module), inputs, name=name)
    found = dry_run_of(module, inputs, graph, load_cluster("cpu-gloo:1x2"), strategy)
    assert not found.findings, [one.text for one in found.findings]
