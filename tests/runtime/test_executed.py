"""Executed equals planned: kinds, groups, bytes and order of a real step's collectives, by torch's flight recorder, are the
program's, and actions begin in its order; over families of strategies."""

from __future__ import annotations

import pickle
from collections import defaultdict
from math import prod
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import _dump_fr_trace  # the recorder's only way out, on Gloo as on NCCL

from autoparallel.costmodel.program import ActionKind, CollectiveOp, Program
from autoparallel.planner.strategy.types import AXES, Strategy
from autoparallel.runtime.check.messages import Message, program_messages, sent_bytes
from autoparallel.runtime.elastic.draws import stage_of
from autoparallel.runtime.start import parallelize
from tests.runtime.harness import Processes
from tests.runtime.models import EXAMPLES
from tests.runtime.test_dryrun import STRATEGIES, _planned

pytestmark = pytest.mark.distributed
MODEL = "llama_with_labels"
LARGE = 64  # bytes: losses and norms are not the program's
ORDERED = (
    ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT, ActionKind.SEND_F, ActionKind.RECV_F,
    ActionKind.SEND_B, ActionKind.RECV_B,
)  # fmt: skip
OPS = {
    "all_reduce": CollectiveOp.ALL_REDUCE, "all_gather": CollectiveOp.ALL_GATHER,
    "_all_gather_base": CollectiveOp.ALL_GATHER, "reduce_scatter": CollectiveOp.REDUCE_SCATTER,
    "_reduce_scatter_base": CollectiveOp.REDUCE_SCATTER, "all_to_all": CollectiveOp.ALL_TO_ALL,
    "broadcast": CollectiveOp.BROADCAST,
}  # fmt: skip
DTYPES = {"Float": 4, "Double": 8, "BFloat16": 2, "Half": 2, "Long": 8, "Byte": 1, "Int": 4, "Char": 1}


def _recorded() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = pickle.loads(_dump_fr_trace())["entries"]
    return entries


def _message(entry: dict[str, Any], axes: dict[str, str]) -> tuple[str, str, int]:
    """Kind, axis and full bytes of a recorded collective."""
    kind = entry["profiling_name"].partition(":")[2]
    sizes = [
        sum(
            prod(shape) * DTYPES[dtype]
            for shape, dtype in zip(entry[f"{end}_sizes"], entry[f"{end}_dtypes"], strict=True)
        )
        for end in ("input", "output")
    ]
    return str(OPS.get(kind, kind)), axes.get(entry["process_group"][0], "other"), max(sizes)


def _as_planned(op: str, size: int, kinds: set[tuple[CollectiveOp, int]]) -> CollectiveOp:
    """Gloo runs a reduce-scatter as an all-reduce, and records that."""
    summed = op == CollectiveOp.ALL_REDUCE and (CollectiveOp.ALL_REDUCE, size) not in kinds
    if summed and any(kind is CollectiveOp.REDUCE_SCATTER for kind, _ in kinds):
        return CollectiveOp.REDUCE_SCATTER
    return CollectiveOp(op)


def executed(rank: int, world_size: int, strategy: Strategy, program: Program) -> dict[str, Any]:
    """The second step of a run: its collectives as they were recorded, and the actions as they began."""
    share = strategy.batch.global_ // strategy.mesh.data_parallel
    example, actions = EXAMPLES[MODEL](share), list[str]()
    model: Any = parallelize(
        example.module, example.inputs, strategy, blocks=example.blocks, program=lambda: program,
        progress=lambda action, stage: actions.append(f"{stage}{action}"),
    )  # fmt: skip
    mesh = getattr(model, "_mesh", None) or model._run.mesh
    sizes = {axis: getattr(strategy.mesh, axis) for axis in AXES}
    axes = {mesh.group(axis).group_name: axis for axis in AXES if sizes[axis] > 1}
    optimizer = model.optimizer(torch.optim.SGD, lr=0.01)
    for _ in range(2):
        seen = max((entry["record_id"] for entry in _recorded()), default=-1)
        actions.clear()
        optimizer.zero_grad()
        model.step(example.inputs, example.targets, loss_fn=example.loss_fn)
        optimizer.step()
    found = [_message(e, axes) for e in _recorded() if e["record_id"] > seen]
    return {
        "found": [one for one in found if one[2] > LARGE],
        "actions": actions,
        "coordinates": {axis: mesh.coordinate(axis) for axis in AXES},
    }


@pytest.mark.sweep(5)
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_a_run_sends_what_its_program_says_in_its_order(gloo: Processes, strategy: Strategy) -> None:
    expander, strategy = _planned(MODEL, strategy)
    program = expander.program(strategy)
    ranks = gloo.run(strategy.mesh.devices, executed, strategy=strategy, program=program)
    sizes = {axis: getattr(strategy.mesh, axis) for axis in AXES}
    order: dict[tuple[Any, ...], list[list[tuple[str, str, int]]]] = defaultdict(list)
    for rank, one in enumerate(ranks):
        stage = stage_of(rank, strategy)
        planned = program_messages(program)[stage]
        for axis in (a for a in AXES if a != "pp" and sizes[a] > 1):
            kinds = {(m.op, m.size_bytes) for m in planned if m.axis == axis}
            ours = sum(
                sent_bytes(Message(op=_as_planned(op, size, kinds), axis=a, size_bytes=size), sizes)
                for op, a, size in one["found"]
                if a == axis
            )
            theirs = sum(sent_bytes(m, sizes) * count for m, count in planned.items() if m.axis == axis)
            assert ours == pytest.approx(theirs, rel=0.05), (
                rank, axis, sorted(one["found"]), {m: n for m, n in planned.items() if m.axis == axis},
            )  # fmt: skip
            others = tuple(c for a, c in one["coordinates"].items() if a != axis)
            order[(axis, *others)].append([m for m in one["found"] if m[1] == axis])
        row = [f"{a.stage}{a.kind}{a.micro}" for a in program.ranks[stage] if a.kind in ORDERED]
        kinds = {str(kind) for kind in ORDERED}
        ran = [a for a in one["actions"] if a.strip("0123456789") in kinds]
        assert ran == row, (rank, ran)
    for members in order.values():
        assert all(sequence == members[0] for sequence in members), "the same order on every rank of a group"
