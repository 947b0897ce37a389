"""Optimizer state and activations on the host, chosen by the search: where memory binds, and within the hosts' memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoparallel.planner.outcome import PlanResult
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.search.bounds.outer import expand_shapes, outer_of
from autoparallel.planner.search.evaluate import held_by
from autoparallel.planner.search.simulations import Simulations
from autoparallel.planner.search.space.candidates import candidate
from autoparallel.planner.strategy.types import Offload
from autoparallel.profiles.load import load_cluster
from tests.planned import plan
from tests.planner.search.force import with_hosts, with_memory
from tests.toy_graphs import toy_transformer

GRAPH = toy_transformer(layers=6, hidden=512, heads=8, seq=512, vocab=512)
HERE: dict[str, object] = {"offload.optimizer": 0.0, "offload.activations": 0.0}
ONE_RANK: dict[str, object] = {
    "mesh.pp": 2,
    "mesh.tp": 1,
    "mesh.cp": 1,
    "recompute.mode": "none",
    "batch.micro": 2,
}


def problem_of(memory_bytes: float, host_bytes: float, **more: object) -> Problem:
    cluster = with_hosts(with_memory(load_cluster("h100-sxm:1x2"), memory_bytes), host_bytes)
    fixed = {key.replace("__", "."): value for key, value in more.items()}
    return Problem(graph=GRAPH, cluster=cluster, global_batch=8, constraints=fixed)


def least(constraints: dict[str, object]) -> PlanResult:
    roomy = replace(problem_of(1e15, 1e15), constraints=constraints, objective=Objective.MEMORY)
    return plan(roomy)


def test_with_room_enough_everything_stays_on_the_devices() -> None:
    result = plan(problem_of(1e12, 1e12))
    assert result.status == "optimal"
    assert result.strategy.offload == Offload()


def test_what_does_not_fit_on_the_devices_goes_to_the_host() -> None:
    few: dict[str, object] = {"recompute.mode": "none", "batch.micro": 2}  # what is left takes little time
    on_devices, away = least(few | HERE).prediction.peak_bytes, least(few).prediction
    assert away.peak_bytes < on_devices
    between = (away.peak_bytes + on_devices) / 2
    result = plan(replace(problem_of(between, 1e12), constraints=few))
    assert result.strategy.offload != Offload()
    assert result.prediction.peak_bytes <= between < on_devices
    assert result.prediction.host_bytes > 0


def test_a_host_that_is_too_small_by_a_byte_is_not_used_so() -> None:
    away: dict[str, object] = {"offload__optimizer": 1.0, "offload__activations": 1.0}
    used = plan(problem_of(1e12, 1e12, **away)).prediction.host_bytes
    assert plan(problem_of(1e12, used, **away)).prediction.host_bytes <= used
    less = plan(problem_of(1e12, used - 1, **away)).prediction
    assert less.host_bytes < used
    assert less.feasible


def test_activations_on_the_host_beat_recomputation_where_the_link_is_fast() -> None:
    """A share of the devices' memory that holds all but the activations: recomputed without offloading."""
    roomy = plan(replace(problem_of(1e15, 1e15), constraints=ONE_RANK | HERE)).prediction
    tight = problem_of(roomy.peak_bytes * 0.8, 1e12)
    devices_step = ONE_RANK | {"offload.optimizer": 0.0}
    fast = replace(tight, cluster=_linked(tight, 1e13), constraints=devices_step)
    found, here = plan(fast), plan(replace(fast, constraints=ONE_RANK | HERE))
    assert found.strategy.offload.activations > 0.0
    assert found.prediction.step_time_s < here.prediction.step_time_s
    slow = plan(replace(fast, cluster=_linked(tight, 1e7)))
    assert slow.strategy.offload == Offload()
    assert slow.prediction.step_time_s == pytest.approx(here.prediction.step_time_s)


@pytest.mark.parametrize(
    ("name", "fixed"),
    [("activations", {"offload.optimizer": 0.0}), ("optimizer", {"offload.activations": 0.0})],
)
def test_of_a_candidate_as_much_stays_on_the_devices_as_fits(name: str, fixed: dict[str, object]) -> None:
    here, away = ({**ONE_RANK, **fixed, f"offload.{name}": share} for share in (0.0, 1.0))
    most, least_bytes = (
        plan(replace(problem_of(1e15, 1e15), constraints=one)).prediction.peak_bytes for one in (here, away)
    )
    shares = set()
    for room in (0.1, 0.3, 0.5, 0.7, 0.9):
        memory_bytes = least_bytes + room * (most - least_bytes)
        outer = outer_of(replace(problem_of(memory_bytes, 1e12), constraints=ONE_RANK | fixed))
        assert outer is not None
        every, _ = expand_shapes(outer, np.arange(len(outer.space.shapes)), float("inf"))
        for row in range(len(every)):
            chosen, sims = candidate(outer.space, every, row), Simulations(outer=outer)
            if getattr(chosen.offload, name) < 1.0 or sims.try_quickly(chosen) is None:
                continue
            for kept in (one.strategy for one in sims.seen):
                shares.add(share := getattr(kept.offload, name))
                fewer = replace(kept, offload=replace(kept.offload, **{name: share - 0.125}))
                if 0.125 < share < 1.0:
                    assert not outer.fits(held_by(outer.book.expander, fewer)), kept
    assert len(shares) > 2


def _linked(problem: Problem, bytes_per_s: float) -> object:
    groups = tuple(
        replace(
            g, device=replace(g.device, constants={**g.device.constants, "host.bytes_per_s": bytes_per_s})
        )
        for g in problem.cluster.groups
    )
    return replace(problem.cluster, groups=groups)
