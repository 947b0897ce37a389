from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autoparallel.errors import UserError
from autoparallel.runtime.compression import check_compression, make_reducer
from tests.runtime.compare import compare
from tests.runtime.harness import Processes

pytestmark = pytest.mark.distributed
STEPS = 50


def _mean(rank: int, world_size: int, method: str, size: int) -> tuple[float, float]:
    """Largest error of one mean, and of the sum of many means of the same gradient, against the exact ones."""
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(torch.float32)
    exact = gradient.clone()
    dist.all_reduce(exact)
    exact /= world_size
    reducer = make_reducer(dist.group.WORLD, (method,))
    total, first = torch.zeros(size), torch.zeros(())
    for step in range(STEPS):
        buffer = gradient.clone()
        reducer.start(buffer, key=0).wait()
        total += buffer
        first = (buffer - exact).abs().max() if step == 0 else first
    return first.item(), (total / STEPS - exact).abs().max().item()


@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_plain_reduction_is_the_mean(gloo: Processes, size: int) -> None:
    for first, average in gloo.run(2, _mean, method="none", size=size):
        assert first < 1e-6
        assert average < 1e-5


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bf16_rounds_each_mean_but_loses_nothing_over_many_steps(
    gloo: Processes, ranks: int, size: int
) -> None:
    for first, average in gloo.run(ranks, _mean, method="bf16", size=size):
        assert first < 2 * 2**-8 * 3, "two roundings of numbers of at most about three"
        assert average < 3 * first / STEPS + 2**-8 / STEPS * 3 + 1e-6, "what was rounded away comes back"


def test_training_with_bf16_compression_stays_close_to_one_process(gloo: Processes) -> None:
    options = {"dp_replicate": 2, "micro_batches": 2, "compression": ("none", "bf16")}
    found = gloo.run(2, compare, name="llama", options=options)[0]
    assert 1e-6 < found.gradient < 0.02, "bf16 keeps eight bits"
    assert found.loss < 1e-3


def test_all_replicas_hold_the_same_compressed_mean(gloo: Processes) -> None:
    results = gloo.run(4, _same_mean)
    assert all(torch.equal(result, results[0]) for result in results)


def _same_mean(rank: int, world_size: int) -> torch.Tensor:
    buffer = torch.randn(33, generator=torch.Generator().manual_seed(rank))
    make_reducer(dist.group.WORLD, ("bf16",)).start(buffer, key=0).wait()
    return buffer


def test_a_compression_that_is_not_run_is_refused() -> None:
    assert check_compression(()) == check_compression(("none", "none")) == "none"
    assert check_compression(("none", "bf16")) == "bf16"
    with pytest.raises(UserError, match="int8"):
        check_compression(("none", "int8"))
