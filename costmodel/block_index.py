"""Look-ups over one block that its passes share: who makes a value, who reads it, whose storage it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autoparallel.costmodel.graph import Block, Operator, OpKind, Size, TensorSpec

FLOATING = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockIndex:
    """A block with its values looked up; equal to itself alone.

    `aliases` are the operators without a kernel (views, and dropout where it is off): their outputs share the
    storage of their first input. `needs_grad` are the values that a gradient flows to, `containers` the modules with
    operators in modules inside them, the block itself ("") among them.
    """

    block: Block
    specs: Mapping[str, TensorSpec]
    producer: Mapping[str, int]
    consumers: Mapping[str, tuple[int, ...]]
    storage: Mapping[str, str]
    aliases: frozenset[int]
    needs_grad: frozenset[str]
    containers: frozenset[str]

    def is_activation(self, value: str) -> bool:
        return not value.startswith(("param:", "buffer:"))

    def leaves_block(self, value: str) -> bool:
        return value in self.block.outputs


def output_names(op: Operator) -> tuple[str, ...]:
    """Names of an operator's outputs: `OP`, `OP.1`, `OP.2` …"""
    return tuple(op.name if i == 0 else f"{op.name}.{i}" for i in range(len(op.outputs)))


def index_block(block: Block, *, carried: tuple[int, ...], dropout: bool) -> BlockIndex:
    """Index a block; `carried` are the positions of the inputs that a gradient flows back through."""
    block = _with_own_names(block)
    specs: dict[str, TensorSpec] = {f"input:{i}": s for i, s in enumerate(block.inputs)}
    for parameter in block.parameters:
        shape = tuple(Size(n, 0) for n in parameter.shape)
        specs[f"param:{parameter.name}"] = TensorSpec(shape=shape, dtype=parameter.dtype)
    for name, buffer in block.buffers:
        specs[f"buffer:{name}"] = buffer
    grads = {f"input:{i}" for i in carried}
    grads |= {f"param:{p.name}" for p in block.parameters if p.trainable}
    storage = {value: value for value in specs}
    producer: dict[str, int] = {}
    consumers: dict[str, list[int]] = {}
    aliases = set()
    for i, op in enumerate(block.operators):
        alias = op.kind is OpKind.VIEW or (op.kind is OpKind.DROPOUT and not dropout)
        if alias:
            aliases.add(i)
        for value in dict.fromkeys(op.inputs):
            consumers.setdefault(value, []).append(i)
        # Also through operators whose backward launches nothing: an addition hands its gradient on as it is.
        flows = any(v in grads for v in op.inputs)
        for name, spec in zip(output_names(op), op.outputs, strict=True):
            specs[name], producer[name] = spec, i
            source = next(iter(op.inputs), "")
            storage[name] = storage.get(source, name) if alias and source else name
            if flows and spec.dtype in FLOATING:
                grads.add(name)
    around = (outer for op in block.operators for outer in enclosing(op.module.rpartition(".")[0]))
    return BlockIndex(
        block=block, specs=specs, producer=producer, consumers={v: tuple(c) for v, c in consumers.items()},
        storage=storage, aliases=frozenset(aliases), needs_grad=frozenset(grads), containers=frozenset(("", *around)),
    )  # fmt: skip


def _with_own_names(block: Block) -> Block:
    """The block with tied parameters read under the name that the block itself has for them.

    A tie inside one link has no `tied` name: there it is the parameter that the calling module itself holds.
    """
    own = {p.name for p in block.parameters}
    tied = {f"param:{p.tied}": f"param:{p.name}" for p in block.parameters if p.tied}

    def named(op: Operator, value: str) -> str:
        name = value.removeprefix("param:")
        if name == value or name in own:
            return value
        held = f"{op.module}.{name.rpartition('.')[2]}".lstrip(".")
        return tied.get(value, f"param:{held}" if held in own else value)

    def renamed(op: Operator) -> Operator:
        inputs = tuple(named(op, value) for value in op.inputs)
        return op if inputs == op.inputs else replace(op, inputs=inputs)

    return replace(block, operators=tuple(renamed(op) for op in block.operators))


def enclosing(module: str) -> Iterator[str]:
    """The module and every module around it, innermost first; the block itself ("") last."""
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""
