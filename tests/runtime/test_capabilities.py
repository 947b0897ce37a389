"""The table of what runs: refused before anything is sharded, in the same words everywhere; no search for plans that run finds it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoparallel.errors import UserError
from autoparallel.inputs import Request, check_request, make_problem
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.load import keyword_inputs
from autoparallel.planner.expand.schedules import SPLIT_BACKWARD
from autoparallel.planner.outcome import InfeasiblePlan
from autoparallel.planner.plan import plan
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.partition.quick import even_partition
from autoparallel.planner.search.space.build import build_space, variants
from autoparallel.planner.search.space.candidates import candidate, strategy_of
from autoparallel.planner.strategy.file import strategy_from_constraints, strategy_to_constraints
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.types import (
    Batch,
    EmbeddingRule,
    Execution,
    GradSync,
    Mesh,
    Outer,
    Phase,
    Pipeline,
    Servers,
    Shard,
    Strategy,
)
from autoparallel.profiles import load_cluster
from autoparallel.runtime.capabilities.models import model_page
from autoparallel.runtime.capabilities.rows import Case
from autoparallel.runtime.capabilities.table import TABLE, limits, otherwise_priced, page, refusals
from autoparallel.runtime.check.dryrun import as_one_of
from autoparallel.runtime.limits import graph_limits, kernels_to_choose, on_devices, refuser
from autoparallel.runtime.start import check_strategy
from tests.cli.runner import save
from tests.runtime.models import EXAMPLES
from tests.toy_graphs import toy_transformer

BY_TWO = (2, 4)  # four ranks, two below each port
EAGER = {"execution.kernels": "eager"}
FLAGS = [row.key for row in TABLE if row.key.startswith("execution.") and row.values == "true"]
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def _synced(sync: GradSync, **mesh: int) -> Strategy:
    sizes = Mesh(**mesh)
    batch = Batch(global_=sizes.data_parallel, micro=1)
    return Strategy(
        batch=batch, mesh=sizes, shard=Shard(zero=3), grad_sync=sync, execution=Execution(kernels="eager")
    )


@st.composite
def _strategies(draw: st.DrawFn) -> Strategy:
    """Complete strategies of four ranks, most of whose keys are as always."""

    def often(usual: object, *others: object) -> Any:
        return draw(st.sampled_from((usual, usual, *others)))

    sizes = dict.fromkeys(AXES, 1)
    for _ in range(2):
        sizes[draw(st.sampled_from(AXES))] *= 2
    pp, schedule = sizes["pp"], often("1f1b", "zb1p", "zbv") if sizes["pp"] > 1 else "none"
    chunks = pp * (2 if schedule == "zbv" else 1)
    flag = often(None, draw(st.sampled_from(FLAGS)))
    compression = often(
        (), ("none", "int8"), ("powersgd:2", "int8"), ("none", "powersgd:9999"), ("none", "none", "none")
    )
    return Strategy(
        batch=Batch(global_=8 * sizes["dp_replicate"] * sizes["dp_shard"], micro=1),
        mesh=Mesh(**sizes),
        shard=Shard(zero=draw(st.integers(1, 3)) if sizes["dp_shard"] > 1 else often(0, 1)),
        pipeline=Pipeline(
            schedule=schedule,
            virtual_stages=chunks // pp,
            stage_blocks=tuple(4 * (i + 1) // chunks - 4 * i // chunks for i in range(chunks)),
        ),
        execution=replace(
            Execution(dtype=often("fp32", "bf16", "fp8"), kernels=often("eager", "compiled", "fused")),
            **({flag.removeprefix("execution."): True} if flag else {}),
        ),
        grad_sync=GradSync(
            algorithm=often("auto", "ring", "tree", "hierarchical", "parameter-server"),
            compression=compression,
            weights=often("none", "int8"),
        ),
        servers=often(Servers(), Servers(staleness=2), Servers(staleness=2, mode="bounded-stale")),
        outer=often(Outer(), Outer(algorithm="diloco", every=4)),
        embedding=often((), (EmbeddingRule(module="*", tier="sharded", hot_rows=0),)),
    )


def _module() -> tuple[Any, Any]:
    example = EXAMPLES["mlp"](4)
    return example, capture(example.module, keyword_inputs(example.module, example.inputs), name="mlp")


@settings(max_examples=150, deadline=None)
@given(strategy=_strategies(), backend=st.sampled_from(["gloo", "nccl"]), shares=st.booleans())
def test_what_the_table_refuses_is_refused_before_anything_is_sharded_in_its_words(
    strategy: Strategy, backend: str, shares: bool
) -> None:
    example, _ = _example()
    numbers = sum(parameter.numel() for parameter in example.module.parameters())
    case = Case(
        strategy=strategy, level_sizes=BY_TWO, backend=backend, shares_experts=shares, numbers=numbers
    )
    why = next(refusals(case), None)
    with as_one_of(strategy.mesh.devices), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            check_strategy(
                example.module, strategy, ["."] * 4, BY_TWO, backend=backend, shares_experts=shares
            )
            found = None
        except UserError as error:
            found = str(error)
    assert found == why
    if why is None:
        assert set(otherwise_priced(case)) <= {str(one.message) for one in told}


@cache
def _example() -> tuple[Any, Any]:
    return _module()


def _drawn_constraints() -> st.SearchStrategy[dict[str, Any]]:
    keys = {
        "pipeline.schedule": st.sampled_from(["1f1b", "zb1p", "zbv"]),
        "grad_sync.algorithm": st.sampled_from(["ring", "tree", "hierarchical", "parameter-server"]),
        "execution.kernels": st.sampled_from(["eager", "compiled", "fused"]),
        "execution.dtype": st.sampled_from(["bf16", "fp8"]),
        "shard.zero": st.integers(0, 3),
        "mesh.dp_shard": st.sampled_from([1, 2]),
        "mesh.tp": st.sampled_from([1, 2]),
        FLAGS[0]: st.booleans(),
    }
    chosen = st.lists(st.sampled_from(sorted(keys)), max_size=3, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: keys[name] for name in names}))


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=_drawn_constraints(), spec=st.sampled_from(["cpu-gloo:1x4", "h100-sxm:1x4"]))
def test_plans_for_what_runs_hold_nothing_that_is_refused(
    asked: Mapping[str, Any], spec: str, tmp_path: Path
) -> None:
    graph = toy_transformer(layers=2, hidden=64, heads=4, seq=64, vocab=256)
    path = save(graph, tmp_path / "graph.json")
    said = [f"{key}={str(value).lower()}" for key, value in asked.items()]
    try:
        request = Request(
            model=str(path), cluster=spec, settings=said, runnable=True, global_batch=8, allow_lossy=True
        )
        found = plan(make_problem(check_request(request), graph), advise=False, rivals=False)
    except (UserError, InfeasiblePlan):
        return  # asked for what does not go together
    judge = refuser(graph, load_cluster(spec), said=True)
    assert not strategy_problems(graph, load_cluster(spec), found.strategy)
    assert judge(found.strategy) is None
    decided = strategy_to_constraints(found.strategy)
    assert {key: decided[key] for key in asked} == asked


def test_split_backwards_are_planned_over_replicas_alone_too(tmp_path: Path) -> None:
    path = save(toy_transformer(layers=2, hidden=64, heads=4, seq=64, vocab=256), tmp_path / "graph.json")
    asked = {"pipeline.schedule": "zb1p", "mesh.pp": 2, "mesh.dp_replicate": 2}
    request = Request(
        model=str(path), cluster="h100-sxm:1x4", settings=[f"{k}={v}" for k, v in asked.items()], runnable=True,
        global_batch=8,
    )  # fmt: skip
    problem = make_problem(
        check_request(request), toy_transformer(layers=2, hidden=64, heads=4, seq=64, vocab=256)
    )
    assert plan(problem, advise=False).strategy.mesh.dp_replicate == 2


def test_constraints_that_no_plan_can_meet_are_refused_in_the_words_of_the_table() -> None:
    for asked in (
        {"execution.dtype": "fp8"},
        {"execution.kernels": "compiled", "mesh.cp": 2},
        {"grad_sync.algorithm": "parameter-server", "shard.zero": 3, "mesh.dp_shard": 2},
    ):
        with pytest.raises(UserError) as refusal:
            limits(asked)
        whole = strategy_to_constraints(_synced(GradSync(), dp_shard=2)) | {"mesh.pp": 2, **asked}
        case = Case(strategy=strategy_from_constraints(whole))
        assert any(str(refusal.value).split(":")[1] in problem for problem in refusals(case))


def test_the_page_has_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs/runtime.md").read_text(encoding="utf-8")
    assert model_page() in text
    assert page() in text, (
        "write what `autoparallel.runtime.capabilities.table.page()` returns into docs/runtime.md"
    )


@pytest.mark.parametrize(
    ("asked", "fixed"),
    [
        ({}, {}),
        ({"pipeline.schedule": "1f1b"}, {}),
        ({"pipeline.schedule": "zb1p", "shard.zero": 3, "mesh.cp": 2}, EAGER),
        ({"execution.kernels": "compiled"}, {"mesh.tp": 1, "mesh.cp": 1}),
        ({"grad_sync.algorithm": "parameter-server"}, {}),
        ({"grad_sync.algorithm": "tree", "shard.zero": 2}, {"mesh.dp_shard": 1, "mesh.cp": 1}),
    ],
)
def test_what_is_asked_for_limits_the_meshes_that_run_it(
    asked: dict[str, Any], fixed: dict[str, Any]
) -> None:
    assert limits(asked) == fixed


def test_kernels_to_choose_are_those_that_run_in_every_phase() -> None:
    later = Phase(from_step=9, keys=(("mesh.tp", 2),))
    assert list(kernels_to_choose({})) == ["eager", "compiled"]
    assert list(kernels_to_choose({"phase": (later,)})) == ["eager"]


def test_tables_in_tiers_stand_beside_data_parallelism_alone() -> None:
    rules = (EmbeddingRule(module="tables.*", tier="sharded", hot_rows=0),)
    assert limits({"embedding": rules}) == {f"mesh.{axis}": 1 for axis in ("pp", "tp", "cp", "ep")}
    assert on_devices({"embedding": rules}) == {}
    assert on_devices({})["embedding"] == (EmbeddingRule(module="*", tier="device"),)
    assert graph_limits(toy_transformer(layers=2)) == {}


@pytest.mark.parametrize(
    ("sync", "levels", "mesh", "words"),
    [
        (GradSync(algorithm="nvls"), BY_TWO, {"dp_replicate": 2}, ("nvls", "not run", "one of auto")),
        (GradSync(algorithm="tree"), BY_TWO, {"dp_shard": 2}, ("tree", "write ring")),
        (GradSync(algorithm="ring", compression=("none", "int8")), BY_TWO, {"dp_replicate": 4}, ("int8", "write auto")),
        (GradSync(algorithm="parameter-server"), BY_TWO, {"dp_shard": 2}, ("parameter-server", "write hierarchical")),
        (GradSync(algorithm="hierarchical"), (), {"dp_replicate": 4}, ("hierarchical", "pass cluster=")),
        (GradSync(algorithm="hierarchical"), (6, 12), {"dp_replicate": 4, "dp_shard": 3, "order": (*AXES[:1], "dp_shard", "dp_replicate", *AXES[3:])}, ("stand alike", "mesh.order")),
        (GradSync(compression=("int3",)), BY_TWO, {"dp_replicate": 2}, ("int3", "one of")),
        (GradSync(compression=("topk:0",)), BY_TWO, {"dp_replicate": 2}, ("topk:0", "above 0")),
        (GradSync(compression=("topk:0.2-0.1",)), BY_TWO, {"dp_replicate": 2}, ("topk:0.2-0.1", "above 0")),
        (GradSync(compression=("powersgd:0",)), BY_TWO, {"dp_replicate": 2}, ("powersgd:0", "whole rank")),
        (GradSync(compression=("none", "none", "int8")), BY_TWO, {"dp_replicate": 2}, ("3 entries", "leave out")),
        (GradSync(compression=("none",) * 3), BY_TWO, {"dp_replicate": 2}, ("3 entries", "leave out")),
        (GradSync(compression=("none", "powersgd:20")), BY_TWO, {"dp_replicate": 2}, ("powersgd:20", "15 or less")),
        (GradSync(compression=("powersgd:2", "int8")), BY_TWO, {"dp_replicate": 4}, ("powersgd:2", "outermost")),
        (
            GradSync(algorithm="hierarchical", compression=("powersgd:2",) * 2), BY_TWO, {"dp_replicate": 4},
            ("powersgd:2", 'algorithm = "auto"'),
        ),
    ],
)  # fmt: skip
def test_a_refusal_names_key_value_and_remedy(
    sync: GradSync, levels: tuple[int, ...], mesh: dict[str, Any], words: tuple[str, str]
) -> None:
    found = list(refusals(Case(strategy=_synced(sync, **mesh), level_sizes=levels, numbers=1000)))
    assert found
    assert "grad_sync" in found[0]
    for word in words:
        assert word in found[0]


@pytest.mark.parametrize(
    "sync",
    [
        GradSync(algorithm="ring"),
        GradSync(compression=("int8", "topk:0.001-0.01")),
        GradSync(compression=("powersgd:4", "powersgd:4")),
    ],
)
def test_without_replicas_any_algorithm_will_do(sync: GradSync) -> None:
    assert not list(refusals(Case(strategy=_synced(sync, tp=4), level_sizes=BY_TWO)))


@pytest.mark.parametrize(("cluster", "runs"), [("cpu-gloo:1x4", True), ("h100-sxm:1x4", False)])
def test_algorithms_of_our_own_messages_are_run_on_gloo_alone(cluster: str, runs: bool) -> None:
    ring = replace(_synced(GradSync(algorithm="ring"), dp_replicate=4), shard=Shard())
    why = refuser(toy_transformer(layers=2), load_cluster(cluster))(ring)
    assert (why is None) == runs
    assert runs or "nccl chooses" in str(why)


def test_replicas_that_are_not_there_are_refused() -> None:
    alone = replace(_synced(GradSync(), dp_shard=2), outer=Outer(algorithm="diloco"))
    (found,) = refusals(Case(strategy=alone))
    assert "outer.algorithm" in found
    assert "needs replicas" in found


@pytest.mark.parametrize("kernels", ["eager", "compiled"])
def test_what_leaves_the_space_is_refused_one_by_one(kernels: str) -> None:
    cluster = load_cluster("h100-sxm:1x4")
    free = Problem(
        graph=toy_transformer(layers=4, hidden=64, heads=4, seq=64, vocab=256), cluster=cluster, global_batch=8,
        execution=Execution(kernels=kernels),
    )  # fmt: skip
    judge = refuser(free.graph, cluster, said=True)
    every, kept = (_plain_strategies(one) for one in (free, replace(free, refuses=judge)))
    gone = every - kept
    assert kept <= every
    assert all(judge(strategy) is not None for strategy in gone)
    assert ({one.pipeline.schedule for one in gone} >= SPLIT_BACKWARD) == (kernels == "compiled")
    assert ({one.pipeline.schedule for one in kept} >= SPLIT_BACKWARD) == (kernels == "eager")


def _plain_strategies(problem: Problem) -> set[Strategy]:
    """The strategies of the space, with blocks divided evenly."""
    space = build_space(problem)
    every = variants(space, np.arange(len(space.shapes)))
    blocks = len(problem.graph.repeated_positions)
    found = (candidate(space, every, row) for row in range(len(every)))
    return {strategy_of(problem, one, even_partition(blocks, one.chunks)) for one in found}
