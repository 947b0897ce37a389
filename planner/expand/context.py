"""Context parallelism: every rank of cp has its share of the sequence, and attention needs the keys and values of all.

Everything but attention works on one's own tokens, and what goes over the sequence step by step or in chunks (recurrent layers,
state-space models, convolutions along it as a library's kernel): what that reads is gathered, it runs on every rank alike, and its
result is cut; on the way back the result's gradient is gathered, and each rank keeps its share of those of what was read.

    eager, compiled   keys and values are gathered before the attention kernel and kept whole for the backward
                      pass, whose gradients are reduced and scattered: nothing hides this
    fused             Megatron's ring: keys and values travel from rank to rank beside the kernels, and once more
                      in the backward pass, together with their gradients; only one's own share is kept

Fused and compiled, each rank holds the queries of two chunks of the sequence, one from its start and one from its end,
so that under a causal mask all compare equally many pairs (Megatron, torchtitan). Eager is what `runtime/context/functions.py`
runs: each rank holds one piece of the sequence, whatever the model's code does with positions, so that the rank with the
last piece compares most pairs, and the others wait for it.

Both move (cp - 1) / cp of all keys and values. Source of the second: Transformer Engine, AttnFuncWithCPAndKVP2P.
"""

from __future__ import annotations

from autoparallel.costmodel.graph import OpKind
from autoparallel.costmodel.program import Collective, CollectiveOp
from autoparallel.planner.expand.local import LocalBlock

KEY_AND_VALUE = slice(1, 3)  # among the inputs of an attention operator
GATHERED = "#gathered "  # in the name of a storage, between those of the operator and of the value


def needs_keys(local: LocalBlock, op: int) -> bool:
    """Whether an operator reads what the whole sequence holds, of which this rank has a part."""
    kind = local.index.block.operators[op].kind
    return local.setting.cp > 1 and kind in (OpKind.ATTENTION, OpKind.RECURRENT)


def key_collectives(local: LocalBlock, op: int, *, backward: bool) -> list[Collective]:
    """What context parallelism communicates before an operator's forward, or after its backward."""
    if not needs_keys(local, op):
        return []
    operator = local.index.block.operators[op]
    if operator.kind is OpKind.RECURRENT:
        if backward and not any(v in local.index.needs_grad for v in operator.inputs):
            return []
        first = operator.name if operator.name in local.index.specs else f"{operator.name}.0"
        values = (first,) if backward else _of_sequence(local, op)
        sizes = [local.value_bytes(v, "R") * local.setting.cp for v in values]
        return [_over_cp(CollectiveOp.ALL_GATHER, size, beside=False) for size in sizes]
    ring = local.setting.execution.kernels == "fused"
    found = []
    for value in operator.inputs[KEY_AND_VALUE]:
        size = whole_bytes(local, op, value)
        if not backward or ring:
            found.append(_over_cp(CollectiveOp.ALL_GATHER, size, beside=ring))
        if backward and value in local.index.needs_grad:
            found.append(_over_cp(CollectiveOp.REDUCE_SCATTER, size, beside=ring))
    return found


def _of_sequence(local: LocalBlock, op: int) -> tuple[str, ...]:
    """What holds the sequence of what an operator reads."""
    inputs = local.index.block.operators[op].inputs
    return tuple(v for v in inputs if any(n.per_sample for n in local.index.specs[v].shape))


def whole_bytes(local: LocalBlock, op: int, value: str) -> int:
    """Bytes of a value over the whole sequence."""
    return local.value_bytes(value, local.placement(op, value)) * local.setting.cp


def gathered_keys(local: LocalBlock, op: int) -> dict[str, int]:
    """Storage -> bytes of what an operator keeps of the whole sequence for its backward pass: tensors of their own, whatever this
    rank's parts of them are views of."""
    if not needs_keys(local, op):
        return {}
    operator = local.index.block.operators[op]
    if operator.kind is OpKind.ATTENTION:
        kept = () if local.setting.execution.kernels == "fused" else operator.inputs[KEY_AND_VALUE]
    else:
        saved = {one.value for one in operator.saved}
        kept = tuple(value for value in _of_sequence(local, op) if value in saved)
    return {f"{operator.name}{GATHERED}{v}": whole_bytes(local, op, v) for v in kept}


def _over_cp(op: CollectiveOp, size_bytes: int, *, beside: bool) -> Collective:
    return Collective(op=op, axes=("cp",), size_bytes=size_bytes, label="cp", beside=beside)
