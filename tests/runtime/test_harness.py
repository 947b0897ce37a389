from __future__ import annotations

from pathlib import Path

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


def _threads_of_groups(rank: int, world_size: int) -> list[int]:
    """Threads of this process with no more groups than there were, and with four more that have all been used."""

    def threads() -> int:
        names = (task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir())
        return sum(name.startswith("gloo") for name in names)

    found = [threads()]
    groups = [dist.new_group([0, 1], group_desc=f"number {i}") for i in range(4)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    return [*found, threads()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed there")
def test_more_groups_have_no_more_threads_that_look_for_events(gloo: Processes) -> None:
    assert gloo.run(2, _threads_of_groups) == [[1, 1], [1, 1]]
