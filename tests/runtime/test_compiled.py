from __future__ import annotations

from functools import partial

import pytest
import torch

from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Strategy
from tests.runtime.compare import TOLERANCE, Difference, compare
from tests.runtime.harness import Processes


def strategy_of(kernels: str, **mesh: int) -> Strategy:
    return Strategy(batch=Batch(global_=1, micro=1), mesh=Mesh(**mesh), execution=Execution(kernels=kernels))


def _compared(rank: int, world_size: int) -> tuple[Difference | None, int]:
    """Blocks compiled without code generation, which takes long and is torch's own; how many graphs ran."""
    graphs = 0
    make = torch._dynamo.lookup_backend("aot_eager")

    def counted(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return make(module, inputs)

    before = torch.compile
    torch.compile = partial(before, backend=counted)
    try:
        options = {"kernels": "compiled", "dp_shard": 2, "zero": 3, "recompute": "full", "micro_batches": 2}
        return compare(rank, world_size, "mlp", options, "float64"), graphs
    finally:
        torch.compile = before


@pytest.mark.distributed
def test_compiled_blocks_give_the_gradients_of_one_process(gloo: Processes) -> None:
    found, graphs = gloo.run(2, _compared)[0]
    assert max(found.loss, found.gradient) <= TOLERANCE[torch.float64], found
    assert graphs > 0, "something was compiled"
