"""Integer nanoseconds and kibibytes of every choice in a block's tensor-parallel problem.

What is minimised is one step of one micro-batch of `SAMPLES` samples: forward and backward kernels on local
shapes, the collectives that layout hooks cost, and once the sum of partial parameter gradients and the optimizer's
pass over the local parameters. Bytes kept and held break ties. With context parallelism all of this is one rank's share,
alike for every choice, but for the keys and values that its attention needs of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from autoparallel.costmodel.block_index import BlockIndex
from autoparallel.costmodel.collectives import collective_s
from autoparallel.costmodel.fusion import Unit, fuse
from autoparallel.costmodel.graph import OpKind, Parameter, Saved
from autoparallel.costmodel.kernels import kernel_s
from autoparallel.costmodel.program import Axis, Collective, CollectiveOp, Kernel
from autoparallel.planner.expand.context import key_collectives, needs_keys
from autoparallel.planner.expand.layout import Layout
from autoparallel.planner.expand.local import LocalBlock, Setting, inner_collectives
from autoparallel.planner.expand.local_memory import saved_bytes
from autoparallel.planner.expand.state import UPDATE_FLOPS, dtype_bytes, optimizer_bytes_per_parameter
from autoparallel.planner.sharding.plan import BlockPlan, conjugates, replicated_plan
from autoparallel.planner.sharding.problem import PARTIAL_GRADIENT, BlockProblem, layout
from autoparallel.planner.strategy.types import Execution
from autoparallel.profiles.hardware import Cluster

SAMPLES = 1  # the micro-batch the plan is made for: all its costs grow alike with the samples
NS_PER_S = 1e9
KIB = 1024
Kept = tuple[str, int]  # a storage and its kibibytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Integer nanoseconds, and kibibytes to break ties."""

    time_ns: int
    memory_kib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCosts:
    """Cost of `variants[op][k]`, of `changes[edge][before, after]` and of `params[name][placement]`.

    `partial_params[name]` is the sum over tp of a replicated parameter's partial gradient. `keeps[op][k]` are the
    storages that a variant keeps, and their kibibytes: whole, or of a share.
    """

    variants: tuple[tuple[Cost, ...], ...]
    changes: tuple[Mapping[tuple[str, str], Cost], ...]
    params: Mapping[str, Mapping[str, Cost]]
    partial_params: Mapping[str, Cost]
    keeps: tuple[tuple[tuple[Kept, ...], ...], ...]


def price_problem(
    problem: BlockProblem,
    cluster: Cluster,
    axis: Axis,
    execution: Execution,
    graph_dtype: str,
    *,
    ep: int = 1,
    cp: int = 1,
) -> BlockCosts:
    """Price every choice once; equal kernels and collectives are priced once. cp is right outside tp."""
    setting = Setting(graph_dtype=graph_dtype, micro=SAMPLES, tp=axis.size, ep=ep, execution=execution)
    known: dict[Kernel | Collective, float] = {}
    axes = (axis, Axis(name="cp", size=cp, stride=axis.size * axis.stride))
    seconds = partial(_seconds, known, cluster, axes, execution.kernels)
    whole = LocalBlock(
        layout=Layout(index=problem.index, plan=replicated_plan(problem.index.block)), setting=setting
    )
    shares = _fused_shares(whole)
    gathered = _regathered(problem, setting)
    most = max(map(len, problem.variants), default=0)
    each = [_with_variants(whole, problem, k) for k in range(most)]
    local = [each[: len(row)] for row in problem.variants]
    variants = [
        [_variant_cost(one, op, shares.get(op), seconds) for one in row] for op, row in enumerate(local)
    ]
    for op, row in enumerate(local if cp > 1 else ()):
        variants[op] = _with_keys(variants[op], [_keys_s(one, op, cp, seconds) for one in row])
    return BlockCosts(
        keeps=tuple(tuple(_keeps(one, op, gathered=gathered) for one in row) for op, row in enumerate(local)),
        variants=tuple(map(tuple, variants)),
        changes=_changes(problem, whole, seconds),
        params={
            p.name: {place: _parameter_cost(p, place, setting, seconds) for place in problem.params[p.name]}
            for p in problem.index.block.parameters
        },
        partial_params={p.name: _sum_cost(p, setting, seconds) for p in problem.index.block.parameters},
    )


def _seconds(
    known: dict[Kernel | Collective, float], cluster: Cluster, axes: tuple[Axis, ...], kernels: str,
    step: Kernel | Collective,
) -> float:  # fmt: skip
    if step not in known:
        if isinstance(step, Kernel):
            known[step] = kernel_s(step, cluster.device, kernels)
        else:
            known[step] = collective_s(step, axes, cluster)
    return known[step]


def _with_variants(whole: LocalBlock, problem: BlockProblem, number: int) -> LocalBlock:
    """The block with every operator as its variant of this number, or as its last one: what an operator costs asks for its own
    alone."""
    shardings = tuple(row[min(number, len(row) - 1)].sharding for row in problem.variants)
    plan = BlockPlan(shardings=shardings, params=whole.plan.params)
    return replace(whole, layout=Layout(index=whole.index, plan=plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """An operator's part in a fused unit: the unit's bytes forward and backward, and its operators."""

    forward_bytes: int
    backward_bytes: int
    operators: int


@lru_cache(maxsize=256)
def _units(index: BlockIndex, kernels: str) -> tuple[Unit, ...]:
    """As `fuse`; an index is itself alone, and asked for again for every degree."""
    return fuse(index, kernels)


def _fused_shares(whole: LocalBlock) -> dict[int, _Share]:
    """For operators that would run fused if no layout changed between them."""
    found: dict[int, _Share] = {}
    for unit in _units(whole.index, whole.setting.execution.kernels):
        launched = [op for op in unit.ops if op not in whole.index.aliases]
        if len(launched) < 2:
            continue
        outside = [v for v in (*unit.inputs, *unit.outputs) if whole.index.is_activation(v)]
        forward = sum(whole.value_bytes(v, "R") for v in outside)
        backward = sum(whole.value_bytes(v, "R") for v in outside if v in whole.index.needs_grad)
        share = _Share(forward_bytes=forward, backward_bytes=backward, operators=len(launched))
        found |= dict.fromkeys(launched, share)
    return found


def _variant_cost(local: LocalBlock, op: int, share: _Share | None, seconds: partial[float]) -> Cost:
    index, operator = local.index, local.index.block.operators[op]
    if share is not None:
        moved = (share.forward_bytes, share.backward_bytes)
        time_s = sum(seconds(_pass(b // local.split(op))) for b in moved) / share.operators
    else:
        kernels = local.kernels(op, operator.forward, backward=False)
        if any(v in index.needs_grad for v in operator.inputs):
            kernels += local.kernels(op, operator.backward, backward=True)
        time_s = sum(seconds(k) for k in kernels)
    time_s += sum(seconds(c) for c in inner_collectives(local, op))
    kept = 0
    if op not in index.aliases:
        kept = sum(local.spec_bytes(s.spec, local.placement(op, s.value)) for s in operator.saved)
    return Cost(time_ns=round(time_s * NS_PER_S), memory_kib=kept // KIB)


def _keys_s(local: LocalBlock, op: int, cp: int, seconds: partial[float]) -> float:
    """Seconds that context parallelism adds to an operator, times the ranks that share the sequence: what travels beside its
    kernels adds what takes longer than these."""
    shared = replace(local, setting=replace(local.setting, cp=cp))
    if not needs_keys(shared, op):
        return 0.0
    operator, total_s = shared.index.block.operators[op], 0.0
    for backward in (False, True):
        moved = key_collectives(shared, op, backward=backward)
        busy = shared.kernels(op, operator.backward if backward else operator.forward, backward=backward)
        hidden_s = sum(seconds(kernel) for kernel in busy) if any(one.beside for one in moved) else 0.0
        total_s += max(sum(seconds(one) for one in moved) - hidden_s, 0.0)
    return total_s * cp


def _with_keys(row: Sequence[Cost], keys_s: Sequence[float]) -> list[Cost]:
    """An operator's variants with what each takes longer for its keys and values than the one where that is least."""
    least_s = min(keys_s)
    return [
        replace(cost, time_ns=cost.time_ns + round((key_s - least_s) * NS_PER_S))
        for cost, key_s in zip(row, keys_s, strict=True)
    ]


def _regathered(problem: BlockProblem, setting: Setting) -> bool:
    """Whether what is gathered is kept as the share that it was: under sequence parallelism, where kernels are fused."""
    return setting.regathers and any(states == ("S1",) for states in problem.fixed.values())


def _keeps(local: LocalBlock, op: int, *, gathered: bool) -> tuple[Kept, ...]:
    """Storages that an operator keeps: what autograd has it save, and what a product with a weight gradient reads."""
    index, operator = local.index, local.index.block.operators[op]
    if op in index.aliases:
        return ()
    kept = {
        index.storage.get(s.value, s.value) or f"{operator.name}#{n}": s for n, s in enumerate(operator.saved)
    }
    if any(kernel.gradient_of == "weight" for kernel in operator.backward):
        read = (v for v in operator.inputs if index.is_activation(v))
        kept |= {index.storage[v]: Saved(value=v, spec=index.specs[v]) for v in read}
    found = dict[Kept, None]()
    for storage, saved in kept.items():
        share = gathered and saved.value and local.placement(op, saved.value) == "R"
        size = local.spec_bytes(saved.spec, "S") if share else saved_bytes(local, op, saved)
        found[storage, size // KIB] = None
    return tuple(found)


def _pass(moved: int) -> Kernel:
    return Kernel(kind=OpKind.ELEMENTWISE, dtype="bf16", flops=0, bytes_moved=moved)


def _changes(
    problem: BlockProblem, whole: LocalBlock, seconds: partial[float]
) -> tuple[Mapping[tuple[str, str], Cost], ...]:
    """The cost of each change at each edge: the same for values of one size."""
    known: dict[tuple[int, tuple[str, str]], Cost] = {}
    found = []
    for edge in problem.edges:
        size = whole.value_bytes(problem.nodes[edge.source].value, "R")
        for change in edge.changes:
            if (size, change) not in known:
                known[size, change] = _change_cost(size, whole.setting.tp, change, seconds)
        found.append({change: known[size, change] for change in edge.changes})
    return tuple(found)


def _change_cost(size: int, tp: int, change: tuple[str, str], seconds: partial[float]) -> Cost:
    before, after = change
    total = 0.0
    for _, op in conjugates(layout(before), layout(after), after == PARTIAL_GRADIENT):
        local = size // tp if op is CollectiveOp.ALL_TO_ALL else size
        total += seconds(Collective(op=op, axes=("tp",), size_bytes=local, label="tp"))
    return Cost(time_ns=round(total * NS_PER_S), memory_kib=0)


def _parameter_cost(p: Parameter, placement: str, setting: Setting, seconds: partial[float]) -> Cost:
    count = p.numel // setting.parts(placement)
    execution = setting.execution
    per_parameter = dtype_bytes(execution.param_dtype)
    if not p.trainable:
        return Cost(time_ns=0, memory_kib=count * per_parameter // KIB)
    state = optimizer_bytes_per_parameter(execution)
    gradient = dtype_bytes(execution.grad_dtype)
    update = Kernel(
        kind="optimizer", dtype="fp32", flops=count * UPDATE_FLOPS[execution.optimizer],
        bytes_moved=count * (gradient + 2 * state + per_parameter),
    )  # fmt: skip
    return Cost(
        time_ns=round(seconds(update) * NS_PER_S),
        memory_kib=count * (per_parameter + state + gradient) // KIB,
    )


def _sum_cost(p: Parameter, setting: Setting, seconds: partial[float]) -> Cost:
    """What its bytes add to the one all-reduce in which a block's partial gradients are summed."""
    size = p.numel * dtype_bytes(setting.execution.grad_dtype)
    step = Collective(op=CollectiveOp.ALL_REDUCE, axes=("tp",), size_bytes=size, label="tp")
    started = seconds(replace(step, size_bytes=1))
    return Cost(time_ns=round(max(seconds(step) - started, 0.0) * NS_PER_S), memory_kib=0)


def total(costs: Sequence[Cost]) -> Cost:
    """Sum of costs."""
    return Cost(time_ns=sum(c.time_ns for c in costs), memory_kib=sum(c.memory_kib for c in costs))
