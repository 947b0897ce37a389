"""DTensor's sharding rules, asked without devices or processes. The one file here that knows its private names
(held for torch 2.11 to 2.13)."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
from torch.distributed.tensor._ops.single_dim_strategy import _expand_single_dim_strategy_to_mesh
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_flatten, tree_unflatten

from autoparallel.costmodel.graph import sharded_dim, strided
from autoparallel.planner.capture.nodes import Launch, Meta

Row = tuple[str, ...]

_JOINS = frozenset({torch.ops.aten.cat.default, torch.ops.aten.stack.default})
# Assignments of placements to the inputs of one ATen operator that are tried where its rule does not list them.
_TRIES = 400

# Tables by what they are of: a rule says the same of equal launches, whichever model they are in.
_TABLES: dict[object, dict[Row, Row]] = {}


class Rules:
    """Tables from input to output placements ("R", "P", "S0", …), one for each distinct launch."""

    def __init__(self) -> None:
        self._mesh = DeviceMesh("cpu", torch.arange(1), _init_backend=False, _rank=0)
        self._propagator = copy.copy(DTensor._op_dispatcher.sharding_propagator)
        self._tables = _TABLES
        self._keys: dict[
            int, tuple[Launch, object]
        ] = {}  # id(launch) -> itself, which keeps the id its own; its key
        self.missing: set[str] = set()  # operators on floats that have no rule

    def table(self, launch: Launch, parts: int = 1) -> dict[Row, Row]:
        """Legal placements of one launch, every sharded dim in `parts` parts. Empty where there is no rule:
        replicated only."""
        if id(launch) not in self._keys:
            self._keys[id(launch)] = (launch, _launch_key(launch))
        key = (parts, self._keys[id(launch)][1])
        if key not in self._tables:
            func, args, kwargs = launch.signature
            leaves, spec = tree_flatten((args, kwargs))
            outputs = [_meta_of(m) for m in launch.outputs]
            out = outputs[0] if len(outputs) == 1 else tuple(outputs)
            self._tables[key] = self._make(func, leaves, spec, out, parts)
        if not self._tables[key]:
            self._note_missing(launch)
        return self._tables[key]

    def _note_missing(self, launch: Launch) -> None:
        func = launch.signature[0]
        floats = any(m.dtype.startswith(("float", "bfloat")) for m in launch.outputs)
        if floats and launch.inputs and not self._has_rule(func):
            self.missing.add(str(func))

    def knows_parts(self) -> bool:
        """Whether this torch keeps the parts of a strided shard apart in a view (torch 2.11 does not yet)."""
        key = "parts"
        if key not in self._tables:
            before, after = torch.empty((2, 6), device="meta"), torch.empty((2, 3, 2), device="meta")
            leaves, spec = tree_flatten(((before, [2, 3, 2]), {}))
            self._tables[key] = self._make(torch.ops.aten.view.default, leaves, spec, _tensor_meta(after), 3)
        return self._tables[key].get(("S1/3",)) == ("S2",)

    def _has_rule(self, func: Any) -> bool:
        tables = self._propagator
        return any(
            func in table
            for table in (tables.op_single_dim_strategy_funcs, tables.op_strategy_funcs, tables.op_to_rules)
        )

    def flash_attention(self, query: Meta, key: Meta, value: Meta) -> dict[Row, Row]:
        """Legal placements of flash attention's query, key and value."""
        operator = torch.ops.aten._scaled_dot_product_flash_attention.default
        cached = (operator, query.shape, key.shape, value.shape)
        if cached in self._tables:
            return self._tables[cached]
        tensors = [torch.empty(m.shape, device="meta") for m in (query, key, value)]
        statistics = _tensor_meta(torch.empty(query.shape[:-1], device="meta"))
        scalar = _tensor_meta(torch.empty((), device="meta"))
        out = (_tensor_meta(tensors[0]), statistics, None, None, None, None, scalar, scalar, scalar)
        leaves, spec = tree_flatten((tuple(tensors), {}))
        self._tables[cached] = self._make(operator, leaves, spec, out)
        return self._tables[cached]

    def grouped_product(self, rows: Meta, matrices: Meta, ends: Meta) -> dict[Row, Row]:
        """Legal placements of a product of experts: its rows, its matrices, and the ends of the groups."""
        operator = torch.ops.aten._grouped_mm.default
        cached = (operator, rows.shape, matrices.shape, matrices.layout)
        if cached not in self._tables:
            # The rule looks at strides in 16-byte units; bfloat16 is what the accelerators' kernel takes.
            tensors = [
                torch.empty_strided(m.shape, m.layout[1:], dtype=torch.bfloat16, device="meta")
                for m in (rows, matrices)
            ]
            out = _tensor_meta(torch.empty((rows.shape[0], matrices.shape[-1]), device="meta"))
            offsets = torch.empty(ends.shape, dtype=torch.int32, device="meta")
            leaves, spec = tree_flatten(((*tensors, offsets), {}))
            self._tables[cached] = self._make(operator, leaves, spec, out)
        return self._tables[cached]

    def _make(self, func: Any, leaves: list[Any], spec: Any, out: Any, parts: int = 1) -> dict[Row, Row]:
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if not positions:
            return {}
        tables = self._propagator
        rows: dict[Row, Row] = {}
        if func in tables.op_single_dim_strategy_funcs:
            # One sharded input is enough for such a rule to list all its rows; but one that works in place
            # lists only those that leave its tensor as it is.
            first = next((i for i in positions if leaves[i].dim()), positions[0])
            dims = range(leaves[first].dim() if func._schema.is_mutable else min(leaves[first].dim(), 1))
            layouts: list[Any] = [_shard(d, parts) for d in dims] or [Replicate()]
            for layout in layouts:
                placed = {i: layout if i == first else Replicate() for i in positions}
                self._collect(rows, func, leaves, spec, placed, out, parts)
            return rows
        if not self._has_rule(func):
            return {}
        if func not in tables.op_to_rules:
            self._collect(rows, func, leaves, spec, dict.fromkeys(positions, Replicate()), out, parts)
            if len(rows) > 1 and parts == 1:
                return rows  # this rule lists all it knows, whatever its inputs are
        if func in tables.op_to_rules:
            # Convolution's older rule follows its input and looks at nothing else; it is true of samples.
            layouts = [Replicate(), _shard(0, parts)]
            options: list[list[Any]] = [layouts, *([Replicate()] for _ in positions[1:])]
        else:
            options = [
                [
                    Replicate(),
                    Partial("sum"),
                    *(_shard(d, parts) for d in range(leaves[i].dim()) if leaves[i].shape[d] > 1),
                ]
                for i in positions
            ]
        # What joins tensors has them all alike: many of them are not tried in all combinations.
        picks = (
            ([layout] * len(positions) for layout in max(options, key=len))
            if func in _JOINS
            else itertools.islice(itertools.product(*options), _TRIES)
        )
        for pick in picks:
            self._collect(rows, func, leaves, spec, dict(zip(positions, pick, strict=True)), out, parts)
        return rows

    def _collect(
        self, rows: dict[Row, Row], func: Any, leaves: list[Any], spec: Any, placed: dict[int, Any], out: Any,
        parts: int,
    ) -> None:  # fmt: skip
        """Add the rows that the rule of `func` gives for inputs laid out as `placed`."""
        specs = [
            DTensorSpec(self._mesh, (placed[i],), _tensor_meta(leaf)) if i in placed else leaf
            for i, leaf in enumerate(leaves)
        ]
        args, kwargs = tree_unflatten(specs, spec)
        schema = OpSchema(func, args, kwargs)
        try:
            if func in self._propagator.op_to_rules:
                result: Any = self._propagator.op_to_rules[func](schema)
                if result.output_spec is not None and result.redistribute_schema is None:
                    _add(rows, [placed[i] for i in placed], result.output_spec, out, parts)
                return
            strategy = self._strategy(func, schema, out)
        except Exception:  # a rule that cannot take these placements is not a rule for them
            return
        if isinstance(strategy, OpStrategy):
            choices: list[Any] = strategy.strategies
            for choice in choices:
                needed = choice.input_specs
                wanted = (
                    [s.placements[0] for s in needed]
                    if needed
                    else [choice.output_specs.placements[0]] * len(placed)
                )
                _add(rows, wanted, choice.output_specs, out, parts)

    def _strategy(self, func: Any, schema: OpSchema, out: Any) -> Any:
        wrapped = self._propagator._wrap_with_op_strategy(schema)
        if func in self._propagator.op_single_dim_strategy_funcs:
            info = self._propagator.op_single_dim_strategy_funcs[func]
            expand = _expand_single_dim_strategy_to_mesh(self._mesh, wrapped, info, out)
            return expand(func, wrapped.args_meta, wrapped.kwargs_meta)
        return self._propagator.op_strategy_funcs[func](wrapped)


def _add(rows: dict[Row, Row], inputs: list[Any], output_specs: Any, out: Any, parts: int) -> None:
    count = len(out) if isinstance(out, tuple) and not isinstance(out, TensorMeta) else 1
    outputs = list(output_specs) if isinstance(output_specs, tuple | list) else [output_specs] * count
    names = [_name(p, parts) for p in inputs]
    results = [_name(s.placements[0], parts) if s is not None else "R" for s in outputs]
    metas = out if isinstance(out, tuple) and not isinstance(out, TensorMeta) else (out,)
    if "" in results or not all(map(_fits, results, metas)):
        return
    # Embedding's rule lists its indices as partial beside a table sharded by rows: they are replicated.
    row = tuple("R" if type(p).__name__ == "_MaskPartial" else n for p, n in zip(inputs, names, strict=True))
    if "" not in row:
        rows.setdefault(row, tuple(results))


def _shard(dim: int, parts: int) -> Any:
    return Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts)


def _name(placement: Any, parts: int) -> str:
    """ "R", "P", "S0", "S1/3"; "" for what no sharding in `parts` parts leads to. Of dims that are flattened a sharded one that is not
    the first is in as many parts as those before it have."""
    if isinstance(placement, _StridedShard):
        known = parts in (1, placement.split_factor)
        return strided(placement.dim, int(placement.split_factor)) if known else ""
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else ""
    return "R"


def _fits(name: str, meta: TensorMeta | None) -> bool:
    """Whether a tensor has the dim that the placement shards (rules for scalar results may list one)."""
    return meta is None or not name.startswith("S") or sharded_dim(name) < len(meta.shape)


def _tensor_meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


def _meta_of(meta: Meta) -> TensorMeta:
    return TensorMeta(torch.Size(meta.shape), meta.layout[1:], getattr(torch, meta.dtype))


class _Key:
    """What launches with equal tables have in common, hashed once."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: tuple[object, ...]) -> None:
        self._parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._parts == other._parts


def _launch_key(launch: Launch) -> _Key:
    func, args, kwargs = launch.signature
    leaves, spec = tree_flatten((args, kwargs))
    return _Key((func, spec, tuple(_leaf_key(leaf) for leaf in leaves)))


def _leaf_key(leaf: Any) -> object:
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype)
    try:
        hash(leaf)
    except TypeError:
        return repr(leaf)
    return leaf
