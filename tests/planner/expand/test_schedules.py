from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from autoparallel.costmodel.program import ActionKind
from autoparallel.costmodel.program_check import check
from autoparallel.costmodel.program_text import show, show_action
from autoparallel.planner.expand.schedules import (
    BUILT_SCHEDULES,
    ScheduleError,
    add_reduce_grad,
    add_sends_and_receives,
    add_step,
    build_schedule,
    compute_order,
    rank_of_stage,
    schedule_problem,
)

COMPUTE_ORDERS = [
    ("none", 1, 1, 3, ["0F0 0B0 0F1 0B1 0F2 0B2"]),
    ("gpipe", 2, 1, 3, ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]),
    (
        "1f1b",
        3,
        1,
        4,
        [
            "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
            "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
            "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
        ],
    ),
    ("1f1b", 3, 1, 1, ["0F0 0B0", "1F0 1B0", "2F0 2B0"]),
    (
        "interleaved-1f1b",
        2,
        2,
        2,
        ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"],
    ),
    ("zb1p", 2, 1, 3, ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"]),
    (
        "zbv",
        2,
        2,
        3,
        [
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
            "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
        ],
    ),
]


@pytest.mark.parametrize(("name", "ranks", "virtual", "micro", "expected"), COMPUTE_ORDERS)
def test_compute_order(name: str, ranks: int, virtual: int, micro: int, expected: list[str]) -> None:
    assert show(compute_order(name, ranks, virtual, micro)).splitlines() == expected


def test_passes_add_reduction_then_messages_then_the_optimizer() -> None:
    order = compute_order("1f1b", 2, 1, 1)
    reduced = add_reduce_grad(order)
    assert show(reduced) == "0F0 0B0 0REDUCE_GRAD\n1F0 1B0 1REDUCE_GRAD"
    sent = add_sends_and_receives(reduced, (0, 1))
    assert show(sent) == "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD\n1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD"
    assert show(add_step(sent)).splitlines()[0].endswith("0REDUCE_GRAD 0STEP")


def test_the_turn_of_a_v_sends_nothing() -> None:
    text = show(build_schedule("zbv", 2, 2, 3)).splitlines()[1]
    assert "1SEND_F" not in text
    assert "2SEND_B" not in text
    assert "2SEND_F0" in text


@pytest.mark.parametrize(
    ("name", "ranks", "virtual", "expected"),
    [
        ("1f1b", 3, 1, (0, 1, 2)),
        ("interleaved-1f1b", 2, 3, (0, 1, 0, 1, 0, 1)),
        ("zbv", 3, 2, (0, 1, 2, 2, 1, 0)),
        ("dualpipev", 2, 2, (0, 1, 1, 0)),
    ],
)
def test_rank_of_stage(name: str, ranks: int, virtual: int, expected: tuple[int, ...]) -> None:
    assert rank_of_stage(name, ranks, virtual) == expected


@pytest.mark.parametrize(
    ("name", "ranks", "virtual", "micro", "says"),
    [
        ("pipedream", 2, 1, 2, "not one of"),
        ("none", 2, 1, 2, "needs pp = 1"),
        ("interleaved-1f1b", 4, 1, 4, "use 1f1b"),
        ("interleaved-1f1b", 4, 2, 9, "divisible by its 2 rounds"),
        ("interleaved-1f1b", 1, 2, 4, "at least two"),
        ("gpipe", 2, 2, 4, "virtual_stages = 1"),
        ("zbv", 2, 3, 4, "virtual_stages = 2"),
        ("dualpipev", 4, 2, 7, "at least 8 micro-batches"),
        ("1f1b", 2, 1, 0, "at least 1"),
    ],
)
def test_an_illegal_combination_is_refused_with_the_reason(
    name: str, ranks: int, virtual: int, micro: int, says: str
) -> None:
    problem = schedule_problem(name, ranks, virtual, micro)
    assert problem is not None
    assert says in problem
    with pytest.raises(ScheduleError, match=r"pipeline\.schedule"):
        build_schedule(name, ranks, virtual, micro)


def test_every_legal_schedule_passes_the_check() -> None:
    checked = 0
    for name in BUILT_SCHEDULES:
        for ranks in (1, 2, 3, 5):
            for virtual in (1, 2, 3):
                for micro in (1, 2, 3, 4, 6, 10, 11):
                    if schedule_problem(name, ranks, virtual, micro) is None:
                        check(build_schedule(name, ranks, virtual, micro))
                        checked += 1
    assert checked > 100


class _Stage:
    """As much of a torch pipeline stage as the construction of a schedule looks at."""

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_rank, self.group_size = index, stages, 0, ranks
        self.group = self.submod = None
        self.is_first, self.is_last, self.has_backward = index == 0, index == stages - 1, True
        self.stage_index_to_group_rank: dict[int, int] = {}


def _torch_actions(schedule: Any, rank: int) -> list[str]:
    """What torch's runtime executes, without the FSDP actions; overlapped pairs in their order."""
    actions = []
    for action in schedule.pipeline_order_with_comms[rank]:
        actions += [str(part) for part in action.sub_actions or (action,)]
    return [text for text in actions if "SHARD" not in text]


def _compute_only(actions: list[str]) -> list[str]:
    return [text for text in actions if "SEND" not in text and "RECV" not in text]


@pytest.mark.parametrize(
    ("name", "torch_class", "virtual", "micros"),
    [
        ("interleaved-1f1b", ScheduleInterleaved1F1B, 2, (1, 3, 4, 8, 10)),
        ("interleaved-1f1b", ScheduleInterleaved1F1B, 3, (2, 4, 8)),
        ("zb1p", ScheduleInterleavedZeroBubble, 1, (1, 4, 6, 8)),
        ("zb1p", ScheduleInterleavedZeroBubble, 2, (4, 8)),
        ("zbv", ScheduleZBVZeroBubble, 2, (2, 7, 8, 11)),
        ("dualpipev", ScheduleDualPipeV, 2, (8, 11)),
    ],
)
def test_schedule_is_the_one_torch_executes(
    name: str, torch_class: Any, virtual: int, micros: tuple[int, ...]
) -> None:
    compared = 0
    for ranks in (2, 3, 4):
        for micro in micros:
            if schedule_problem(name, ranks, virtual, micro) is not None:
                continue
            stages = [_Stage(ranks * chunk, ranks * virtual, ranks) for chunk in range(virtual)]
            torch_schedule = torch_class(stages, micro, loss_fn=lambda *_: None)
            for rank, actions in enumerate(build_schedule(name, ranks, virtual, micro)):
                ours = [show_action(action) for action in actions if action.kind is not ActionKind.STEP]
                theirs = _torch_actions(torch_schedule, rank)
                assert _compute_only(ours) == _compute_only(theirs)
                assert sorted(ours) == sorted(theirs)
                compared += 1
    assert compared
