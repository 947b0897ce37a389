"""Placements of captured transformers models: column-then-row comes out of the solve, never out of a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autoparallel.costmodel.graph import ModelGraph, OpKind, Sharding
from autoparallel.costmodel.price import Pricer
from autoparallel.costmodel.program import Collective
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.rules import Rules
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.search.bounds.prices import PriceBook
from autoparallel.planner.sharding.plan import TensorPlan
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Pipeline, Shard, Strategy
from autoparallel.profiles.load import load_cluster, parse_cluster
from autoparallel.runtime.tensor.rules import resolve_rules
from tests.own_blocks import OwnModel, WithoutNorm

# Fused query, key and value sharded each: what older DTensor rules do not keep apart.
needs_parts = pytest.mark.skipif(not Rules().knows_parts(), reason="torch 2.12 or newer")
CLUSTER = load_cluster("h100-sxm:1x8")
LAYERS, LENGTH = 2, 16


def captured(model: type[torch.nn.Module], config: object, name: str) -> ModelGraph:
    with torch.device("meta"):
        module = model(config).train()
    ids = torch.zeros((2, LENGTH), dtype=torch.long, device="meta")
    return capture(module, {"input_ids": ids, "labels": ids}, name=name)


@pytest.fixture(scope="module")
def llama() -> ModelGraph:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=256, use_cache=False,
    )  # fmt: skip
    return captured(LlamaForCausalLM, config, "llama")


@pytest.fixture(scope="module")
def gpt2() -> ModelGraph:
    config = GPT2Config(
        n_embd=64, n_layer=LAYERS, n_head=4, n_positions=32, vocab_size=256, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return captured(GPT2LMHeadModel, config, "gpt2")


def strategy(tp: int, *, sequence: bool) -> Strategy:
    return Strategy(
        batch=Batch(global_=1, micro=1), mesh=Mesh(tp=tp), shard=Shard(sequence_parallel=sequence),
        pipeline=Pipeline(stage_blocks=(LAYERS,)), execution=Execution(kernels="eager"),
    )  # fmt: skip


@pytest.mark.parametrize("sequence", [False, True])
def test_llama_comes_out_as_column_then_row(llama: ModelGraph, sequence: bool) -> None:
    plan = Expander(llama, CLUSTER).tensor_plan(strategy(4, sequence=sequence))
    columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    found = {n.split(".")[-2]: p for n, p in plan.blocks[1].params if "proj" in n}
    assert found == {n: "S0" if n in columns else "S1" for n in found}, plan.rules


@needs_parts
@pytest.mark.parametrize("sequence", [False, True])
def test_gpt2_comes_out_as_column_then_row(gpt2: ModelGraph, sequence: bool) -> None:
    """Its Conv1D holds (in, out): columns are dim 1, and those of query, key and value are sharded each."""
    plan = Expander(gpt2, CLUSTER).tensor_plan(strategy(4, sequence=sequence))
    found = {n: p for n, p in plan.blocks[1].params if n.endswith("weight") and p != "R"}
    assert found == {
        "attn.c_attn.weight": "S1/3", "attn.c_proj.weight": "S0",
        "mlp.c_fc.weight": "S1", "mlp.c_proj.weight": "S0",
    }, plan.rules  # fmt: skip


@needs_parts
@pytest.mark.parametrize("sequence", [False, True])
def test_a_gpt2_layer_communicates_twice_each_way(gpt2: ModelGraph, sequence: bool) -> None:
    work = Expander(gpt2, CLUSTER).work(strategy(2, sequence=sequence), 1, "none")
    for steps in (work.forward, (*work.backward_input, *work.backward_weight)):
        found = Counter(s.op.value for s in steps if isinstance(s, Collective))
        assert found == ({"all_gather": 2, "reduce_scatter": 2} if sequence else {"all_reduce": 2})


@needs_parts
def test_attention_heads_are_sharded(gpt2: ModelGraph) -> None:
    plan = Expander(gpt2, CLUSTER).tensor_plan(strategy(4, sequence=False)).blocks[1]
    chosen = {
        op.kind: sharding for op, sharding in zip(gpt2.blocks[1].operators, plan.shardings, strict=True)
    }
    attention = chosen[OpKind.ATTENTION]
    assert attention is not None
    assert attention.inputs == ("S1", "S1", "S1")


def test_a_sequence_parallel_llama_layer_gathers_twice_and_scatters_twice(llama: ModelGraph) -> None:
    work = Expander(llama, CLUSTER).work(strategy(2, sequence=True), 1, "none")
    for steps in (work.forward, (*work.backward_input, *work.backward_weight)):
        found = Counter(s.op.value for s in steps if isinstance(s, Collective))
        assert found == {"all_gather": 2, "reduce_scatter": 2}


def test_pins_that_readers_share_stand_at_their_common_parent(llama: ModelGraph) -> None:
    plan = Expander(llama, CLUSTER).tensor_plan(strategy(2, sequence=True))
    gathers = [r.module for r in plan.blocks[1].reshards if (r.before, r.after) == ("S1", "R")]
    assert not any(module.endswith("_proj") for module in gathers), plan.rules


def test_rules_name_repeated_blocks_with_a_star(llama: ModelGraph) -> None:
    plan = Expander(llama, CLUSTER).tensor_plan(strategy(2, sequence=True))
    modules = [rule.module for rule in plan.rules]
    assert "model.layers.*.self_attn.q_proj" in modules
    assert len(modules) == len(set(modules))


class _Scaled(torch.nn.Module):
    """A block with a parameter of its own, which is sharded with those of its children."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.scale = torch.nn.Parameter(torch.empty(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.up(x) * self.scale
        return x + self.down(hidden)  # type: ignore[no-any-return]


def test_a_star_stands_for_blocks_alone_where_other_modules_stand_in_their_list() -> None:
    with torch.device("meta"):
        module = torch.nn.Sequential()
        module.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), *(_Scaled(64) for _ in range(LAYERS)))
    graph = capture(module, torch.zeros(2, 8, device="meta"), name="scaled")
    rules = Expander(graph, CLUSTER).tensor_plan(strategy(2, sequence=False)).rules
    held = {rule.path: set(rule.params) for rule in resolve_rules(module, rules, 2)}
    assert held["layers.1"] == held["layers.2"] == {"scale"}, rules
    assert held["layers.1.up"] == held["layers.2.up"] == {"weight", "bias"}, rules


@pytest.fixture(scope="module")
def raw() -> ModelGraph:
    """Queries, keys and values read the hidden state itself, which each of them has to gather."""
    with torch.device("meta"):
        module = OwnModel(WithoutNorm, hidden=4096, heads=32, vocabulary=1024)
        ids = torch.zeros((2, 4096), dtype=torch.long)
    return capture(module.train(), {"input_ids": ids, "labels": ids}, name="raw")


def test_plans_know_what_context_parallelism_sends(raw: ModelGraph) -> None:
    """On a network so slow that whole keys are cheaper for tp alone, they are not where cp passes them around."""
    cluster = parse_cluster(
        {
            "schema": 1, "name": "slow", "group": [{"device": "gb200", "nodes": 8, "devices_per_node": 4}],
            "level": [
                {"name": "nvlink", "size": 4, "bytes_per_s": 9e11, "latency_s": 3.4e-6},
                {"name": "network", "bytes_per_s": 3.125e8, "nics": 1, "latency_s": 5e-5},
            ],
        },
        "slow",
    )  # fmt: skip
    expander = Expander(raw, cluster)
    alone = replace(
        strategy(8, sequence=True), batch=Batch(global_=4, micro=1), mesh=Mesh(tp=8, dp_replicate=4)
    )
    shared = replace(alone, batch=Batch(global_=1, micro=1), mesh=Mesh(tp=8, cp=4))
    whole = expander.tensor_plan(alone)
    assert not all("S1" in sharding.inputs for sharding in _attention(raw, whole) if sharding)
    assert all(
        "S1" in sharding.inputs for sharding in _attention(raw, expander.tensor_plan(shared)) if sharding
    )
    book = PriceBook(expander=expander, pricer=Pricer(expander.cluster), device=cluster.device)
    own_s, other_s = (
        price.forward_s + price.backward_s
        for price in (
            book.block_price(one, 1, "none") for one in (shared, replace(shared, tensor=whole.rules))
        )
    )
    assert own_s < 0.5 * other_s


def _attention(graph: ModelGraph, plan: TensorPlan) -> list[Sharding | None]:
    operators = graph.blocks[1].operators
    return [
        sharding for operator, sharding in zip(operators, plan.blocks[1].shardings, strict=True)
        if operator.kind is OpKind.ATTENTION
    ]  # fmt: skip
