"""Steps follow the model's device: what they make, they make where the model is.

Here that is the CPU, where a tensor made without a word about its device lands as well. So the default device is
another one during steps: what is made there cannot meet what is on the CPU, and the step fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from autoparallel.runtime.lowering.parallel_module import ParallelModule
from autoparallel.runtime.pipeline.module import PipelineModule
from tests.runtime.compare import TOLERANCE, compare
from tests.runtime.harness import Processes
from tests.runtime.pipelines import run_pipeline

ON_TWO: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "replicas": ("llama", {"dp_replicate": 2, "micro_batches": 2, "offload": 0.5}, None),
    "zero 3": ("gpt2", {"dp_shard": 2, "zero": 3, "recompute": "full"}, None),
    "tensors": ("llama_with_labels", {"tp": 2, "sequence_parallel": True, "recompute": "operators"}, None),
    "fused tensors": ("gpt2", {"tp": 2}, None),
    "sequence": ("llama_with_labels", {"cp": 2, "zero": 1}, None),
    "images": ("resnet", {"dp_shard": 2, "zero": 2}, None),
    "experts": ("mixtral", {"dp_shard": 2, "ep": 2, "zero": 1}, None),
    "pipeline": ("gpt2", {"pp": 2, "micro_batches": 2}, {"schedule": "1f1b", "stage_blocks": (1, 3)}),
    "split": ("llama", {"pp": 2, "micro_batches": 2}, {"schedule": "zbv", "virtual_stages": 2, "stage_blocks": (1,) * 4}),
}  # fmt: skip


LAUNCHES = 3  # of as many of these as fit into a harness's time for one


@contextmanager
def strays_elsewhere() -> Iterator[None]:
    """Inside, what steps make without naming a device is on another one than the model."""
    kinds: tuple[Any, ...] = (ParallelModule, PipelineModule)
    before = [kind.step for kind in kinds]

    def strict(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.device("meta"):
                return step(*args, **kwargs)

        return run

    for kind in kinds:
        kind.step = strict(kind.step)
    try:
        yield
    finally:
        for kind, step in zip(kinds, before, strict=True):
            kind.step = step


def worst_of(rank: int, world_size: int, cases: dict[str, Any]) -> dict[str, float]:
    """The largest difference of each case, on rank 0."""
    found = {}
    for case, (name, options, pipeline) in cases.items():
        with strays_elsewhere():
            if pipeline is None:
                result: Any = compare(rank, world_size, name, options)
            else:
                result = run_pipeline(rank, world_size, name, pipeline, options, "float32")
        if result is not None:
            found[case] = max(result.gradient, result.loss)
    return found


@pytest.mark.sweep(1)
@pytest.mark.distributed
@pytest.mark.parametrize("first", range(LAUNCHES))
def test_steps_make_nothing_elsewhere_than_on_the_models_device(gloo: Processes, first: int) -> None:
    cases = dict(list(ON_TWO.items())[first::LAUNCHES])
    found = gloo.run(2, worst_of, cases=cases)[0]
    assert found.keys() == cases.keys()
    assert max(found.values()) <= TOLERANCE[torch.float32], found


RUNTIME = Path(__file__).parents[2] / "runtime"
# Where accelerators are told apart: by the module for it, by what only CUDA's attention kernels know, and by the library that
# chooses the algorithm of a collective.
NAMED_IN = {"ranks/accelerator.py", "context/attention.py", "limits.py"}


@pytest.mark.parametrize(
    "path", sorted(RUNTIME.rglob("*.py")), ids=lambda path: str(path.relative_to(RUNTIME))
)
def test_no_kind_of_accelerator_is_named(path: Path) -> None:
    named = re.findall(
        r"torch\.cuda\b|torch\.xpu\b|[\"'](?:cuda|xpu|nccl)\b", path.read_text(encoding="utf-8")
    )
    assert str(path.relative_to(RUNTIME)) in NAMED_IN or not named
