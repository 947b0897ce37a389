"""What the program prices along tp and cp is what a step of the lowered model communicates."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel.costmodel.program import Collective, CollectiveOp
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.load import keyword_inputs
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.score import completed
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Pipeline, Shard, Strategy
from autoparallel.profiles import load_cluster
from autoparallel.runtime.start import parallelize
from tests.runtime.harness import Processes
from tests.runtime.models import EXAMPLES
from tests.runtime.shared import no_program

pytestmark = pytest.mark.distributed
SAMPLES = 4


class _Counts(TorchDispatchMode):
    """Counts functional collectives by name: what torch's CommDebugMode counts, without its module tracker."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # to see what it does inside, redistributions of its own accord too
        if func.namespace == "_c10d_functional" and not func.__name__.startswith(("_", "wait")):
            name = func.__name__.partition(".")[0]
            self.found[name.removesuffix("_into_tensor").removesuffix("_tensor")] += 1
        return func(*args, **(kwargs or {}))


def _counted(rank: int, world_size: int, name: str, strategy: Strategy) -> Counter[str]:
    example = EXAMPLES[name](SAMPLES)
    model = parallelize(example.module, None, strategy, blocks=example.blocks, program=no_program)
    model.step(
        example.inputs, example.targets, loss_fn=example.loss_fn
    )  # with trials: see runtime.plain_blocks
    with _Counts() as counts:
        model.step(example.inputs, example.targets, loss_fn=example.loss_fn)
    return counts.found


def _priced(name: str, sequence_parallel: bool, **mesh: int) -> tuple[Strategy, Counter[str]]:
    """A strategy, and the collectives of its program along tp and cp, counted."""
    example = EXAMPLES[name](SAMPLES)
    graph = capture(example.module, keyword_inputs(example.module, example.inputs), name=name)
    sizes = Mesh(**mesh)
    expander = Expander(graph, load_cluster(f"cpu-gloo:1x{sizes.devices}"))
    strategy = Strategy(
        batch=Batch(global_=SAMPLES, micro=SAMPLES),
        mesh=sizes,
        shard=Shard(sequence_parallel=sequence_parallel),
        pipeline=Pipeline(stage_blocks=(len(example.blocks),)),
        execution=Execution(dtype="fp32", param_dtype="fp32", master_weights=False, kernels="eager"),
    )
    strategy = completed(expander, strategy) if sizes.tp > 1 else strategy
    counts: Counter[str] = Counter()
    for work, count in (pair for stage in expander.program(strategy).stages for pair in stage.blocks):
        for step in (*work.forward, *work.backward_input, *work.backward_weight):
            if isinstance(step, Collective) and step.label in ("tp", "cp"):
                # On CPUs torch makes an all-to-all of an all-gather.
                gathers = step.op is CollectiveOp.ALL_TO_ALL
                counts[str(CollectiveOp.ALL_GATHER if gathers else step.op)] += count
    plan = expander.tensor_plan(strategy)
    for link in graph.chain:  # once per step, for replicated parameters whose gradient is a sum of parts
        counts["all_reduce"] += len(plan.blocks[link.block].partial_params)
    return strategy, counts


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [
        ("llama", False),
        ("llama", True),
        ("qwen3", False),
        ("gpt2", False),
        ("gpt2", True),
        ("vit", False),
        ("mlp", False),
    ],
)
def test_a_step_runs_the_collectives_that_are_priced(
    gloo: Processes, name: str, sequence_parallel: bool
) -> None:
    strategy, priced = _priced(name, sequence_parallel, tp=2)
    for counted in gloo.run(2, _counted, name=name, strategy=strategy):
        assert counted == priced, strategy.tensor


@pytest.mark.parametrize(
    ("name", "sequence_parallel", "mesh", "beside"),
    [
        ("llama_with_labels", False, {"cp": 2}, {"all_reduce": 1}),  # of the loss
        ("gpt2", True, {"cp": 2, "tp": 2}, {"all_gather": 1}),  # of the output, which loss_fn gets whole
    ],
)
def test_shares_of_a_sequence_are_gathered_as_priced(
    gloo: Processes, name: str, sequence_parallel: bool, mesh: dict[str, int], beside: dict[str, int]
) -> None:
    strategy, priced = _priced(name, sequence_parallel, **mesh)
    for counted in gloo.run(strategy.mesh.devices, _counted, name=name, strategy=strategy):
        assert counted == priced + Counter(beside), strategy.tensor
