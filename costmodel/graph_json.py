"""The JSON form of a `ModelGraph`, and the hash by which a plan knows the model it was made for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from autoparallel.costmodel.block_index import output_names
from autoparallel.costmodel.graph import (
    ITEM_BYTES,
    ONCE,
    SCHEMA,
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
    Written,
)
from autoparallel.errors import UserError

# Kinds that make an architecture what it is. Casts, views and copies come and go with dtype and device.
_HASHED_KINDS = frozenset(
    {
        OpKind.GEMM,
        OpKind.GROUPED_GEMM,
        OpKind.CONV,
        OpKind.ATTENTION,
        OpKind.EMBEDDING,
        OpKind.RECURRENT,
        OpKind.LEAF,
    }
)


class GraphFileError(UserError):
    """A saved graph cannot be read."""


def graph_to_json(graph: ModelGraph) -> str:
    """The graph as JSON text: `graph_from_json` gives an equal graph back. The same graph gives the same bytes."""
    return json.dumps(_graph(graph), separators=(",", ":")) + "\n"


def graph_from_json(text: str) -> ModelGraph:
    """The graph that `graph_to_json` wrote. Raises GraphFileError for anything else."""
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise GraphFileError(f"not a saved graph: not valid JSON: {error}") from error
    if not isinstance(raw, dict) or "schema" not in raw or "chain" not in raw:
        raise GraphFileError("not a saved graph: write one with --save-graph GRAPH.json")
    if raw["schema"] != SCHEMA:
        raise GraphFileError(
            f"schema {raw['schema']} of the saved graph is not {SCHEMA}: "
            + (
                "upgrade autoparallel"
                if str(raw["schema"]) > str(SCHEMA)
                else "save it again with --save-graph"
            )
        )
    try:
        return _read_graph(raw)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise GraphFileError(
            f"the saved graph is damaged ({type(error).__name__}: {error}): save it again with --save-graph"
        ) from error


def graph_hash(graph: ModelGraph) -> str:
    """Sixteen hex digits that tell whether two graphs are of the same architecture.

    Covers: the chain (module paths, what is repeated); each block's parameters (name, shape, trainable, tied);
    and, in order, its matrix products, convolutions, attentions, embeddings and leaves (module, kind, size
    letters with their sizes, causal or not). With them the sequence length. Does not cover: the model's name,
    dtypes, devices, the micro-batch, the loss, costs, saved bytes, legal shardings and graphs of other lengths. So an architecture
    captured from float32 weights in a process and from a bfloat16 configuration hash equal.
    """
    blocks = [
        {
            "parameters": [[p.name, p.shape, p.trainable, p.tied] for p in block.parameters],
            "operators": [
                [op.kind, op.module, [[k, s.const, s.per_sample] for k, s in op.sizes], op.causal]
                for op in block.operators
                if op.kind in _HASHED_KINDS
            ],
        }
        for block in graph.blocks
    ]
    # Blocks that differ in nothing hashed are one, whatever else told them apart.
    chain = [[blocks[link.block], link.path, link.repeated] for link in graph.chain]
    digest = hashlib.sha256(json.dumps([graph.tokens_per_sample], separators=(",", ":")).encode())
    for link in chain:
        digest.update(json.dumps(link, separators=(",", ":")).encode())
    return digest.hexdigest()[:16]


# -- writing: sizes are an integer where they are constant, else [const, per_sample], with per_pair where that is not 0


def _size(size: Size) -> Any:
    if size.per_pair:
        return [size.const, size.per_sample, size.per_pair]
    return [size.const, size.per_sample] if size.per_sample else size.const


def _spec(spec: TensorSpec) -> Any:
    return [spec.dtype, [_size(s) for s in spec.shape]]


def _kernel(kernel: KernelSpec) -> Any:
    return [
        kernel.kind, kernel.dtype, _size(kernel.flops), _size(kernel.bytes_moved), kernel.product, kernel.gradient_of,
        *([_size(kernel.count)] if kernel.count != ONCE else []),
    ]  # fmt: skip


def _operator(op: Operator) -> dict[str, Any]:
    return {
        "name": op.name,
        "target": op.target,
        "kind": op.kind,
        "module": op.module,
        "inputs": op.inputs,
        "outputs": [_spec(s) for s in op.outputs],
        "forward": [_kernel(k) for k in op.forward],
        "backward": [_kernel(k) for k in op.backward],
        "saved": [[s.value, _spec(s.spec)] for s in op.saved],
        "shardings": [[s.inputs, s.outputs, [_size(d) for d in s.divides]] for s in op.shardings],
        "labels": op.labels,
        "sizes": [[letter, _size(size)] for letter, size in op.sizes],
        "causal": op.causal,
    }


def _graph(graph: ModelGraph) -> dict[str, Any]:
    return {
        "schema": graph.schema,
        "name": graph.name,
        "dtype": graph.dtype,
        "tokens_per_sample": graph.tokens_per_sample,
        "has_loss": graph.has_loss,
        "pipeline_cuts": graph.pipeline_cuts,
        "warnings": graph.warnings,
        **({"dropout": graph.dropout} if graph.dropout else {}),
        **({"differentiates": True} if graph.differentiates else {}),
        **({"written": [[w.name, w.from_samples] for w in graph.written]} if graph.written else {}),
        "blocks": [
            {
                "name": block.name,
                "inputs": [_spec(s) for s in block.inputs],
                "outputs": block.outputs,
                "operators": [_operator(op) for op in block.operators],
                "parameters": [[p.name, p.shape, p.dtype, p.trainable, p.tied] for p in block.parameters],
                "buffers": [[name, _spec(s)] for name, s in block.buffers],
                "calls": [[c.module, c.inputs, c.outputs] for c in block.calls],
            }
            for block in graph.blocks
        ],
        "chain": [[i.block, i.path, i.repeated, [_spec(s) for s in i.sends]] for i in graph.chain],
        **(
            {"other_lengths": [_graph(other) for other in graph.other_lengths]} if graph.other_lengths else {}
        ),
    }


# -- reading ------------------------------------------------------------------------------------------------------


def _whole(raw: Any) -> int:
    if type(raw) is not int:
        raise ValueError(f"{raw!r} is not a whole number")
    return raw


def _word(raw: Any) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"{raw!r} is not a name")
    return raw


def _words(raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list):
        raise ValueError(f"{raw!r} is not a list of names")
    return tuple(map(_word, raw))


def _dtype(raw: Any) -> str:
    if raw not in ITEM_BYTES:
        raise ValueError(f"{raw!r} is not a dtype")
    return str(raw)


def _read_size(raw: Any) -> Size:
    return Size(*map(_whole, raw)) if isinstance(raw, list) else Size(_whole(raw))


def _read_spec(raw: Any) -> TensorSpec:
    dtype, shape = raw
    return TensorSpec(shape=tuple(map(_read_size, shape)), dtype=_dtype(dtype))


def _read_kernel(raw: Any) -> KernelSpec:
    kind, dtype, flops, moved, product, gradient, *count = raw
    return KernelSpec(
        kind=OpKind(kind),
        dtype=_dtype(dtype),
        flops=_read_size(flops),
        bytes_moved=_read_size(moved),
        product=_word(product),
        gradient_of=_word(gradient),
        count=_read_size(*count) if count else ONCE,
    )


def _read_operator(raw: Mapping[str, Any]) -> Operator:
    return Operator(
        name=_word(raw["name"]),
        target=_word(raw["target"]),
        kind=OpKind(raw["kind"]),
        module=_word(raw["module"]),
        inputs=_words(raw["inputs"]),
        outputs=tuple(map(_read_spec, raw["outputs"])),
        forward=tuple(map(_read_kernel, raw["forward"])),
        backward=tuple(map(_read_kernel, raw["backward"])),
        saved=tuple(Saved(value=_word(value), spec=_read_spec(spec)) for value, spec in raw["saved"]),
        shardings=tuple(
            Sharding(inputs=_words(i), outputs=_words(o), divides=tuple(map(_read_size, d)))
            for i, o, d in raw["shardings"]
        ),
        labels=_words(raw["labels"]),
        sizes=tuple((_word(letter), _read_size(size)) for letter, size in raw["sizes"]),
        causal=raw["causal"],
    )


def _read_block(raw: Mapping[str, Any]) -> Block:
    block = Block(
        name=_word(raw["name"]),
        inputs=tuple(map(_read_spec, raw["inputs"])),
        outputs=_words(raw["outputs"]),
        operators=tuple(map(_read_operator, raw["operators"])),
        parameters=tuple(
            Parameter(
                name=_word(name), shape=tuple(map(_whole, shape)), dtype=_dtype(dtype), trainable=bool(trainable),
                tied=_word(tied),
            )
            for name, shape, dtype, trainable, tied in raw["parameters"]
        ),
        buffers=tuple((_word(name), _read_spec(spec)) for name, spec in raw["buffers"]),
        calls=tuple(
            ModuleCall(
                module=_word(module), inputs=tuple((_word(n), _word(v)) for n, v in inputs), outputs=_words(outputs)
            )
            for module, inputs, outputs in raw.get("calls", ())
        ),
    )  # fmt: skip
    _check_values(block)
    return block


def _check_values(block: Block) -> None:
    """Raises ValueError for a value that is read but nowhere made. (A tied parameter may have another link's name.)"""
    made = {f"input:{i}" for i in range(len(block.inputs))} | {f"buffer:{name}" for name, _ in block.buffers}
    made |= {name for op in block.operators for name in output_names(op)}
    read = (value for op in block.operators for value in op.inputs)
    for value in (*read, *block.outputs):
        if value not in made and not value.startswith("param:"):
            raise ValueError(f"{block.name} reads {value!r}, which nothing makes")


def _read_graph(raw: Mapping[str, Any]) -> ModelGraph:
    blocks = tuple(map(_read_block, raw["blocks"]))
    chain = tuple(
        Instance(
            block=_whole(block),
            path=_word(path),
            repeated=bool(repeated),
            sends=tuple(map(_read_spec, sends)),
        )
        for block, path, repeated, sends in raw["chain"]
    )
    if {link.block for link in chain} != set(range(len(blocks))):
        raise ValueError("the chain names a block that is not there, or leaves one out")
    return ModelGraph(
        name=_word(raw["name"]),
        dtype=_dtype(raw["dtype"]),
        blocks=blocks,
        chain=chain,
        tokens_per_sample=_whole(raw["tokens_per_sample"]),
        has_loss=bool(raw["has_loss"]),
        pipeline_cuts=bool(raw["pipeline_cuts"]),
        warnings=_words(raw["warnings"]),
        dropout=float(raw.get("dropout", 0.0)),
        written=tuple(
            Written(name=_word(name), from_samples=bool(drawn)) for name, drawn in raw.get("written", ())
        ),
        differentiates=bool(raw.get("differentiates", False)),
        other_lengths=tuple(map(_read_graph, raw.get("other_lengths", ()))),
    )
