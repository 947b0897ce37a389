"""Activations on the host: the same numbers, and the bytes that are priced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autoparallel.costmodel.kernels import HOST_COPY
from autoparallel.costmodel.program import Kernel
from autoparallel.errors import UserError
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.load import keyword_inputs
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.strategy.types import Batch, Execution, Offload, Pipeline, Recompute, Strategy
from autoparallel.profiles import load_cluster
from autoparallel.runtime.memory.offload import check_offload, offload_blocks
from autoparallel.runtime.start import parallelize
from tests.runtime.compare import TOLERANCE, compare
from tests.runtime.harness import Processes
from tests.runtime.models import EXAMPLES
from tests.runtime.pipelines import run_pipeline
from tests.runtime.shared import no_program

SAMPLES = 2
CASES: dict[str, dict[str, Any]] = {
    "half, zero 3": {"dp_shard": 2, "zero": 3, "micro_batches": 2, "offload": 0.5},
    "all, sequence parallel": {"tp": 2, "sequence_parallel": True, "recompute": "selective", "offload": 1.0},
}  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_activations_on_the_host_leave_losses_and_gradients_as_they_are(gloo: Processes, case: str) -> None:
    found = gloo.run(2, compare, name="gpt2", options=CASES[case], dtype="float64")[0]
    assert max(found.loss, found.gradient) <= TOLERANCE[torch.float64], found


@pytest.mark.distributed
def test_a_split_backward_finds_what_is_on_the_host(gloo: Processes) -> None:
    pipeline = {"schedule": "zb1p", "stage_blocks": (2, 2)}
    options = {"pp": 2, "micro_batches": 2, "offload": 1.0}
    found = gloo.run(2, run_pipeline, name="mlp", pipeline=pipeline, options=options, dtype="float64")[0]
    assert max(found.loss, found.gradient) <= TOLERANCE[torch.float64], found


@pytest.mark.sweep(4)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_what_moves_is_what_is_priced(name: str, recompute: str) -> None:
    example = EXAMPLES[name](SAMPLES)
    graph = capture(example.module, keyword_inputs(example.module, example.inputs), name=name)
    strategy = Strategy(
        batch=Batch(global_=SAMPLES, micro=SAMPLES), pipeline=Pipeline(stage_blocks=(len(example.blocks),)),
        recompute=Recompute(mode=recompute), offload=Offload(activations=1.0),
        execution=Execution(dtype="fp32", param_dtype="fp32", master_weights=False, kernels="eager"),
    )  # fmt: skip
    program = Expander(graph, load_cluster("cpu-gloo:1x1")).program(strategy)
    priced = sum(
        count * step.bytes_moved
        for stage in program.stages
        for work, count in stage.blocks
        for step in work.forward
        if isinstance(step, Kernel) and step.kind == HOST_COPY
    )
    model = parallelize(example.module, None, strategy, blocks=example.blocks, program=no_program)
    model.step(example.inputs, example.targets, loss_fn=example.loss_fn)
    count = model._run.lowered.offloaded
    assert (count.kept_bytes, count.moved_bytes, count.returned_bytes) == (priced, priced, priced)


class _Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.kept: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)  # of which x is kept
        self.kept.append(StorageWeakRef(made.untyped_storage()))
        return made.sin().exp()  # of which `made` and the result are


@pytest.mark.parametrize(
    ("share", "moved", "leaves"), [(0.0, 0, False), (0.4, 1, False), (0.5, 1, True), (1.0, 3, True)]
)
def test_a_share_of_the_bytes_moves_and_leaves_the_device(share: float, moved: int, leaves: bool) -> None:
    block, x = _Noting(), torch.randn(2, 4, requires_grad=True)
    wanted = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])
    root = nn.ModuleList([block])
    count = offload_blocks(root, ["0"], share, torch.device("cpu"))
    loss = block(x).sum()
    size = x.nbytes
    assert count.moved_bytes == moved * size
    assert block.kept[-1].expired() == leaves, "what has moved is nowhere else"
    for gradient, same in zip(torch.autograd.grad(loss, [x, *block.parameters()]), wanted, strict=True):
        assert torch.equal(gradient, same)
    assert count.returned_bytes == count.moved_bytes


class _Seeded(torch.autograd.Function):
    """Keeps its input and, as attention's kernels do, a seed that is on another device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, torch.empty((), dtype=torch.int64, device="meta"))
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x, seed = ctx.saved_tensors
        assert seed.is_meta
        return gradients[0] * 2 + 0 * x


class _Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _Seeded.apply(x + 1)
        return made


def test_what_is_kept_on_another_device_stays_there() -> None:
    block, x = _Drawing(), torch.randn(2, 4, requires_grad=True)
    count = offload_blocks(nn.ModuleList([block]), ["0"], 1.0, torch.device("cpu"))
    block(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    assert (count.kept_bytes, count.moved_bytes) == (x.nbytes, x.nbytes)


def test_nothing_moves_without_gradients() -> None:
    block = _Noting()
    count = offload_blocks(nn.ModuleList([block]), ["0"], 1.0, torch.device("cpu"))
    with torch.no_grad():
        block(torch.randn(2, 4))
    assert count.kept_bytes == 0


@pytest.mark.parametrize("name", ["optimizer", "activations"])
def test_what_is_no_share_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"offload.{name} = 1.5: a share, from 0 to 1"):
        check_offload(Offload(**{name: 1.5}))
