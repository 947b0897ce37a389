"""What of a strategy stays when a run goes on with other processes: what is computed stays, or its loss is told."""

from __future__ import annotations

from dataclasses import replace

from autoparallel.planner.strategy.file import strategy_from_constraints, strategy_to_constraints
from autoparallel.planner.strategy.types import (
    Batch,
    GradSync,
    Mesh,
    Outer,
    Phase,
    RecoveryRule,
    Strategy,
)
from autoparallel.profiles import load_cluster
from autoparallel.stays import stays_of

PLANNED = Strategy(
    batch=Batch(global_=16, micro=2),
    mesh=Mesh(dp_replicate=8),
    grad_sync=GradSync(compression=("topk:0.1", "topk:0.1"), weights="int8"),
    outer=Outer(algorithm="diloco", every=8),
    recovery=RecoveryRule(policy="peers", peers=1, checkpoint_every_s=60.0),
    phases=(Phase(from_step=9, keys=(("grad_sync.compression", ("none", "none")),)),),
)


def _kept(strategy: Strategy, spec: str) -> tuple[Strategy, tuple[str, ...]]:
    cluster = load_cluster(spec)
    stays = stays_of(strategy_to_constraints(strategy), cluster, cluster.devices)
    bare = strategy_to_constraints(Strategy(batch=strategy.batch))
    return strategy_from_constraints({**bare, **stays.constraints}), stays.left_out


def test_what_is_computed_stays_where_it_fits_and_the_mesh_does_not() -> None:
    kept, left_out = _kept(PLANNED, "a100-sxm-80gb:2x2")
    assert left_out == ()
    assert kept == replace(PLANNED, mesh=Mesh(), batch=PLANNED.batch)


def test_what_does_not_fit_is_named() -> None:
    kept, left_out = _kept(PLANNED, "cpu-gloo:1x1")
    assert [words.split(" ")[0] for words in left_out] == ["[outer]", "recovery.policy", "[[phase]]"]
    assert kept.grad_sync.weights == "int8"
    assert set(kept.grad_sync.compression) == {"topk:0.1"}, "one method serves any number of levels"
    assert kept.outer == Outer()
    assert (kept.recovery.policy, kept.recovery.checkpoint_every_s) == ("restart", 60.0)
    uneven = replace(PLANNED, grad_sync=GradSync(compression=("none", "int8")))
    _, left_out = _kept(uneven, "cpu-gloo:1x1")
    assert left_out[0] == "grad_sync.compression (the network has other levels here)"


def test_phases_of_meshes_are_left_out() -> None:
    meshes = replace(
        PLANNED, phases=(Phase(from_step=9, keys=(("mesh.dp_shard", 8), ("mesh.dp_replicate", 1))),)
    )
    assert _kept(meshes, "a100-sxm-80gb:2x2")[1] == ("[[phase]] (made for the other mesh)",)
    longer = Phase(from_step=9, keys=(("mesh.dp_shard", 8), ("batch.global", 4), ("batch.seq_len", 4096)))
    kept, left_out = _kept(replace(PLANNED, phases=(longer,)), "a100-sxm-80gb:2x2")
    assert dict(kept.phases[0].keys) == {"batch.global": 4, "batch.seq_len": 4096, "batch.micro": 1}
    assert left_out == ("[[phase]] (made for the other mesh)",), "what is trained on stays"
