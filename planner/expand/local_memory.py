"""Bytes that a block keeps from forward to backward, and the peaks while either runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autoparallel.costmodel.fusion import KEEPS_INPUT, Unit
from autoparallel.costmodel.graph import ITEM_BYTES, Operator, OpKind, Saved
from autoparallel.costmodel.kernels import OPERAND_BYTES
from autoparallel.costmodel.program import CollectiveOp
from autoparallel.planner.expand.context import GATHERED, gathered_keys
from autoparallel.planner.expand.local import LocalBlock
from autoparallel.planner.sharding.plan import Reshard, conjugates

# What recomputation of operators keeps the results of: the field's usual policy. Source: torchtitan, _op_sac_save_list;
# JAX, dots_saveable.
PRODUCTS = frozenset({OpKind.GEMM, OpKind.GROUPED_GEMM, OpKind.CONV, OpKind.ATTENTION})
REARRANGED = frozenset({CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER})
SUMS = frozenset({CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE_SCATTER})
OPERANDS, WIDE_BYTES = 3, 4  # of attention; of what torch's own kernel computes
MOST_PUT_OFF = 0.9  # of the numbers in a block's matrices, where weights' gradients are put off. Kind: choice
MASK_BYTES = 1  # a dropout mask is kept as one bool per element


def saved_storages(local: LocalBlock, units: Sequence[Unit], *, core: bool = True) -> dict[str, int]:
    """Storage -> local bytes kept for the backward pass; `core` False drops the inside of attention.

    A storage counts once, at the first unit that keeps it, and once more for each other layout in which products read
    and keep it. Unfused attention keeps its probabilities and, with
    dropout, the mask and the dropped probabilities (Korthikanti et al. 2022, equation 1: 5as²b), and no
    softmax statistics.
    """
    kept: dict[str, int] = {}
    for unit in units:
        for op, saved in unit.saved:
            operator = local.index.block.operators[op]
            attention = operator.kind is OpKind.ATTENTION
            if op in local.index.aliases or (attention and saved.value == "" and not core):
                continue
            if attention and saved.value == "" and not local.setting.flash:
                continue
            if attention and core and saved.value in operator.inputs[:OPERANDS] and _widens(local):
                continue
            if _is_gathered(local, op, saved):
                continue
            key = local.index.storage.get(saved.value, saved.value) or f"{operator.name}#{len(kept)}"
            if key not in kept:
                kept[key] = saved_bytes(local, op, saved) + _copies_bytes(local, op, saved)
        for op in unit.ops if not (core and _widens(local)) else ():
            kept |= gathered_keys(local, op)
        if core and not local.setting.flash:
            for op in unit.ops:
                if local.index.block.operators[op].kind is OpKind.ATTENTION:
                    name = local.index.block.operators[op].name
                    kept[f"{name}#probabilities"] = probabilities_bytes(local, op)
                    if _widens(local):
                        kept[f"{name}#operands"] = _operands_bytes(local, op)
    return kept


def _is_gathered(local: LocalBlock, op: int, saved: Saved) -> bool:
    """Whether an operator keeps what was gathered of a value instead of its storage (of a key or value: which the query does not
    share)."""
    if not saved.value or not (gathered := gathered_keys(local, op)):
        return False
    storage, operator = local.index.storage, local.index.block.operators[op]
    if operator.kind is OpKind.RECURRENT:
        return f"{operator.name}{GATHERED}{saved.value}" in gathered
    query, *others = (storage.get(value, value) for value in operator.inputs[:OPERANDS])
    own = storage.get(saved.value, saved.value)
    return own in others and own != query


def product_storages(local: LocalBlock, kept: Mapping[str, int]) -> dict[str, int]:
    """Storage -> local bytes where results of products and of sums over ranks are kept, beside the block's inputs.

    `kept`: what is kept where nothing is recomputed, of which attention's statistics stay.
    """
    index, found = local.index, input_storages(local)
    for operator in index.block.operators:
        if operator.kind not in PRODUCTS and operator.kind not in (OpKind.LEAF, OpKind.RECURRENT):
            continue
        # Of what a leaf, or a recurrent layer, keeps inside nobody knows which part products made: all of it, to be safe. Keys are gathered again.
        inside = {s: n for s, n in kept.items() if s.startswith(f"{operator.name}#")}
        found |= {s: n for s, n in inside.items() if GATHERED not in s}
        outputs = (operator.name, *(f"{operator.name}.{i}" for i in range(len(operator.outputs))))
        for value in outputs if operator.kind in PRODUCTS else ():
            if value in index.specs and index.storage.get(value, value) not in found:
                storage = index.storage.get(value, value)
                found[storage] = local.value_bytes(value, local.output_placement(value))
    for reshard in local.plan.reshards:
        if reshard.before == "P" and reshard.after != "P":
            found[f"{reshard.value}#sum"] = local.value_bytes(reshard.value, reshard.after)
    return found


def probabilities_bytes(local: LocalBlock, op: int) -> int:
    """What unfused attention keeps of its score matrix."""
    item = _score_bytes(local)
    per_element = item if local.setting.execution.dropout == 0 else 2 * item + MASK_BYTES
    return local.scores_elements(op) * per_element


def _widens(local: LocalBlock) -> bool:
    """Whether unfused attention keeps its operands in 32 bits: torch's own kernel casts and scales 16-bit ones, all heads of them.
    Source: aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math."""
    short = ITEM_BYTES[local.setting.tensor_dtype] < WIDE_BYTES
    return short and not local.setting.flash and local.setting.execution.fsdp2


def _operands_bytes(local: LocalBlock, op: int) -> int:
    """Queries, keys and values in 32 bits; those of a group of heads once for each of them."""
    shape = local.attention_shape(op)
    keys = shape.key_length * (shape.head_size + shape.value_size)
    return shape.batch * shape.heads * (shape.query_length * shape.head_size + keys) * WIDE_BYTES


def _score_bytes(local: LocalBlock) -> int:
    """Of a number of unfused attention's score matrix: torch's own kernel computes it in 32 bits at least."""
    item = ITEM_BYTES[local.setting.tensor_dtype]
    return max(item, WIDE_BYTES) if local.setting.execution.fsdp2 else item


def _copies_bytes(local: LocalBlock, op: int, saved: Saved) -> int:
    """What products keep of a storage that they read in other layouts than its keeper `op`."""
    if not saved.value or not local.plan.reshards:
        return 0
    own = local.placement(op, saved.value)[
        :1
    ]  # views number dims differently: shares are taken to be the same
    readers = local.layout.operand_readers(local.index.storage.get(saved.value, saved.value))
    return sum(saved_bytes(local, r, saved) for r in readers if local.placement(r, saved.value)[:1] != own)


def saved_bytes(local: LocalBlock, op: int, saved: Saved) -> int:
    """Local bytes of what an operator keeps."""
    placement = local.placement(op, saved.value)
    sharding, operator = local.plan.shardings[op], local.index.block.operators[op]
    if operator.kind is OpKind.CROSS_ENTROPY and saved.value == "" and saved.spec.shape and sharding:
        placement = sharding.inputs[0]  # the log-softmax lies like the logits
    if placement == "R" and saved.value and local.setting.regathers:
        before = _before_gather(local, op, saved.value)
        placement = before if before.startswith("S") else placement
    whole = local.setting.cp if operator.kind is OpKind.RECURRENT else 1  # of the sequence, cut behind it
    return round(local.spec_bytes(saved.spec, placement) * whole * _operand_share(local, op, saved))


def _operand_share(local: LocalBlock, op: int, saved: Saved) -> float:
    """Products in 8 and 4 bits keep their input as they read it, not as it was (Transformer Engine)."""
    dtype, kind = local.setting.execution.dtype, local.index.block.operators[op].kind
    quantised = dtype in ("fp8", "mxfp8", "nvfp4") and kind in (OpKind.GEMM, OpKind.GROUPED_GEMM)
    if not quantised or not saved.value:
        return 1.0
    return OPERAND_BYTES[dtype] / ITEM_BYTES[local.setting.tensor_dtype]


def _before_gather(local: LocalBlock, op: int, value: str) -> str:
    """Layout of the value before a layout hook gathered it for operator `op`; "R" if none did."""
    module = local.index.block.operators[op].module
    storage = local.index.storage.get(value, value)
    for reshard in local.plan.reshards:
        inside = reshard.module == "" or f"{module}.".startswith(f"{reshard.module}.")
        same = local.index.storage.get(reshard.value, reshard.value) == storage
        if same and reshard.after == "R" and inside == (reshard.side == "input"):
            return reshard.before
    return "R"


def input_storages(local: LocalBlock) -> dict[str, int]:
    """The block's activation inputs that a gradient flows to, and their bytes: what full recomputation keeps."""
    names = [f"input:{i}" for i in range(len(local.index.block.inputs))]
    return {
        name: local.value_bytes(name, local.output_placement(name))
        for name in names
        if name in local.index.needs_grad
    }


def _readers(local: LocalBlock, units: Sequence[Unit]) -> dict[str, int]:
    """Storage -> last unit that reads it; storages of the block's outputs are never done."""
    last: dict[str, int] = {}
    for n, unit in enumerate(units):
        for value in (*unit.outputs, *unit.inputs):
            if local.index.is_activation(value):
                last[local.index.storage[value]] = n
    for value in local.index.block.outputs:
        last[local.index.storage[value]] = len(units)
    return last


def forward_temp_bytes(local: LocalBlock, units: Sequence[Unit], kept: Mapping[str, int]) -> int:
    """Peak of the forward pass above what it keeps: unsaved values, alive from producer to last reader."""
    last, storages = _readers(local, units), local.index.storage
    live, dying = dict[str, int](), dict[int, list[str]]()  # bytes by storage; what dies with a unit

    def make(storage: str, size: int, unit: int) -> int:
        live[storage] = size
        dying.setdefault(max(last.get(storage, -1), unit), []).append(storage)
        return size

    made = _made_by(local, units, kept)
    held = sum(size for storage, size in kept.items() if storage.startswith("input:"))
    for name in local.index.needs_grad:
        if name.startswith("input:") and name not in kept:
            held += make(name, local.value_bytes(name, local.output_placement(name)), 0)
    peak = 0
    copies = rearranged_bytes(local, units, backward=False)
    for n, unit in enumerate(units):
        before = held
        for value in unit.outputs:
            storage = storages[value]
            if storage not in kept and storage not in live and not storage.startswith(("input:", "param:")):
                held += make(storage, local.value_bytes(storage, local.output_placement(storage)), n)
        held += made.get(n, 0)
        done = sum(live.pop(storage) for storage in dying.pop(n, ()))
        peak = max(peak, before + copies.get(n, 0))
        inside = 0 if local.setting.flash else sum(_scores_temp(local, op, kept) for op in unit.ops)
        peak = max(peak, held - (done if overwrites(local, unit) else 0) + inside)
        held -= done
    return max(peak - sum(kept.values()), 0)


def rearranged_bytes(local: LocalBlock, units: Sequence[Unit], *, backward: bool) -> dict[int, int]:
    """Unit -> bytes of the copy that torch makes, before the unit runs forward or when it has run backward, of what is gathered or
    scattered along another dim than the first: beside the whole tensor."""
    found: dict[int, int] = {}
    for move in local.layout.moves:
        if not isinstance(move, Reshard) or not rearranges(local, move):
            continue
        ways = conjugates(move.before, move.after, move.partial_gradient)
        if any(back == backward and op in REARRANGED for back, op in ways):
            n = next((n for n, unit in enumerate(units) if unit.ops[0] >= move.position), len(units) - 1)
            if backward:  # of what the unit before it has made
                n = max(n - 1, 0)
            found[n] = max(found.get(n, 0), local.value_bytes(move.value, "R"))
    return found


def rearranges(local: LocalBlock, reshard: Reshard) -> bool:
    """Whether torch copies what it gathers or scatters for this change of layout: not along the first dim, and of one sample it is a view."""
    execution, dims = (
        local.setting.execution,
        {p for p in (reshard.before, reshard.after) if p.startswith("S")},
    )
    return execution.dtensor and local.setting.tp > 1 and local.setting.micro > 1 and dims != {"S0"}


def _made_by(local: LocalBlock, units: Sequence[Unit], kept: Mapping[str, int]) -> dict[int, int]:
    """Unit -> bytes that it makes of what is kept."""
    unit_of = {op: n for n, unit in enumerate(units) for op in unit.ops}
    made: dict[int, int] = {}
    for storage, size in kept.items():
        unit = unit_of.get(local.index.producer.get(storage.partition("#")[0], -1))
        if unit is not None:
            made[unit] = made.get(unit, 0) + size
    return made


def attention_temp(local: LocalBlock, op: int) -> int:
    """Scores beside the probabilities made from them."""
    if local.index.block.operators[op].kind is not OpKind.ATTENTION:
        return 0
    return local.scores_elements(op) * _score_bytes(local)


def _scores_temp(local: LocalBlock, op: int, kept: Mapping[str, int]) -> int:
    """Unfused attention's forward: scores, and what is made from them unless that is kept."""
    scores = attention_temp(local, op)
    if not scores or f"{local.index.block.operators[op].name}#probabilities" in kept:
        return scores
    return scores + probabilities_bytes(local, op)


def overwrites(local: LocalBlock, unit: Unit) -> bool:
    """Megatron's cross-entropy writes its softmax over the logits it read, and the gradient over its softmax.

    Source: Megatron-LM, core/tensor_parallel/cross_entropy.py.
    """
    return local.setting.execution.kernels == "fused" and any(own_softmax(local, op) for op in unit.ops)


def own_softmax(local: LocalBlock, op: int) -> Saved | None:
    """The log-softmax that a cross-entropy makes and keeps; None for other operators."""
    operator = local.index.block.operators[op]
    if operator.kind is not OpKind.CROSS_ENTROPY:
        return None
    return next((s for s in operator.saved if s.value == "" and s.spec.shape), None)


def weight_saved_bytes(
    local: LocalBlock, units: Sequence[Unit], kept: Mapping[str, int], *, again: bool
) -> int | None:
    """What the weight gradients of a split backward still need: of what was kept the products' inputs, and the gradients
    of their outputs, which the first part of the backward made (Zero Bubble, arXiv:2401.10241: 32 s b h bytes a layer).

    A block that runs `again` keeps the same then; None where the second part runs it once more. Under `auto_parallelize` the
    first part runs it for both, as products put their weights' gradients off; but where not all of them can
    (`runtime/gradients/put_off.py`), nothing that was kept is freed before the second part.
    """
    own = local.setting.execution.fsdp2
    put = own and puts_off(local)
    if again and not put:
        return None
    needed, gradients = weight_factors(local, units, put=put or not own)
    whole = own and not put
    return sum(b for s, b in kept.items() if whole or s in needed) + sum(gradients.values())


def weight_factors(local: LocalBlock, units: Sequence[Unit], *, put: bool) -> tuple[set[str], dict[str, int]]:
    """Storages that weights' gradients are computed from, and bytes of the gradients of products' outputs, by operator; where the
    weights are not `put` off, of all that read any."""
    needed, gradients = set(), dict[str, int]()
    for operator in _with_weights(local, units):
        needed |= {local.index.storage[v] for v in operator.inputs if local.index.is_activation(v)}
    for operator in _with_weights(local, units) if put else _reading_weights(local, units):
        made = operator.name in local.index.specs and local.index.storage[operator.name] == operator.name
        if made and (operator.kind in PRODUCTS or not put):
            placement = local.output_placement(operator.name)
            gradients[operator.name] = local.value_bytes(operator.name, placement)
    return needed, gradients


def _reading_weights(local: LocalBlock, units: Sequence[Unit]) -> Iterator[Operator]:
    """The operators that read parameters with gradients, and what a gradient flows through besides."""
    index = local.index
    for op in (op for unit in units for op in unit.ops if op not in index.aliases):
        inputs = {index.storage.get(v, v) for v in index.block.operators[op].inputs if v in index.needs_grad}
        if 0 < sum(storage.startswith("param:") for storage in inputs) < len(inputs):
            yield index.block.operators[op]


def _with_weights(local: LocalBlock, units: Sequence[Unit]) -> Iterator[Operator]:
    """The operators that keep what they read for the gradient of a weight."""
    for unit in units:
        for op in unit.ops:
            operator = local.index.block.operators[op]
            if operator.kind in KEEPS_INPUT and any(k.gradient_of == "weight" for k in operator.backward):
                yield operator


def puts_off(local: LocalBlock) -> bool:
    """Whether the block's weights can wait for the second half of a split backward pass: what `runtime/gradients/put_off.py` asks of
    its modules. Nearly all numbers in matrices must be those of linear layers and embeddings, which read a `weight` of their own
    (torch's multi-head attention reads those of others); on whole tensors, and not compiled."""
    if local.setting.tp > 1 or local.setting.execution.kernels == "compiled":
        return False
    index, own = local.index, set[str]()
    for operator in index.block.operators:
        if operator.kind in (OpKind.GEMM, OpKind.EMBEDDING):
            weight = f"param:{operator.module}.weight".replace(":.", ":")
            own |= {weight} & {index.storage.get(value, value) for value in operator.inputs}
    matrices = {
        f"param:{p.name}": p.numel for p in index.block.parameters if p.trainable and len(p.shape) > 1
    }
    return sum(n for name, n in matrices.items() if name in own) >= MOST_PUT_OFF * sum(matrices.values())
