from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autoparallel.errors import UserError
from autoparallel.runtime.gradients.compression import check_compression, method_between
from autoparallel.runtime.gradients.reductions import make_reducer
from tests.runtime.compare import compare
from tests.runtime.harness import Processes

pytestmark = pytest.mark.distributed


def _mean(rank: int, world_size: int, method: str, size: int) -> tuple[torch.Tensor, float]:
    """The mean that the method finds, and its largest difference from the exact one."""
    buffer = torch.randn(size, generator=torch.Generator().manual_seed(rank))
    exact = buffer.clone()
    dist.all_reduce(exact)
    exact /= world_size
    make_reducer(dist.group.WORLD, method).start(buffer).wait()
    return buffer, (buffer - exact).abs().max().item()


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize(("method", "limit"), [("none", 1e-6), ("bf16", 2 * 2**-9 * 3)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_gets_the_mean_to_the_precision_of_the_method(
    gloo: Processes, ranks: int, size: int, method: str, limit: float
) -> None:
    results = gloo.run(ranks, _mean, method=method, size=size)
    for mean, error in results:
        assert torch.equal(mean, results[0][0])
        assert error <= limit, "two roundings of numbers of at most about three"


def _sum_of_steps(rank: int, world_size: int, steps: int) -> float:
    """Relative error of the sum of compressed means over `steps` steps of changing gradients."""
    total, exact = torch.zeros(512), torch.zeros(512)
    numbers = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        gradient = 1 + 0.1 * torch.randn(512, generator=numbers)
        mean = gradient.clone()
        dist.all_reduce(mean)
        exact += mean / world_size
        make_reducer(dist.group.WORLD, "bf16").start(gradient).wait()
        total += gradient
    return ((total - exact).norm() / exact.norm()).item()


def test_errors_of_rounding_to_bf16_cancel_over_the_steps(gloo: Processes) -> None:
    """Why no error is fed back: in a biased method the error of the sum would not fall."""
    once, often = (gloo.run(2, _sum_of_steps, steps=steps)[0] for steps in (1, 64))
    assert once < 2**-8
    assert often < once / 4, "the square root of 64 steps would be 8"


def test_training_with_bf16_compression_stays_close_to_one_process(gloo: Processes) -> None:
    options = {"dp_replicate": 2, "micro_batches": 2, "compression": ("none", "bf16")}
    found = gloo.run(2, compare, name="llama", options=options)[0]
    assert 1e-6 < found.gradient < 0.02, "bf16 keeps eight bits"
    assert found.loss < 1e-3


def test_sharded_gradients_are_compressed_as_well(gloo: Processes) -> None:
    options = {"dp_shard": 2, "zero": 3, "micro_batches": 2, "compression": ("bf16",)}
    found = gloo.run(2, compare, name="llama", options=options)[0]
    assert 1e-6 < found.gradient < 0.02


def test_the_method_is_that_of_the_outermost_level_between_the_ranks() -> None:
    levels, methods = (4, 16), ("none", "bf16")
    assert method_between([0, 1, 2], methods, levels) == "none"
    assert method_between([3, 4], methods, levels) == "bf16"
    assert method_between([0, 16], methods, levels) == "bf16"
    assert method_between([0, 1], (), levels) == "none"
    assert method_between([0, 1], methods, ()) == "bf16"


def test_a_compression_that_is_not_run_is_refused() -> None:
    check_compression(())
    check_compression(("none", "bf16"))
    with pytest.raises(UserError, match="int8"):
        check_compression(("none", "int8"))
