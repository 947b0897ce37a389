"""Fusion: units are convex and complete, never fuse what the rule forbids, and keep what they cannot recompute."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.costmodel.block_index import BlockIndex, index_block
from autoparallel.costmodel.fusion import FUSIBLE, fuse
from autoparallel.costmodel.graph import Block, OpKind, Parameter
from tests.toy_graphs import DTYPE, linear, memory_op, spec, toy_transformer

SEQ, WIDTH = 8, 16


def block_of(*operators, outputs, parameters=()) -> Block:
    return Block(
        name="B", inputs=(spec(SEQ, WIDTH),), outputs=outputs, operators=operators,
        parameters=tuple(Parameter(name=n, shape=(WIDTH, WIDTH), dtype=DTYPE) for n in parameters),
    )  # fmt: skip


def indexed(block: Block, *, dropout: bool = True) -> BlockIndex:
    return index_block(block, carried=(0,), dropout=dropout)


def op(name, module, *inputs, kind=OpKind.ELEMENTWISE, saved=()):
    return memory_op(name, module, inputs, (SEQ, WIDTH), kind=kind, saved=saved)


def groups(index: BlockIndex, kernels: str, **kwargs) -> list[tuple[str, ...]]:
    ops = index.block.operators
    return [tuple(ops[i].name for i in unit.ops) for unit in fuse(index, kernels, **kwargs)]


def test_eager_runs_every_operator_alone() -> None:
    index = indexed(toy_transformer().blocks[1])
    assert all(len(g) == 1 for g in groups(index, "eager"))


def test_fused_joins_an_activation_with_its_parent_but_not_two_modules_with_parameters() -> None:
    up = linear("up", "mlp.up", "input:0", SEQ, WIDTH, WIDTH)
    gate = linear("gate", "mlp.gate", "input:0", SEQ, WIDTH, WIDTH)
    silu = op("silu", "mlp.act", "gate", saved=("gate",))
    mul = op("mul", "mlp", "silu", "up", saved=("silu", "up"))
    add = op("add", "", "input:0", "mul")
    block = block_of(
        up, gate, silu, mul, add, outputs=("add",), parameters=("mlp.up.weight", "mlp.gate.weight")
    )
    assert ("silu", "mul") in groups(indexed(block), "fused")
    assert ("silu", "mul", "add") in groups(indexed(block), "compiled")


def test_dropout_fuses_with_the_addition_that_reads_it_across_modules() -> None:
    drop = op("drop", "attn", "input:0", kind=OpKind.DROPOUT)
    add = op("add", "", "input:0", "drop")
    block = block_of(drop, add, outputs=("add",), parameters=("attn.o.weight",))
    assert groups(indexed(block), "fused") == [("drop", "add")]


def test_a_path_through_an_outside_operator_keeps_two_operators_apart() -> None:
    a = op("a", "m", "input:0")
    product = linear("p", "m.p", "a", SEQ, WIDTH, WIDTH)
    b = op("b", "m", "a", "p")
    block = block_of(a, product, b, outputs=("b",), parameters=("m.p.weight",))
    assert groups(indexed(block), "compiled") == [("a",), ("p",), ("b",)]


def test_a_change_of_layout_ends_a_unit() -> None:
    block = block_of(op("a", "m", "input:0"), op("b", "m", "a"), outputs=("b",))
    assert groups(indexed(block), "fused") == [("a", "b")]
    assert groups(indexed(block), "fused", barriers={"a"}) == [("a",), ("b",)]


def test_a_fused_unit_keeps_its_inputs_instead_of_what_it_computes_inside() -> None:
    a = op("a", "m", "input:0", saved=("input:0",))
    b = op("b", "m", "a", saved=("a",))
    (unit,) = fuse(indexed(block_of(a, b, outputs=("b",))), "fused")
    assert [s.value for _, s in unit.saved] == ["input:0"]


def test_a_value_that_a_product_keeps_stays_kept() -> None:
    a = op("a", "m", "input:0", saved=())
    b = op("b", "m", "a", saved=("b",))
    product = linear("p", "m.p", "b", SEQ, WIDTH, WIDTH)
    units = fuse(indexed(block_of(a, b, product, outputs=("p",), parameters=("m.p.weight",))), "fused")
    assert "b" in [s.value for unit in units for _, s in unit.saved]


@pytest.mark.parametrize("kernels", ["eager", "fused", "compiled"])
@settings(max_examples=60)
@given(data=st.data())
def test_units_cover_every_operator_once_in_an_order_that_can_run(kernels: str, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    names, operators = ["input:0"], []
    for i in range(count):
        sources = tuple(data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)))
        module = data.draw(st.sampled_from(["", "m", "m.act", "n"]))
        if data.draw(st.booleans()):
            operators.append(op(f"o{i}", module, *sources))
        else:
            operators.append(linear(f"o{i}", "n", sources[0], SEQ, WIDTH, WIDTH))
        names.append(f"o{i}")
    block = block_of(*operators, outputs=(names[-1],), parameters=("n.weight",))
    units = fuse(indexed(block), kernels)
    assert sorted(i for unit in units for i in unit.ops) == list(range(count))
    made = {"input:0", "param:n.weight"}
    for unit in units:
        assert set(unit.inputs) <= made, groups(indexed(block), kernels)
        made |= {block.operators[i].name for i in unit.ops}
        if unit.fused:
            assert all(block.operators[i].kind in FUSIBLE for i in unit.ops)
