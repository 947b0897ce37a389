"""A hand-built recommender, free of torch: linear layers around embedding tables of one look-up each."""

from __future__ import annotations

from autoparallel.costmodel.graph import (
    Block,
    Instance,
    KernelSpec,
    ModelGraph,
    Operator,
    OpKind,
    Parameter,
    Sharding,
    Size,
    TensorSpec,
)
from tests.toy_graphs import DTYPE, linear, spec


def _table(rows: int, dim: int) -> Block:
    moved = 2 * dim
    op = Operator(
        name="embedding", target="aten.embedding", kind=OpKind.EMBEDDING, module="",
        inputs=("param:weight", "input:0"), outputs=(spec(1, dim),),
        forward=(
            KernelSpec(kind=OpKind.EMBEDDING, dtype=DTYPE, flops=Size(0, 0), bytes_moved=Size(0, 2 * moved)),
        ),
        backward=(
            KernelSpec(
                kind=OpKind.EMBEDDING, dtype=DTYPE, flops=Size(0, 0), bytes_moved=Size(2 * rows * dim, moved),
                gradient_of="weight",
            ),
        ),
        shardings=(Sharding(inputs=("R", "R"), outputs=("R",)),),
    )  # fmt: skip
    indices = TensorSpec(shape=(Size(0, 1),), dtype="int64")
    return Block(
        name=f"Table{rows}", inputs=(indices,), outputs=("embedding",), operators=(op,),
        parameters=(Parameter(name="weight", shape=(rows, dim), dtype=DTYPE),),
    )  # fmt: skip


def _dense(name: str, fan_in: int, fan_out: int) -> Block:
    return Block(
        name=name, inputs=(spec(1, fan_in),), outputs=("fc",),
        operators=(linear("fc", "fc", "input:0", 1, fan_in, fan_out),),
        parameters=(Parameter(name="fc.weight", shape=(fan_out, fan_in), dtype=DTYPE),),
    )  # fmt: skip


def toy_recommender(*tables: int, dim: int = 64, width: int = 256) -> ModelGraph:
    """A bottom layer, tables with so many rows each (`tables.0`, `tables.1`, …), and a top layer."""
    sizes = tuple(dict.fromkeys(tables))
    blocks = (_dense("Bottom", width, dim), *(_table(rows, dim) for rows in sizes), _dense("Top", dim, width))
    carried = (spec(1, dim),)
    chain = (
        Instance(block=0, path="bottom", repeated=False, sends=carried),
        *(
            Instance(block=1 + sizes.index(rows), path=f"tables.{i}", repeated=False, sends=carried)
            for i, rows in enumerate(tables)
        ),
        Instance(block=len(blocks) - 1, path="top", repeated=False, sends=(spec(1, width),)),
    )
    return ModelGraph(
        name="toy-recommender", dtype=DTYPE, blocks=blocks, chain=chain, tokens_per_sample=1, has_loss=False,
        pipeline_cuts=False,
    )  # fmt: skip
