"""The JSON form of a graph, and its hash."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.costmodel.graph import (
    Block,
    Instance,
    KernelSpec,
    ModelGraph,
    ModuleCall,
    Operator,
    OpKind,
    Parameter,
    Saved,
    Sharding,
    Size,
    TensorSpec,
)
from autoparallel.costmodel.graph_json import GraphFileError, graph_from_json, graph_hash, graph_to_json
from tests.toy_graphs import toy_transformer

NAMES = st.text("abc.:_0", min_size=1, max_size=6)
VALUES = NAMES.map("param:{}".format)  # others have to be made by an operator
SIZES = st.builds(Size, st.integers(0, 9), st.integers(0, 9))
COSTS = st.builds(Size, st.integers(0, 9), st.integers(0, 9), st.integers(0, 2))
SPECS = st.builds(
    TensorSpec, shape=st.lists(SIZES, max_size=3).map(tuple), dtype=st.sampled_from(["float32", "int64"])
)
PLACEMENTS = st.lists(st.sampled_from(["R", "P", "S0", "S1"]), max_size=3).map(tuple)


def tuples(of: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(of, max_size=2).map(tuple)


KERNELS = st.builds(
    KernelSpec,
    kind=st.sampled_from(OpKind),
    dtype=st.just("float32"),
    flops=COSTS,
    bytes_moved=COSTS,
    product=st.sampled_from(["", "bmnk"]),
    gradient_of=st.sampled_from(["", "input", "weight"]),
)
OPERATORS = st.builds(
    Operator,
    name=NAMES,
    target=NAMES,
    kind=st.sampled_from(OpKind),
    module=NAMES,
    inputs=tuples(VALUES),
    outputs=tuples(SPECS),
    forward=tuples(KERNELS),
    backward=tuples(KERNELS),
    saved=tuples(st.builds(Saved, value=NAMES, spec=SPECS)),
    shardings=tuples(st.builds(Sharding, inputs=PLACEMENTS, outputs=PLACEMENTS, divides=tuples(SIZES))),
    labels=tuples(NAMES),
    sizes=tuples(st.tuples(NAMES, SIZES)),
    causal=st.booleans(),
)
BLOCKS = st.builds(
    Block,
    name=NAMES,
    inputs=tuples(SPECS),
    outputs=tuples(VALUES),
    operators=tuples(OPERATORS),
    parameters=tuples(
        st.builds(
            Parameter,
            name=NAMES,
            shape=tuples(st.integers(1, 9)),
            dtype=st.just("float32"),
            trainable=st.booleans(),
            tied=st.sampled_from(["", "group"]),
        )
    ),
    buffers=tuples(st.tuples(NAMES, SPECS)),
    calls=tuples(
        st.builds(ModuleCall, module=NAMES, inputs=tuples(st.tuples(NAMES, NAMES)), outputs=tuples(NAMES))
    ),
)
LINKS = st.builds(Instance, block=st.just(0), path=NAMES, repeated=st.booleans(), sends=tuples(SPECS))
GRAPHS = st.builds(
    ModelGraph,
    name=NAMES,
    dtype=st.just("float32"),
    blocks=st.tuples(BLOCKS, BLOCKS),
    chain=st.tuples(LINKS, LINKS, LINKS).map(lambda links: (*links[:2], replace(links[2], block=1))),
    tokens_per_sample=st.integers(1, 9),
    has_loss=st.booleans(),
    pipeline_cuts=st.booleans(),
    warnings=tuples(NAMES),
)


@given(GRAPHS)
def test_a_graph_survives_json_and_gives_the_same_bytes_again(graph: ModelGraph) -> None:
    text = graph_to_json(graph)
    assert graph_from_json(text) == graph
    assert graph_to_json(graph_from_json(text)) == text


@given(GRAPHS)
def test_the_hash_does_not_see_names_dtypes_costs_and_shardings(graph: ModelGraph) -> None:
    def plain(op: Operator) -> Operator:
        return replace(op, name="x", shardings=(), saved=(), forward=(), backward=(), outputs=())

    blocks = tuple(
        replace(
            block,
            name="other",
            operators=tuple(map(plain, block.operators)),
            parameters=tuple(replace(p, dtype="bfloat16") for p in block.parameters),
        )
        for block in graph.blocks
    )
    other = replace(graph, name="other", dtype="bfloat16", blocks=blocks, has_loss=not graph.has_loss)
    assert graph_hash(other) == graph_hash(graph)


def test_graphs_of_other_lengths_go_along_and_leave_the_hash_as_it_is() -> None:
    short = toy_transformer()
    several = replace(short, other_lengths=(longer := toy_transformer(seq=64),))
    assert graph_from_json(graph_to_json(several)) == several
    assert several.of_length(64) == longer
    assert several.of_length(0) is several
    assert several.of_length(16) is None
    assert graph_hash(several) == graph_hash(short)


@given(GRAPHS)
def test_the_hash_sees_the_sequence_and_the_chain(graph: ModelGraph) -> None:
    assert graph_hash(replace(graph, tokens_per_sample=graph.tokens_per_sample + 1)) != graph_hash(graph)
    longer = (*graph.chain, Instance(block=0, path="", repeated=False))
    assert graph_hash(replace(graph, chain=longer)) != graph_hash(graph)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "3", '{"schema": 1}'])
def test_what_is_not_a_graph_is_an_error_that_says_how_to_make_one(text: str) -> None:
    with pytest.raises(GraphFileError, match="not a saved graph"):
        graph_from_json(text)


def _text() -> str:
    block = Block(name="b", inputs=(), outputs=(), operators=())
    return graph_to_json(
        ModelGraph(
            name="g",
            dtype="float32",
            blocks=(block,),
            chain=(Instance(block=0, path="", repeated=False),),
            tokens_per_sample=1,
            has_loss=False,
            pipeline_cuts=False,
        )
    )


def test_a_newer_schema_asks_for_an_upgrade() -> None:
    with pytest.raises(GraphFileError, match="upgrade"):
        graph_from_json(json.dumps(json.loads(_text()) | {"schema": 2}))


@pytest.mark.parametrize("change", [{"chain": [[7, "", False, []]]}, {"blocks": [{}]}, {"chain": 3}])
def test_a_damaged_graph_is_an_error(change: dict[str, object]) -> None:
    with pytest.raises(GraphFileError, match="damaged"):
        graph_from_json(json.dumps(json.loads(_text()) | change))
