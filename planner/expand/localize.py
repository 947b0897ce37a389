"""From a block, its tensor plan and a setting to `BlockWork`: what one device does for one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from autoparallel.costmodel.fusion import Unit, fuse
from autoparallel.costmodel.graph import ITEM_BYTES, OpKind
from autoparallel.costmodel.kernels import DTENSOR
from autoparallel.costmodel.program import BlockWork, Collective, CollectiveOp, Kernel, Step
from autoparallel.planner.expand import local_memory as memory
from autoparallel.planner.expand.backward_memory import BackwardBytes, backward_bytes
from autoparallel.planner.expand.context import key_collectives
from autoparallel.planner.expand.layout import Layout
from autoparallel.planner.expand.local import (
    QUANTISED_BYTES,
    SHORT_DTYPE,
    LocalBlock,
    Setting,
    inner_collectives,
)
from autoparallel.planner.sharding.plan import Exchange, Reshard, conjugates

# A norm's weight gradient reads its input and the gradient once more. Kind: formula.
# Operators' worth of dispatch in a DTensor's change of placement: it leaves DTensor, starts a collective, waits for it, comes
# back. Kind: measured. Source: 48 to 94 us beside 22 for an operator on the machine of profiles/devices/cpu-gloo.toml.
PER_MOVE = 4
WEIGHT_PASSES = 2


def fused_units(layout: Layout, kernels: str) -> tuple[Unit, ...]:
    """The kernels of a block under a tensor plan: nothing fuses across a change of layout."""
    return fuse(layout.index, kernels, barriers=layout.barriers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """What one device does and keeps for one micro-batch where nothing is recomputed: where every way of recomputing
    begins. `kept`: bytes by storage."""

    local: LocalBlock
    units: tuple[Unit, ...]
    forward: tuple[Step, ...]
    forward_of: tuple[tuple[Step, ...], ...]  # by unit
    backward_input: tuple[Step, ...]
    backward_weight: tuple[Step, ...]
    kept: Mapping[str, int]
    backward_bytes: BackwardBytes


def passes_of(layout: Layout, setting: Setting, units: tuple[Unit, ...] | None = None) -> Passes:
    """The passes of a block on one device; `units` are its `fused_units`, where the caller has them already."""
    local = LocalBlock(layout=layout, setting=setting)
    if units is None:
        units = fused_units(layout, setting.execution.kernels)
    kept = memory.saved_storages(local, units)
    inputs, weights = _backward(local, units)
    *forward_of, handed_on = map(tuple, _forward(local, units))
    return Passes(
        local=local, units=units, forward=(*chain(*forward_of), *handed_on), forward_of=tuple(forward_of), kept=kept,
        backward_input=tuple(inputs), backward_weight=tuple(weights),
        backward_bytes=backward_bytes(local, units, kept),
    )  # fmt: skip


def localize(passes: Passes, recompute: str = "none") -> BlockWork:
    """The block's work on one device, without what data parallelism adds (`gather`, `reduce`).

    Recomputation: "selective" drops the inside of attention and runs its forward again; "full" keeps only the
    block's inputs and runs the forward again up to the last unit that keeps anything (checkpointing stops
    there); "operators" keeps what matrix products and attention return, too, and what tensor parallelism sums.
    """
    local, units, block = passes.local, passes.units, passes.local.index.block
    kept, again = kept_storages(passes, recompute), list[Step]()
    if recompute == "selective":
        again = [k for unit in units for op in unit.ops if block.operators[op].kind is OpKind.ATTENTION
                 for k in _unit_forward(local, Unit(ops=(op,), inputs=(), outputs=(), saved=()))]  # fmt: skip
    elif recompute == "operators":
        again = _all_but_products(passes)
    elif recompute == "full":
        again = list(chain(*passes.forward_of[: _last_keeper(units) + 1]))
    whole_again = bool(again) and recompute != "selective"  # attention has no weights of its own
    saved = sum(kept.values())
    recomputed = max(sum(passes.kept.values()) - saved, 0)
    if recompute == "operators":  # which keeps values that only the second run of the others reads
        recomputed = sum(n for storage, n in passes.kept.items() if storage not in kept)
    parameters = [(p.numel // local.setting.parts(place), p.trainable, place.startswith("E"))
                  for p, (_, place) in zip(block.parameters, local.plan.params, strict=True)]  # fmt: skip
    return BlockWork(
        name=block.name,
        forward=passes.forward,
        backward_input=passes.backward_input,
        backward_weight=passes.backward_weight,
        recompute=tuple(again),
        saved_bytes=saved,
        recomputed_bytes=recomputed if again else 0,
        forward_temp_bytes=_forward_temp(local, units, kept, nothing_kept=recompute == "full"),
        backward_temp_bytes=passes.backward_bytes.passing,
        standing_temp_bytes=passes.backward_bytes.standing,
        left_bytes=passes.backward_bytes.left,
        parameters=sum(n for n, _, _ in parameters),
        trainable=sum(n for n, trainable, _ in parameters if trainable),
        expert_parameters=sum(n for n, _, expert in parameters if expert),
        expert_trainable=sum(n for n, trainable, expert in parameters if trainable and expert),
        trainable_tensors=sum(trainable for _, trainable, _ in parameters),
        buffer_bytes=sum(local.spec_bytes(spec, "R") for _, spec in block.buffers),
        weight_saved_bytes=memory.weight_saved_bytes(
            local, units, passes.kept if whole_again else kept, again=whole_again
        ),
    )


def kept_storages(passes: Passes, recompute: str) -> Mapping[str, int]:
    """Storage -> bytes that are kept until the backward pass, in the order in which the forward keeps them."""
    if recompute == "selective":
        return memory.saved_storages(passes.local, passes.units, core=False)
    if recompute == "operators":
        return memory.product_storages(passes.local, passes.kept)
    return memory.input_storages(passes.local) if recompute == "full" else passes.kept


def _all_but_products(passes: Passes) -> list[Step]:
    """What the second forward runs where the results of products and of sums over ranks are kept: other kernels, and
    the gathers of what products read."""
    operators = passes.local.index.block.operators
    found: list[Step] = []
    for unit, steps in zip(passes.units[: _last_keeper(passes.units) + 1], passes.forward_of, strict=False):
        product = any(operators[op].kind in memory.PRODUCTS for op in unit.ops)
        found += [
            step
            for step in steps
            if (step.op not in memory.SUMS if isinstance(step, Collective) else not product)
        ]
    return found


def _forward_temp(
    local: LocalBlock, units: Sequence[Unit], kept: Mapping[str, int], *, nothing_kept: bool
) -> int:
    """While a checkpointed forward runs nothing is kept but its inputs: every value dies at its last reader."""
    if not nothing_kept:
        return memory.forward_temp_bytes(local, units, kept)
    return max(memory.forward_temp_bytes(local, units, {}) - sum(kept.values()), 0)


def _last_keeper(units: Sequence[Unit]) -> int:
    return max((n for n, unit in enumerate(units) if unit.saved), default=-1)


def _forward(local: LocalBlock, units: Sequence[Unit]) -> list[list[Step]]:
    """Steps by unit, what is communicated before a unit with it; then what is communicated of what the block returns, which no
    second forward comes to."""
    found: list[list[Step]] = []
    pending = list(local.layout.moves)
    for unit in units:
        steps: list[Step] = []
        found.append(steps)
        for move in [m for m in pending if m.position <= unit.ops[0]]:
            steps += _communication(local, move, backward=False)
            pending.remove(move)
        steps += [c for op in unit.ops for c in key_collectives(local, op, backward=False)]
        steps += _unit_forward(local, unit)
        steps += [c for op in unit.ops for c in inner_collectives(local, op)]
    whole = units and units[-1].ops[-1] == len(local.index.block.operators) - 1
    at_outputs = pending if whole else []  # of the block's last modules
    return [*found, [step for move in at_outputs for step in _communication(local, move, backward=False)]]


def _communication(local: LocalBlock, move: Reshard | Exchange, *, backward: bool) -> list[Step]:
    if isinstance(move, Exchange):
        return _exchange(local, move, backward=backward)
    if backward and move.value not in local.index.needs_grad:
        return []
    dispatched = _dispatched(local, PER_MOVE, backward=backward)
    return [
        *_collectives(local, move, backward=backward),
        *_rearranged(local, move, backward=backward),
        *dispatched,
    ]


def _rearranged(local: LocalBlock, reshard: Reshard, *, backward: bool) -> list[Kernel]:
    """Copies that torch makes of what it gathers or scatters along another dim than the first, which collectives cannot
    (`execution.dtensor`): all chunks after one another become one tensor. One sample is a view.

    Source: torch/distributed/_functional_collectives.py, all_gather_tensor (torch.cat of chunks), reduce_scatter_tensor.
    """
    if not memory.rearranges(local, reshard):
        return []
    size, dtype = local.value_bytes(reshard.value, "R"), SHORT_DTYPE[local.setting.tensor_dtype]
    moved = {CollectiveOp.ALL_GATHER: 2 * _gathered_bytes(local, size), CollectiveOp.REDUCE_SCATTER: 2 * size}
    return [
        Kernel(kind=OpKind.COPY, dtype=dtype, flops=0, bytes_moved=moved[op], backward=backward)
        for is_backward, op in conjugates(reshard.before, reshard.after, reshard.partial_gradient)
        if is_backward == backward and op in moved
    ]


def _gathered_bytes(local: LocalBlock, size: int) -> int:
    """Bytes of a gathered tensor of `size` bytes in compute. DTensor gathers what an 8-bit product reads (or its backward the
    gradient of its output) after the cast. Source: pytorch/ao, torchao/float8/float8_tensor_parallel.py."""
    execution = local.setting.execution
    if not execution.dtensor or execution.dtype not in QUANTISED_BYTES:
        return size
    return round(size * QUANTISED_BYTES[execution.dtype] / ITEM_BYTES[local.setting.tensor_dtype])


def _exchange(local: LocalBlock, move: Exchange, *, backward: bool) -> list[Step]:
    """An all-to-all of rows; where a rank holds several experts, what arrives (or leaves) is put in their order.

    With `hidden_dispatch` the forward of one micro-batch runs beside the backward of another, so that each computes while
    the rows of the other travel: as much is hidden as either pass has computation.
    """
    execution = local.setting.execution
    size = local.value_bytes(move.value, "S0")
    found: list[Step] = []
    if move.counts and not backward:
        counts = move.experts * ITEM_BYTES["int64"]
        found.append(Collective(op=CollectiveOp.ALL_TO_ALL, axes=("ep",), size_bytes=counts, label="ep"))
    found.append(
        Collective(
            op=CollectiveOp.ALL_TO_ALL, axes=("ep",), size_bytes=size, label="ep", beside=execution.hidden_dispatch,
            copies=move.copies if execution.merged_dispatch else 1,
        )
    )  # fmt: skip
    if move.experts > local.setting.ep:
        dtype = SHORT_DTYPE[local.setting.tensor_dtype]
        found.append(Kernel(kind=OpKind.COPY, dtype=dtype, flops=0, bytes_moved=2 * size, backward=backward))
    return found


def _collectives(local: LocalBlock, reshard: Reshard, *, backward: bool) -> list[Collective]:
    if local.setting.tp == 1:
        return []
    size = local.value_bytes(reshard.value, "R")
    found = []
    for is_backward, op in conjugates(reshard.before, reshard.after, reshard.partial_gradient):
        if is_backward == backward:
            local_size = size // local.setting.tp if op is CollectiveOp.ALL_TO_ALL else size
            if op is CollectiveOp.ALL_GATHER:
                local_size = _gathered_bytes(local, size)
            whole = Collective(op=op, axes=("tp",), size_bytes=local_size, label="tp")
            found += _asynchronous(local, whole, sums=backward and reshard.partial_gradient)
    return found


def _asynchronous(local: LocalBlock, whole: Collective, *, sums: bool) -> list[Collective]:
    """A collective as the execution runs it: in line, in pieces beside the products, or whole beside them.

    Megatron sums an input gradient beside the product of the weight gradient, which needs none of it; here the
    products of the same pass are what it can hide behind: as long, and there for a split backward, too.
    Source: Megatron-LM@02bb1f5, megatron/mpu/layers.py, ColumnParallelLinearWithAsyncAllreduce, …SequenceParallelism.
    """
    execution = local.setting.execution
    if sums and execution.async_gradients:
        return [replace(whole, beside=True)]
    return _split(whole, local.setting.tp) if execution.async_tp else [whole]


def _split(collective: Collective, ranks: int) -> list[Collective]:
    """With asynchronous tensor parallelism a gather or scatter goes in as many pieces as there are ranks, each
    beside the product of another; one has nothing to hide behind."""
    if collective.op not in (CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER):
        return [collective]
    piece = collective.size_bytes // ranks
    return [
        replace(collective, size_bytes=piece),
        replace(collective, size_bytes=collective.size_bytes - piece, beside=True),
    ]


def _unit_forward(local: LocalBlock, unit: Unit) -> list[Kernel]:
    operators = local.index.block.operators
    alone = [k for op in unit.ops for k in local.kernels(op, operators[op].forward, backward=False)]
    if len(alone) < 2 or not unit.fused:
        return [*(k for k in alone if k.count), *_dispatched(local, len(unit.ops), backward=False)]
    moved = sum(_bytes(local, unit, v) for v in (*unit.inputs, *unit.outputs))
    return [_joined(local, alone, moved, backward=False)]


def _dispatched(local: LocalBlock, operators: int, *, backward: bool) -> list[Kernel]:
    """What DTensor adds to that many eager operators, views among them (`execution.dtensor`). Compiled code has it no more."""
    setting = local.setting
    shared = setting.tp > 1 or setting.cp > 1
    if not (shared and setting.execution.dtensor and setting.execution.kernels == "eager" and operators):
        return []
    dtype = SHORT_DTYPE[setting.tensor_dtype]
    return [Kernel(kind=DTENSOR, dtype=dtype, flops=0, bytes_moved=0, backward=backward, count=operators)]


def _bytes(local: LocalBlock, unit: Unit, value: str) -> int:
    reader = next((op for op in unit.ops if value in local.index.block.operators[op].inputs), None)
    placement = local.output_placement(value) if reader is None else local.placement(reader, value)
    return local.value_bytes(value, placement)


def _joined(local: LocalBlock, alone: Sequence[Kernel], moved: int, *, backward: bool) -> Kernel:
    """One kernel in place of several; of the most telling kind among them."""
    order = (OpKind.NORM, OpKind.SOFTMAX, OpKind.REDUCTION)
    kinds = {k.kind for k in alone}
    kind = next((k for k in order if k in kinds), OpKind.ELEMENTWISE)
    if kind is OpKind.REDUCTION:
        kind = OpKind.NORM  # a reduction fused with what uses it: a row is read once, as a norm does
    dtype = SHORT_DTYPE[local.setting.tensor_dtype]
    return Kernel(
        kind=kind, dtype=dtype, flops=sum(k.flops for k in alone), bytes_moved=moved, backward=backward
    )


def _backward(local: LocalBlock, units: Sequence[Unit]) -> tuple[Sequence[Step], Sequence[Step]]:
    """Steps of the input and of the weight gradients, in the order they run."""
    inputs: list[Step] = []
    weights: list[Step] = []
    pending = list(local.layout.moves)
    count = len(local.index.block.operators)
    while pending and pending[-1].position >= count:
        inputs += _communication(local, pending.pop(), backward=True)
    for unit in reversed(units):
        of_input, of_weight = _unit_backward(local, unit)
        inputs += of_input
        inputs += [c for op in unit.ops for c in key_collectives(local, op, backward=True)]
        weights += of_weight
        while pending and pending[-1].position >= unit.ops[0]:
            move = pending.pop()
            inputs += _communication(local, move, backward=True)
            weights += _regather(local, move)
    for move in reversed(pending):
        inputs += _communication(local, move, backward=True)
        weights += _regather(local, move)
    return inputs, weights


def _regather(local: LocalBlock, reshard: Reshard | Exchange) -> list[Collective]:
    """Megatron gathers a sequence-sharded product input once more for the weight gradients, while the input
    gradient is computed."""
    if isinstance(reshard, Exchange):
        return []
    gathers = reshard.before.startswith("S") and reshard.after == "R"
    if not gathers or not local.setting.regathers or not reshard.partial_gradient:
        return []
    return [replace(c, beside=True) for c in _collectives(local, reshard, backward=False)]


def _unit_backward(local: LocalBlock, unit: Unit) -> tuple[list[Kernel], list[Kernel]]:
    index, operators = local.index, local.index.block.operators
    inputs: list[Kernel] = []
    weights: list[Kernel] = []
    for op in unit.ops:
        if not any(v in index.needs_grad for v in operators[op].inputs):
            continue
        trains = any(v.startswith("param:") and v in index.needs_grad for v in operators[op].inputs)
        flows = any(v in index.needs_grad and index.is_activation(v) for v in operators[op].inputs)
        for spec in operators[op].backward:
            is_weight = spec.gradient_of == "weight"
            if is_weight and not trains and any(v.startswith("param:") for v in operators[op].inputs):
                continue
            if not is_weight and not flows and any(k.gradient_of == "weight" for k in operators[op].backward):
                continue
            (weights if is_weight else inputs).extend(local.kernels(op, (spec,), backward=True))
    if not unit.fused or len(inputs) + len(weights) < 2:
        of_inputs, of_weights = (_dispatched(local, len(found), backward=True) for found in (inputs, weights))
        return [*(k for k in inputs if k.count), *of_inputs], [*(k for k in weights if k.count), *of_weights]
    gradients = [v for v in (*unit.inputs, *unit.outputs) if v in index.needs_grad and index.is_activation(v)]
    kept = [s.value for _, s in unit.saved if s.value and s.value in index.specs]
    moved = sum(_bytes(local, unit, v) for v in (*gradients, *kept))
    joined = [_joined(local, [*inputs, *weights], moved, backward=True)]
    params = [v for v in unit.inputs if v.startswith("param:") and v in index.needs_grad]
    if not params:
        return joined, []
    widest = max((_bytes(local, unit, v) for v in gradients), default=0)
    return joined, [_joined(local, [], WEIGHT_PASSES * widest, backward=True)]
