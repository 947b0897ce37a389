from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.errors import UserError
from autoparallel.planner.plan import plan
from autoparallel.planner.problem import Problem
from autoparallel.planner.strategy.file import (
    apply_settings,
    parse_strategy,
    strategy_from_constraints,
    strategy_to_constraints,
)
from autoparallel.planner.strategy.stacks import SOFTWARE_KEYS, runs_of, stack_values, told, with_stack
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Strategy
from autoparallel.planner.strategy.write import literal, strategy_text
from autoparallel.profiles.load import load_cluster
from autoparallel.profiles.stacks import load_stack, stack_names
from tests.toy_graphs import toy_transformer

DTYPES = ("fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")
GRAPH = toy_transformer(layers=4, hidden=256, heads=4, seq=256, vocab=1024)


def running(stack: str, **flags: Any) -> Execution:
    return replace(told(Execution(), {"execution.stack": stack}), **flags)


@pytest.mark.parametrize("name", stack_names())
def test_every_stack_that_ships_says_what_a_strategy_knows_and_where_it_was_read(name: str) -> None:
    stack = load_stack(name)
    assert stack.name == name
    assert all(said.source for said in (*stack.execution.values(), *stack.runs.values()))
    for dtype in DTYPES:
        assert parse_strategy({"execution": stack_values(name, dtype)}, name=name).constraints is not None
    schedules = runs_of(name).schedules
    assert schedules is None or "none" in schedules


@given(
    name=st.sampled_from(stack_names()),
    dtype=st.sampled_from(DTYPES),
    flipped=st.sets(st.sampled_from(SOFTWARE_KEYS), max_size=3),
)
def test_what_is_written_of_software_is_what_is_read(name: str, dtype: str, flipped: set[str]) -> None:
    """A file names its stack, and flags that differ from it alone."""
    chosen = told(Execution(), {"execution.stack": name, "execution.dtype": dtype})
    chosen = replace(chosen, **{key: not getattr(chosen, key) for key in flipped})
    strategy = Strategy(batch=Batch(global_=8, micro=1), mesh=Mesh(dp_replicate=8), execution=chosen)
    text = strategy_text(strategy, {}, {}, {})
    import tomllib

    read = tomllib.loads(text)
    assert {*read["execution"]} & {*SOFTWARE_KEYS} == flipped, text
    back = strategy_from_constraints(parse_strategy(read, name="file").constraints)
    assert back.execution == chosen, text
    assert strategy_from_constraints(strategy_to_constraints(strategy)) == strategy


def test_single_keys_override_the_stack_and_dtypes_switch_properties_off() -> None:
    constraints = apply_settings({}, ["execution.stack=nemo", "execution.late_gathers=false"])
    assert not with_stack(constraints)["execution.late_gathers"]
    assert with_stack(constraints)["execution.async_tp"]
    assert "execution.async_tp" not in with_stack({**constraints, "execution.dtype": "nvfp4"})
    assert with_stack({**constraints, "execution.dtype": "fp16"})["execution.grad_dtype"] == "fp16"


def test_mistakes_in_stacks_say_what_and_where(tmp_path: Path) -> None:
    def stack(name: str, *lines: str) -> str:
        path = tmp_path / f"{name}.toml"
        path.write_text("\n".join((f'name = "{name}"', 'says = "mine"', *lines)))
        return str(path)

    source = 'source = "I wrote it"'
    cases = {
        "megatron-cor": "did you mean `megatron-core`",
        str(tmp_path / "none.toml"): "no such stack file",
        stack("a", "[execution]", f"late_gather = {{ value = true, {source} }}"): "late_gather",
        stack("b", "[execution]", "late_gathers = { value = true }"): "source",
        stack("c", "[execution]", f'late_gathers = {{ value = "yes", {source} }}'): "true or false",
        stack("d", 'of = "d.toml"'): "leads back",
    }
    for name, said in cases.items():
        with pytest.raises(UserError, match=said):
            with_stack({"execution.stack": name})
    wrong = stack("e", "[runs]", f"schedules = {{ value = {literal(['2f2b'])}, {source} }}")
    with pytest.raises(UserError, match="2f2b"):
        runs_of(wrong)


@pytest.mark.parametrize(
    ("stack", "given", "schedules", "zeros"),
    [
        ("megatron-core", {}, {"none", "1f1b", "interleaved-1f1b"}, {0, 1}),
        ("deepspeed", {}, {"none"}, {0, 1, 2, 3}),
        ("megatron-core", {"pipeline.schedule": "zbv"}, {"zbv"}, {0, 1}),
        ("nanotron", {"shard.zero": 3}, {"none", "gpipe", "1f1b"}, {3}),
    ],
)
def test_a_search_keeps_to_what_the_software_has_unless_told_otherwise(
    stack: str, given: dict[str, object], schedules: set[str], zeros: set[int]
) -> None:
    cluster = load_cluster("a100-pcie-80gb:2x2")
    fixed = {"mesh.pp": 2, **given} if "none" not in schedules else given
    found = plan(
        Problem(graph=GRAPH, cluster=cluster, global_batch=8, constraints=fixed, execution=running(stack))
    )
    every = [found.strategy, *(other.strategy for other in found.alternatives)]
    assert {s.pipeline.schedule for s in every} <= schedules
    assert {s.shard.zero for s in every} <= {0, *zeros}
    assert found.strategy.execution == running(stack)


def test_a_stack_without_any_legal_strategy_is_named() -> None:
    cluster = load_cluster("a100-pcie-80gb:2x2")
    problem = Problem(
        graph=GRAPH,
        cluster=cluster,
        global_batch=8,
        constraints={"mesh.pp": 2},
        execution=running("deepspeed"),
    )
    with pytest.raises(UserError, match=r'execution.stack = "deepspeed".*schedules: none'):
        plan(problem)
