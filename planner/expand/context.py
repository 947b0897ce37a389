"""Context parallelism: every rank of cp has its share of the sequence, and attention needs the keys and values of all.

Everything but attention works on one's own tokens.

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
    """Whether an operator reads keys and values of the whole sequence, of which this rank has a part."""
    return local.setting.cp > 1 and local.index.block.operators[op].kind is OpKind.ATTENTION


def key_collectives(local: LocalBlock, op: int, *, backward: bool) -> list[Collective]:
    """What context parallelism communicates before an operator's forward, or after its backward."""
    if not needs_keys(local, op):
        return []
    ring = local.setting.execution.kernels == "fused"
    found = []
    for value in local.index.block.operators[op].inputs[KEY_AND_VALUE]:
        size = whole_bytes(local, op, value)
        if not backward or ring:
            found.append(_over_cp(CollectiveOp.ALL_GATHER, size, beside=ring))
        if backward and value in local.index.needs_grad:
            found.append(_over_cp(CollectiveOp.REDUCE_SCATTER, size, beside=ring))
    return found


def whole_bytes(local: LocalBlock, op: int, value: str) -> int:
    """Bytes of a key or value over the whole sequence."""
    return local.value_bytes(value, local.placement(op, value)) * local.setting.cp


def gathered_keys(local: LocalBlock, op: int) -> dict[str, int]:
    """Storage -> bytes of the keys and values over the whole sequence that an operator keeps for its backward pass: tensors of
    their own, whatever this rank's parts of them are views of."""
    if not needs_keys(local, op) or local.setting.execution.kernels == "fused":
        return {}
    operator = local.index.block.operators[op]
    return {
        f"{operator.name}{GATHERED}{v}": whole_bytes(local, op, v) for v in operator.inputs[KEY_AND_VALUE]
    }


def _over_cp(op: CollectiveOp, size_bytes: int, *, beside: bool) -> Collective:
    return Collective(op=op, axes=("cp",), size_bytes=size_bytes, label="cp", beside=beside)
