from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.runtime.harness import Processes, RankError


def _sum_of_ranks(rank: int, world_size: int, scale: int) -> float:
    total = torch.tensor([float(rank * scale)])
    dist.all_reduce(total)
    return total.item()


def _fail_on_one_rank(rank: int, world_size: int) -> None:
    if rank == 1:
        raise RuntimeError("broken on purpose")
    dist.barrier()


def test_a_function_runs_on_every_rank_and_its_results_come_back(gloo: Processes) -> None:
    assert gloo.run(2, _sum_of_ranks, scale=3) == [3.0, 3.0]


def test_a_failing_rank_does_not_hang_the_others_nor_the_next_case(gloo: Processes) -> None:
    with pytest.raises(RankError, match="broken on purpose"):
        gloo.run(2, _fail_on_one_rank)
    assert gloo.run(2, _sum_of_ranks, scale=1) == [1.0, 1.0]
