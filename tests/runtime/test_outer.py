"""Replicas that train by themselves compute what DiLoCo written by hand computes in one process, also by way of a checkpoint."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from autoparallel.planner.strategy.types import AXES, Batch, Mesh, Outer, Shard, Strategy
from autoparallel.runtime.gradients.outer import LocalUpdates
from autoparallel.runtime.start import parallelize
from tests.runtime.compare import build, part, reference_step
from tests.runtime.harness import Processes
from tests.runtime.shared import no_program

STEPS, SAMPLES = 8, 8
ADAM = {"lr": 0.01, "eps": 1e-4}
OUTSIDE_IN = ("dp_replicate", *(axis for axis in AXES if axis != "dp_replicate"))
CASES = {
    "diloco": (Outer(algorithm="diloco", every=3), {"dp_replicate": 2, "dp_shard": 2}, 3),
    "streaming": (Outer(algorithm="diloco", every=4, fragments=3), {"dp_replicate": 4}, 0),
}


def _strategy(outer: Outer, mesh: dict[str, int], zero: int) -> Strategy:
    sizes = Mesh(**mesh, order=OUTSIDE_IN)  # type: ignore[arg-type]
    return Strategy(
        batch=Batch(global_=SAMPLES, micro=1), mesh=sizes, shard=Shard(zero=zero), outer=outer,
    )  # fmt: skip


def _by_hand(outer: Outer, replicas: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """DiLoCo, Algorithm 1 of arXiv:2311.08105, with the fragments of Streaming DiLoCo, all in this process."""
    example = build("mlp", SAMPLES, torch.float32)
    models = [copy.deepcopy(example.module) for _ in range(replicas)]
    inner = [torch.optim.AdamW(model.parameters(), **ADAM) for model in models]
    begin = [p.detach().clone() for p in example.module.parameters()]
    outside = torch.optim.SGD(begin, lr=outer.lr, momentum=outer.momentum, nesterov=True)
    total, before, home = sum(p.numel() for p in begin), 0, []
    for p in begin:
        home.append(min(int((before + p.numel() / 2) * outer.fragments / total), outer.fragments - 1))
        before += p.numel()
    losses, share = [], SAMPLES // replicas
    for step in range(1, STEPS + 1):
        found = []
        for n, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            optimizer.zero_grad()
            mine = copy.copy(example)
            object.__setattr__(mine, "inputs", part(example.inputs, n * share, (n + 1) * share))
            object.__setattr__(mine, "targets", part(example.targets, n * share, (n + 1) * share))
            found.append(reference_step(model, mine, 1, share))
            optimizer.step()
        losses.append(sum(found) / replicas)
        for fragment in range(outer.fragments):
            first = (fragment + 1) * outer.every // outer.fragments
            if step < first or (step - first) % outer.every:
                continue
            own = [n for n in range(len(begin)) if home[n] == fragment]
            parameters = [list(model.parameters()) for model in models]
            for n in own:
                begin[n].grad = torch.stack([begin[n] - row[n].detach() for row in parameters]).mean(0)
            outside.step()
            with torch.no_grad():
                for n in own:
                    begin[n].grad = None
                    for row in parameters:
                        row[n].copy_(begin[n])
    return losses, dict(models[0].named_parameters())


def _train(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found = {}
    for name, (outer, mesh, zero) in CASES.items():
        strategy, losses = _strategy(outer, mesh, zero), []
        for first, stop in (
            (0, 5),
            (5, STEPS),
        ):  # in the middle between two exchanges all begins again from a checkpoint
            example = build("mlp", SAMPLES, torch.float32)
            share = SAMPLES // strategy.mesh.data_parallel
            model = parallelize(
                example.module,
                part(example.inputs, 0, share),
                strategy,
                blocks=example.blocks,
                program=no_program,
            )
            optimizer = model.optimizer(torch.optim.AdamW, **ADAM)
            kept = {"model": model, "optimizer": optimizer}
            if first:
                dcp.load(kept, checkpoint_id=f"{folder}/{name}")
            at = model.data_parallel_rank * share
            for _ in range(first, stop):
                optimizer.zero_grad()
                inputs, targets = (part(batch, at, at + share) for batch in (example.inputs, example.targets))
                losses.append(model.step(inputs, targets, loss_fn=example.loss_fn).item())
                optimizer.step()
            if not first:
                dcp.save(kept, checkpoint_id=f"{folder}/{name}")
        found[name] = losses, model.full_state_dict()
    return found


@pytest.mark.distributed
def test_local_updates_are_diloco_by_hand(gloo: Processes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = gloo.run(4, _train, folder=folder)
    for name, (outer, mesh, _) in CASES.items():
        losses, parameters = _by_hand(outer, mesh["dp_replicate"])
        assert results[0][name][0] == pytest.approx(losses, rel=1e-4), name
        for key, value in parameters.items():
            torch.testing.assert_close(
                results[0][name][1][key], value.detach(), rtol=1e-3, atol=1e-5, msg=f"{name} {key}"
            )


def test_every_fragment_is_exchanged_once_in_a_round() -> None:
    for every, fragments in ((5, 1), (6, 3), (7, 3), (4, 4)):
        updates = object.__new__(LocalUpdates)
        updates.outer = Outer(algorithm="diloco", every=every, fragments=fragments)
        rounds = [updates.due(step) for step in range(1, 3 * every + 1)]
        for begin in range(every, 3 * every, every):
            assert sorted(n for row in rounds[begin : begin + every] for n in row) == list(range(fragments))
        assert sorted({n for row in rounds[:every] for n in row}) == list(range(fragments))
