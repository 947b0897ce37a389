from __future__ import annotations

import random
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.costmodel.bound import V_SHAPED, BoundMatrix, bound_terms, tails_s
from autoparallel.costmodel.stage_cost import StageCost
from autoparallel.costmodel.timetable import pipeline_times, prepare
from autoparallel.planner.expand.schedules import (
    BUILT_SCHEDULES,
    build_schedule,
    rank_of_stage,
    schedule_problem,
)
from tests.toy_programs import stage_cost


def simulated_s(name: str, ranks: int, virtual: int, micro: int, costs: list[StageCost]) -> float:
    return pipeline_times(prepare(build_schedule(name, ranks, virtual, micro)), costs).step_time_s


def bound_s(name: str, ranks: int, virtual: int, micro: int, costs: list[StageCost]) -> float:
    homes = rank_of_stage(name, ranks, virtual)
    phases = ("forward", "backward", "backward_input", "backward_weight")
    seconds = np.array([[*(getattr(c, phase).total_s for phase in phases), c.send_s] for c in costs])
    tails = np.array(tails_s(costs, homes, looped=name not in V_SHAPED))
    return float(BoundMatrix.of(bound_terms(name, homes, micro)).bound_s(seconds.T, tails))


def virtual_of(name: str) -> int:
    return 2 if name in ("zbv", "dualpipev", "interleaved-1f1b") else 1


SECONDS = st.floats(0.0, 10.0)


@settings(max_examples=400)
@given(st.data())
def test_the_bound_never_exceeds_the_simulated_step(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(BUILT_SCHEDULES))
    ranks = (
        1
        if name == "none"
        else data.draw(st.integers(1 if virtual_of(name) == 1 and name != "zb1p" else 2, 5))
    )
    virtual = virtual_of(name) * (data.draw(st.integers(1, 2)) if name in ("zb1p", "interleaved-1f1b") else 1)
    micro = data.draw(st.integers(1, 13).filter(lambda m: schedule_problem(name, ranks, virtual, m) is None))
    costs = [
        stage_cost(
            data.draw(SECONDS), data.draw(SECONDS), data.draw(SECONDS),
            send_s=data.draw(SECONDS), step_s=data.draw(SECONDS), reduce_s=data.draw(SECONDS),
        )
        for _ in range(ranks * virtual)
    ]  # fmt: skip
    bound = bound_s(name, ranks, virtual, micro, costs)
    assert bound <= simulated_s(name, ranks, virtual, micro, costs) * (1 + 1e-12)


@pytest.mark.parametrize("name", ["none", "gpipe", "1f1b"])
def test_equal_stages_without_messages_meet_the_bound(name: str) -> None:
    for ranks in (1,) if name == "none" else (1, 2, 4, 7):
        for micro in (1, 3, 7, 20):
            costs = [stage_cost(1.0, 1.5, 0.5, step_s=0.25)] * ranks
            expected = (micro + ranks - 1) * 3.0 + 0.25
            assert bound_s(name, ranks, 1, micro, costs) == pytest.approx(expected)
            assert simulated_s(name, ranks, 1, micro, costs) == pytest.approx(expected)


def realistic(rng: random.Random, stages: int) -> list[StageCost]:
    """Uneven stages, backward about twice the forward, short messages, a step at the end."""
    costs = []
    for _ in range(stages):
        forward = rng.uniform(0.8, 1.2)
        costs.append(
            stage_cost(
                forward, forward * rng.uniform(0.9, 1.3), forward, send_s=rng.uniform(0.0, 0.05), step_s=0.1
            )
        )
    return costs


# The least and the mean share of the simulated step that the bound reaches, seen over the programs below.
TIGHT = {
    "gpipe": (0.98, 0.995), "1f1b": (0.95, 0.985), "interleaved-1f1b": (0.93, 0.985), "zb1p": (0.985, 0.995),
    "zbv": (0.95, 0.985), "dualpipev": (0.95, 0.985),
}  # fmt: skip


@pytest.mark.parametrize("name", TIGHT)
def test_the_bound_is_close_to_the_simulated_step(name: str) -> None:
    rng = random.Random(0)
    ratios = []
    for _ in range(60):
        ranks, virtual = rng.choice((2, 4, 8)), virtual_of(name)
        micro = ranks * rng.choice((2, 3, 4))
        costs = realistic(rng, ranks * virtual)
        ratios.append(
            bound_s(name, ranks, virtual, micro, costs) / simulated_s(name, ranks, virtual, micro, costs)
        )
    print(f"{name}: bound / simulated from {min(ratios):.4f}, mean {statistics.mean(ratios):.4f}")
    least, mean = TIGHT[name]
    assert least < min(ratios)
    assert mean < statistics.mean(ratios)
    assert max(ratios) <= 1 + 1e-12


def test_many_candidates_are_bounded_at_once() -> None:
    rng = random.Random(1)
    homes = rank_of_stage("1f1b", 4, 1)
    matrix = BoundMatrix.of(bound_terms("1f1b", homes, 9))
    candidates = [realistic(rng, 4) for _ in range(50)]
    seconds = np.array(
        [
            [
                [c.forward.total_s for c in costs],
                [c.backward.total_s for c in costs],
                [c.backward_input.total_s for c in costs],
                [c.backward_weight.total_s for c in costs],
                [c.send_s for c in costs],
            ]
            for costs in candidates
        ]
    )
    tails = np.array([tails_s(costs, homes) for costs in candidates])
    one_by_one = [bound_s("1f1b", 4, 1, 9, costs) for costs in candidates]
    assert matrix.bound_s(seconds, tails) == pytest.approx(np.array(one_by_one))


def test_terms_of_1f1b_on_two_ranks_by_hand() -> None:
    """Rank 1 works from the first message on; its first backward stands after one forward of three."""
    terms = bound_terms("1f1b", (0, 1), 3)
    counts = {(term.rank, term.forward, term.backward, term.message) for term in terms}
    assert (1, (1, 3), (0, 3), (1, 0)) in counts  # fill and work of rank 1
    assert (0, (1, 3), (1, 3), (2, 0)) in counts  # ... and drain
    assert (0, (2, 1), (3, 1), (2, 0)) in counts  # rank 0: down and back, then the F and the B that are left
