from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.runtime.compare import TOLERANCE, compare
from tests.runtime.harness import Processes
from tests.runtime.pipelines import run_pipeline

ONE_F_ONE_B = {"schedule": "1f1b", "stage_blocks": (2, 2)}
CASES: tuple[tuple[str, dict[str, Any], dict[str, Any], str], ...] = (
    ("mlp", {}, {"dp_shard": 2, "zero": 3, "recompute": "full"}, "float64"),
    ("gpt2", {}, {"dp_shard": 2, "zero": 2, "recompute": "selective", "offload": 0.5}, "float64"),
    ("gpt2", ONE_F_ONE_B, {"pp": 2}, "float64"),
    ("mixtral", {}, {"dp_shard": 2, "ep": 2, "zero": 1}, "float32"),
)


def _compared(rank: int, world_size: int) -> list[tuple[float, int]]:
    """Blocks compiled without code generation, which takes long and is torch's own: by case, the largest difference from one
    process and how many graphs ran."""
    graphs = 0
    make = torch._dynamo.lookup_backend("aot_eager")

    def counted(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return make(module, inputs)

    found, before = list[tuple[float, int]](), torch.compile
    torch.compile = partial(before, backend=counted)
    try:
        for name, pipeline, options, dtype in CASES:
            torch._dynamo.reset()
            given, had = {**options, "kernels": "compiled", "micro_batches": 2}, graphs
            if pipeline:
                one: Any = run_pipeline(rank, world_size, name, pipeline, given, dtype)
            else:
                one = compare(rank, world_size, name, given, dtype)
            found.append((max(one.loss, one.gradient) if one else 0.0, graphs - had))
    finally:
        torch.compile = before
    return found


@pytest.mark.distributed
def test_compiled_blocks_give_the_gradients_of_one_process(gloo: Processes) -> None:
    for case, (difference, graphs) in zip(CASES, gloo.run(2, _compared)[0], strict=True):
        assert difference <= TOLERANCE[getattr(torch, case[3])], case
        assert graphs > 0, f"nothing was compiled: {case}"
