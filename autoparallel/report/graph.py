"""A captured model to look at: rows by block and by operator, an HTML page, and Graphviz's DOT."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autoparallel.costmodel.graph import ITEM_BYTES, Block, KernelSpec, ModelGraph, Operator, TensorSpec
from autoparallel.report.numbers import count, significant
from autoparallel.report.page import environment, resource


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What something does in one training step of one micro-batch."""

    forward_flops: int
    backward_flops: int
    moved_bytes: int  # by all kernels, forward and backward
    saved_bytes: int  # activations that autograd keeps

    def __add__(self, other: Work) -> Work:
        return Work(
            forward_flops=self.forward_flops + other.forward_flops,
            backward_flops=self.backward_flops + other.backward_flops,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            saved_bytes=self.saved_bytes + other.saved_bytes,
        )

    def __mul__(self, factor: int) -> Work:
        return Work(
            forward_flops=self.forward_flops * factor,
            backward_flops=self.backward_flops * factor,
            moved_bytes=self.moved_bytes * factor,
            saved_bytes=self.saved_bytes * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """One distinct block: how often it stands in the chain, where, and what one of it does."""

    index: int
    block: Block
    times: int
    where: str
    parameters: int
    work: Work


def operator_work(op: Operator, micro_batch: int) -> Work:
    """What one operator does."""
    return Work(
        forward_flops=_flops(op.forward, micro_batch),
        backward_flops=_flops(op.backward, micro_batch),
        moved_bytes=sum(
            kernel.bytes_moved.at(micro_batch) * kernel.count.at(micro_batch)
            for kernel in (*op.forward, *op.backward)
        ),
        saved_bytes=sum(s.spec.numel(micro_batch) * ITEM_BYTES.get(s.spec.dtype, 4) for s in op.saved),
    )


def block_rows(graph: ModelGraph, micro_batch: int) -> list[BlockRow]:
    """The distinct blocks, in the order in which they first stand in the chain."""
    times = Counter(link.block for link in graph.chain)
    rows = []
    for index in times:
        block = graph.blocks[index]
        paths = [link.path for link in graph.chain if link.block == index and link.path]
        rows.append(
            BlockRow(
                index=index,
                block=block,
                times=times[index],
                where=_where(paths),
                parameters=sum(p.numel for p in block.parameters),
                work=sum((operator_work(op, micro_batch) for op in block.operators), _NOTHING),
            )
        )
    return rows


_NOTHING = Work(forward_flops=0, backward_flops=0, moved_bytes=0, saved_bytes=0)


def total_work(rows: Sequence[BlockRow]) -> Work:
    """What the whole model does."""
    return sum((row.work * row.times for row in rows), _NOTHING)


def size_words(spec: TensorSpec, micro_batch: int) -> str:
    """`bfloat16 2x16x32`."""
    return f"{spec.dtype} {'x'.join(str(size.at(micro_batch)) for size in spec.shape) or 'scalar'}"


def flops_words(flops: float) -> str:
    """`1.23 Gflop`; `0` for none."""
    return _scaled(flops, ("", "k", "M", "G", "T", "P", "E"), 1000.0, "flop")


def bytes_words(size: float) -> str:
    """`1.5 GiB`; `0` for none."""
    return _scaled(size, ("", "Ki", "Mi", "Gi", "Ti", "Pi"), 1024.0, "B")


def render_graph(graph: ModelGraph, micro_batch: int) -> str:
    """One self-contained HTML page: the blocks, and the operators of each."""
    rows = block_rows(graph, micro_batch)
    blocks = [
        {
            "name": row.block.name,
            "times": row.times,
            "where": row.where,
            "parameters": count(row.parameters),
            "work": _words(row.work),
            "operators": [
                {
                    "name": op.name,
                    "kind": op.kind.value,
                    "rounds": max((kernel.count.at(micro_batch) for kernel in op.forward), default=1),
                    "module": op.module,
                    "inputs": ", ".join(op.inputs),
                    "outputs": ", ".join(size_words(spec, micro_batch) for spec in op.outputs),
                    "work": _words(operator_work(op, micro_batch)),
                    "kept": ", ".join(
                        f"{s.value or 'its own'} ({size_words(s.spec, micro_batch)})" for s in op.saved
                    ),
                }
                for op in row.block.operators
            ],
        }
        for row in rows
    ]
    context = {
        "style": resource("style.css"),
        "name": graph.name,
        "micro_batch": micro_batch,
        "tokens": graph.tokens_per_sample,
        "parameters": count(graph.parameter_count),
        "total": _words(total_work(rows)),
        "chain": [
            {"name": graph.blocks[link.block].name, "path": link.path, "repeated": link.repeated}
            for link in graph.chain
        ],
        "blocks": blocks,
        "warnings": graph.warnings,
    }
    return environment().get_template("graph.html.j2").render(context)


def graph_dot(graph: ModelGraph, micro_batch: int) -> str:
    """The distinct blocks as Graphviz's DOT: a cluster each, an arrow for each tensor that an operator reads."""
    lines = ["digraph model {", "  rankdir=TB;", '  node [shape=box, fontname="sans-serif", fontsize=10];']
    for row in block_rows(graph, micro_batch):
        lines += _cluster(row, micro_batch)
    return "\n".join([*lines, "}"]) + "\n"


def _cluster(row: BlockRow, micro_batch: int) -> list[str]:
    title = f"{row.block.name}\\n{row.times} x {row.where}" if row.where else row.block.name
    lines = [f"  subgraph cluster_{row.index} {{", f"    label={_quoted(title)};"]
    makers: dict[str, str] = {}
    for position, spec in enumerate(row.block.inputs):
        node = f"b{row.index}_input_{position}"
        makers[f"input:{position}"] = node
        lines.append(f"    {node} [label={_quoted(f'input {position}')}, shape=ellipse];")
        makers[f"input:{position}:size"] = size_words(spec, micro_batch)
    for op in row.block.operators:
        node = f"b{row.index}_{op.name}"
        work = operator_work(op, micro_batch)
        label = "\\n".join(
            filter(None, (op.name, op.module, flops_words(work.forward_flops + work.backward_flops)))
        )
        lines.append(f"    {_quoted(node)} [label={_quoted(label)}];")
        for name in dict.fromkeys(op.inputs):
            if name in makers:
                said = makers.get(f"{name}:size", "")
                lines.append(
                    f"    {_quoted(makers[name])} -> {_quoted(node)} [label={_quoted(said)}, fontsize=8];"
                )
        for position, spec in enumerate(op.outputs):
            value = f"{op.name}.{position}" if position else op.name
            makers |= {value: node, f"{value}:size": size_words(spec, micro_batch)}
    return [*lines, "  }"]


def _quoted(text: str) -> str:
    return '"' + text.replace('"', r"\"") + '"'


def _flops(kernels: Sequence[KernelSpec], micro_batch: int) -> int:
    return sum(kernel.flops.at(micro_batch) * kernel.count.at(micro_batch) for kernel in kernels)


def _where(paths: Sequence[str]) -> str:
    """`model.layers.*` for several, numbers starred."""
    starred = [".".join("*" if part.isdigit() else part for part in path.split(".")) for path in paths]
    return paths[0] if len(paths) == 1 else ", ".join(dict.fromkeys(starred))


def _words(work: Work) -> dict[str, str]:
    return {
        "forward": flops_words(work.forward_flops),
        "backward": flops_words(work.backward_flops),
        "moved": bytes_words(work.moved_bytes),
        "saved": bytes_words(work.saved_bytes),
    }


def _scaled(value: float, prefixes: Sequence[str], step: float, unit: str) -> str:
    if not value:
        return "0"
    power = 0
    while value >= step and power < len(prefixes) - 1:
        value, power = value / step, power + 1
    return f"{significant(value)} {prefixes[power]}{unit}"
