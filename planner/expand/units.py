"""Units of FSDP2 (`execution.fsdp2`): repeated blocks, and modules outside of them whose parameters are their own.

A unit is gathered, and its gradients reduced, at once. What is left of a stage (tied tensors, parameters of the model
itself) is its root unit: it stays gathered for a whole pass, and its gradients stand until the backward pass is over.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from autoparallel.costmodel.graph import Block, ModelGraph, Parameter
from autoparallel.costmodel.program import BlockWork, Collective
from autoparallel.planner.expand import state
from autoparallel.planner.expand.backward_memory import BackwardBytes
from autoparallel.planner.expand.beside import Beside, whole_gradients
from autoparallel.planner.expand.glue import Coming, Glue, GlueUnit, ending_reduction, glue_peak
from autoparallel.planner.expand.schedules import SOME_WHOLE, SPLIT_BACKWARD
from autoparallel.planner.strategy.types import Strategy


def own_units(graph: ModelGraph) -> tuple[str, ...]:
    """Paths of the modules outside of the repeated blocks that are units."""
    glue = dict.fromkeys(link.block for link in graph.chain if not link.repeated)
    return tuple(module for block in glue for module in _own(graph.blocks[block]))


def _own(block: Block) -> list[str]:
    """Modules of which all parameters are read by their own code, and by none but theirs."""
    home = {f"param:{p.name}": p.name.rpartition(".")[0] for p in block.parameters}
    readers: dict[str, set[str]] = {}
    for operator in block.operators:
        for name in operator.inputs:
            if name in home:
                readers.setdefault(home[name], set()).add(operator.module)
    tied = {home[f"param:{p.name}"] for p in block.parameters if p.tied}
    modules = dict.fromkeys(home.values())
    return [m for m in modules if m and readers.get(m) == {m} and m not in tied]


def as_unit(
    work: BlockWork, block: Block, reduce: Sequence[Collective], strategy: Strategy,
    *, beside: Beside, backward: BackwardBytes | None, experts: Collection[str] = (),
) -> BlockWork:  # fmt: skip
    """The memory of a repeated block, a unit: all its gradients stand in the dtype of compute until they are copied into what is
    reduced, which is whole, and goes when the next unit is reduced.

    `costmodel.memory` adds what is gathered and reduced to the block's own backward, and what stands `beside` it. Parameters that are
    `experts` are a unit inside it, which the `backward` without recomputation says when to reduce.
    """
    whole, item = whole_gradients(reduce), state.computed_bytes(strategy)
    if state.gradient_level(strategy) < 2:
        return _summed_up(work, whole, strategy, beside, root=0)
    standing = work.backward_temp_bytes if work.standing_temp_bytes is None else work.standing_temp_bytes
    gathered = 0 if work.gather is None else work.gather.size_bytes
    elsewhere = 0 if beside.coming else beside.gathered
    if backward is not None and experts:
        more = max(standing - backward.standing, 0)  # that activations on the host take
        two = _two_units(work, block, strategy, experts)
        peak = glue_peak(two, backward.moments, before=beside.reduced)
        apart = 0 if work.expert_gather is None else work.expert_gather.size_bytes
        temp = (
            max(peak + more - apart, _after(work, block, strategy, beside))
            - whole
            - beside.inside
            - elsewhere
        )
        return replace(work, backward_temp_bytes=temp)
    passing = work.parameters * state.passing_per_parameter(strategy, state.dense_shards(strategy))
    # Each rank's share is made when the gradients have gone.
    share = _made_share(whole, strategy) // state.shard_ranks(strategy) - work.trainable * item
    reduced = work.left_bytes + whole + max(share, 0) - beside.reduced - max(gathered, passing)
    if _of_two(strategy):
        reduced -= min(whole // state.shard_ranks(strategy), work.parameters * item)
    temp = max(standing, reduced, _after(work, block, strategy, beside)) - whole - beside.inside - elsewhere
    return replace(work, backward_temp_bytes=temp)


def as_glue(
    work: BlockWork, block: Block, reduce: Sequence[Collective], dropped: Collection[str], strategy: Strategy,
    *, beside: Beside, backward: BackwardBytes, twice: Collection[str] = (),
) -> BlockWork:  # fmt: skip
    """The memory of glue, as `as_unit`: modules with parameters of their own are units, and what is left is part of the root unit,
    whose parameters are gathered, and counted, all through a pass (ZeRO-3). `twice`: tensors that a later block of the stage uses,
    too, and whose gradients that has made before."""
    whole = whole_gradients(reduce)
    if state.gradient_level(strategy) < 2:
        return _summed_up(work, whole, strategy, beside, root=_root_numbers(work, block, dropped))
    gathered = 0 if work.gather is None else work.gather.size_bytes
    root = root_bytes(work, block, dropped, strategy) if state.zero_level(strategy) == 3 else 0
    glue = replace(_glue(work, block, dropped, strategy, twice), ending=beside.ending)
    peak = glue_peak(glue, backward.moments, before=beside.reduced)
    if _of_two(strategy):
        shares = sum(unit.share for unit in (*glue.units, glue.root))
        last = glue_peak(replace(glue, coming=Coming.PASSING), backward.moments, before=beside.reduced)
        peak = max(peak - shares, last)
    return replace(
        work, backward_temp_bytes=peak - whole - (gathered - root) - beside.gathered - beside.inside, rooted_bytes=root,
        buffer_bytes=work.buffer_bytes + root,
    )  # fmt: skip


def _after(work: BlockWork, block: Block, strategy: Strategy, beside: Beside) -> int:
    """Beside the first link of a stage, when it is through: the reduction of the root unit. The link's own parameters, its gradients, and
    what was reduced before its own have gone."""
    if beside.ending is None:
        return 0
    gathers = (gather.size_bytes for gather in work.gathers)
    passing = passing_bytes(work, block, (), strategy, repeated=True)
    gone = work.trainable * state.computed_bytes(strategy) + sum(gathers) + passing + beside.reduced
    return work.left_bytes - gone + ending_reduction(beside.ending, _coming(strategy))


def _summed_up(work: BlockWork, whole: int, strategy: Strategy, beside: Beside, *, root: int) -> BlockWork:
    """Where gradients are reduced once a step. In the dtype in which they are summed up autograd adds each at once; in another one those
    of a micro-batch stand beside what has been summed up until the unit is through, and those of the root unit (`root` numbers) until
    the pass is over."""
    standing, item = work.backward_temp_bytes, state.computed_bytes(strategy)
    if not state.adds_at_once(strategy):
        standing = work.standing_temp_bytes or standing
    if not beside.reduced:  # the first to be reduced, when all that was summed up still stands
        # The root unit is the last one.
        trained = work.trainable - (0 if beside.alone else root)
        whole -= (work.trainable - trained) * state.dtype_bytes(strategy.execution.grad_dtype)
        # What this micro-batch made has been added by then, and the unit's parameters have gone; each rank's share comes.
        share = 0 if state.keeps_share_of_gradients(strategy) else whole // state.shard_ranks(strategy)
        gone = (trained + max(work.parameters - root, 0)) * item
        standing = max(standing, work.left_bytes + whole + share - gone)
    if beside.ending and not beside.alone:
        # Of what was summed up for the root unit the last tensor still stands beside its share.
        unit, summed = beside.ending, state.dtype_bytes(strategy.execution.grad_dtype)
        share = max(unit.share - unit.reduced + unit.last * summed // item, 0)
        standing = max(standing, work.left_bytes + unit.reduced + share - 2 * unit.whole - beside.gone)
    return replace(work, backward_temp_bytes=standing)


def _glue(
    work: BlockWork, block: Block, dropped: Collection[str], strategy: Strategy, twice: Collection[str]
) -> Glue:
    """The units of glue; tensor parallelism is taken to divide all alike. Of a unit of several parameters the last is taken to be
    its smallest (a bias)."""
    held = [p for p in block.parameters if p.name not in dropped]
    part = work.parameters / max(sum(p.numel for p in held), 1)
    ranks = state.shard_ranks(strategy)

    def unit(module: str, parameters: Sequence[Parameter]) -> GlueUnit:
        trained = [p.numel for p in parameters if p.trainable]
        numbers = (sum(p.numel for p in parameters), sum(trained), min(trained, default=0))
        names = frozenset(p.name for p in parameters)
        return _unit(strategy, module, names, [int(part * n) for n in numbers], ranks)

    own = {m: [p for p in held if p.name.rpartition(".")[0] == m] for m in _own(block)}
    return Glue(
        units=tuple(unit(m, parameters) for m, parameters in own.items() if parameters),
        root=unit("", [p for p in _rooted(block) if p.name not in dropped]), ending=None,
        makes=state.makes_gradients(strategy), twice=frozenset(twice), coming=_coming(strategy),
    )  # fmt: skip


def root_unit(work: BlockWork, block: Block, dropped: Collection[str], strategy: Strategy) -> GlueUnit:
    """What a block of glue has of its stage's root unit."""
    return _glue(work, block, dropped, strategy, ()).root


def units_of(
    work: BlockWork, block: Block, dropped: Collection[str], strategy: Strategy, experts: Collection[str], *, repeated: bool
) -> tuple[GlueUnit, ...]:  # fmt: skip
    """What FSDP2 gathers and reduces at once of a link of the chain, in the order of the model; the root unit's part, or a block's own,
    comes last."""
    if not repeated:
        glue = _glue(work, block, dropped, strategy, ())
        return (*glue.units, glue.root)
    if experts and work.expert_parameters:
        two = _two_units(work, block, strategy, experts)
        return (*two.units, two.root)
    trained = [p.numel for p in block.parameters if p.trainable and p.name not in dropped]
    last = trained[-1] * work.trainable // max(sum(trained), 1) if trained else 0
    numbers = [work.parameters, work.trainable, last]
    return (_unit(strategy, "", frozenset(), numbers, state.shard_ranks(strategy)),)


def joined(units: Sequence[GlueUnit]) -> GlueUnit:
    """Parts of a root unit as one, of which the smallest gradient is taken to be the last."""
    return GlueUnit(
        module="", names=frozenset(name for unit in units for name in unit.names), gathering=0,
        whole=sum(unit.whole for unit in units), gradients=sum(unit.gradients for unit in units),
        reduced=sum(unit.reduced for unit in units),
        share=sum(unit.share for unit in units), last=min(unit.last for unit in units),
    )  # fmt: skip


def last_reduction(work: BlockWork, block: Block, dropped: Collection[str], strategy: Strategy) -> int:
    """Bytes of what the last of the reductions of glue takes in, that of the first module to run."""
    units = _glue(work, block, dropped, strategy, ()).units
    return next((unit.reduced for unit in units if unit.reduced), 0)


def _two_units(work: BlockWork, block: Block, strategy: Strategy, experts: Collection[str]) -> Glue:
    """A block's experts, and what is left of it. Where a rank has fewer experts than ranks share them, they are cut along another dim,
    and put in order when they have been gathered.

    Source: `runtime/gradients/fsdp.py`; torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_all_gather_copy_out.
    """
    ranks = state.expert_shards(strategy).ranks
    cut = any(p.shape[0] // strategy.mesh.ep % ranks for p in block.parameters if p.name in experts)
    inside = _unit(
        strategy, next(iter(experts)).rpartition(".")[0], frozenset(experts),
        [work.expert_parameters, work.expert_trainable, work.expert_trainable // len(experts)],
        ranks, copies=2 if cut else 1,
    )  # fmt: skip
    # Where the forward runs again, it is in that that they come, before there is what it keeps.
    inside = replace(inside, gathering=inside.gathering - work.recomputed_bytes)
    numbers = [work.parameters - work.expert_parameters, work.trainable - work.expert_trainable, 0]
    rest = _unit(strategy, "", frozenset(), numbers, state.shard_ranks(strategy))
    return Glue(
        units=(inside,), root=rest, ending=rest if rest.reduced else None,
        makes=state.makes_gradients(strategy), coming=_coming(strategy),
    )  # fmt: skip


def _unit(
    strategy: Strategy,
    module: str,
    names: frozenset[str],
    numbers: Sequence[int],
    ranks: int,
    copies: int = 1,
) -> GlueUnit:
    """`numbers`: of parameters, of those that are trained, and of the last of these. `copies` of parameters are made as they come."""
    item, summed = state.computed_bytes(strategy), state.dtype_bytes(strategy.execution.grad_dtype)
    whole, trained, last = numbers
    return GlueUnit(
        module=module, names=names, whole=whole * item, gradients=trained * item, reduced=trained * summed, share=_made_share(trained * summed, strategy) // ranks,
        last=last * item, gathering=whole * item * copies,
    )  # fmt: skip


def _made_share(reduced_bytes: int, strategy: Strategy) -> int:
    """Of so many bytes of gradients what FSDP2 makes of them on all ranks while it reduces: shares, and the same in the parameters'
    dtype where that is another one. Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce."""
    execution = strategy.execution
    parameter, summed = state.dtype_bytes(execution.param_dtype), state.dtype_bytes(execution.grad_dtype)
    return reduced_bytes + (reduced_bytes * parameter // summed if parameter != summed else 0)


def _of_two(strategy: Strategy) -> bool:
    """Whether a step has two micro-batches, and parameters stay in between (ZeRO-2): shares of the first are not there before it,
    unless it finds buffers, and parameters go in the second."""
    two = strategy.micro_batches == 2 and state.zero_level(strategy) == 2
    return two and state.starts_without_gradients(strategy)


def with_incoming(work: BlockWork, units: Sequence[GlueUnit], beside: Beside, *, repeated: bool) -> BlockWork:
    """A link beside what its parameters came in, which FSDP2 keeps in a forward until the next unit is gathered; the walk has those of the
    link behind instead. Of glue, whose units come one after the other, no more is said than that the largest is there twice.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, wait_for_unshard.
    """
    own, temp = (
        0 if work.gather is None else work.gather.size_bytes - work.rooted_bytes,
        work.forward_temp_bytes,
    )
    if repeated:
        return replace(work, forward_temp_bytes=temp + max(own - beside.following, 0))
    largest = max((unit.whole for unit in units[:-1]), default=0)
    twice = 2 * largest - own - beside.following - work.saved_bytes
    return replace(work, forward_temp_bytes=max(temp, twice))


def _coming(strategy: Strategy) -> Coming:
    if state.zero_level(strategy) == 3:
        return Coming.GATHERED
    return Coming.STAYING if strategy.micro_batches > 1 else Coming.PASSING


def as_cast_unit(work: BlockWork, strategy: Strategy) -> BlockWork:
    """The memory of a block whose parameters FSDP2 casts and does not shard: its gradients, whole in the dtype of compute, are
    copied into the dtype in which they are summed up, and go; the copy is "reduced" into another, which is added to what is there. That
    is the sum itself in a step's first micro-batch (`state.starts_without_gradients`), and parameters in the dtype of compute go in its last."""
    if not strategy.execution.fsdp2 or not state.casts_parameters(strategy):
        return work
    copied, item = (
        work.trainable * state.dtype_bytes(strategy.execution.grad_dtype),
        state.computed_bytes(strategy),
    )
    standing = work.backward_temp_bytes if work.standing_temp_bytes is None else work.standing_temp_bytes
    between = work.left_bytes - work.trainable * item + 2 * copied
    first = between - copied if state.starts_without_gradients(strategy) else between
    last = between - work.parameters * item
    made = (last, max(first, last), between)[min(strategy.micro_batches, 3) - 1]
    if (
        strategy.pipeline.schedule in SPLIT_BACKWARD
    ):  # its gradients are made in passes of their own, but where these are whole
        made = between if strategy.pipeline.schedule in SOME_WHOLE else 0
    return replace(work, backward_temp_bytes=max(standing, work.left_bytes + copied, made))


def with_coming_and_going(
    work: BlockWork, block: Block, dropped: Collection[str], strategy: Strategy, *, repeated: bool
) -> BlockWork:
    """The memory of a block in a step of one micro-batch: gradients that its backward makes, and parameters that come with its
    forward and go with its backward, but for the root unit's, which stay all through the pass."""
    dense, experts = state.dense_shards(strategy), state.expert_shards(strategy)
    made = round(
        (work.trainable - work.expert_trainable) * state.made_per_gradient(strategy, dense)
        + work.expert_trainable * state.made_per_gradient(strategy, experts)
    )
    passing = passing_bytes(work, block, dropped, strategy, repeated=repeated)
    temp = work.backward_temp_bytes
    if made and not state.zero_level(strategy) and work.standing_temp_bytes is not None:
        temp = max(temp, work.standing_temp_bytes)  # all that it makes, which stays
    return replace(work, made_bytes=made, passing_bytes=passing, backward_temp_bytes=temp)


def passing_bytes(
    work: BlockWork, block: Block, dropped: Collection[str], strategy: Strategy, *, repeated: bool
) -> int:
    """Parameters that come with a block's forward and go with its backward."""
    dense, experts = (
        state.passing_per_parameter(strategy, shards)
        for shards in (state.dense_shards(strategy), state.expert_shards(strategy))
    )
    passing = (work.parameters - work.expert_parameters) * dense + work.expert_parameters * experts
    if passing and not repeated:
        passing -= _root_numbers(work, block, dropped) * dense
    return max(passing, 0)


def _rooted(block: Block) -> list[Parameter]:
    """The parameters of a block of glue that are in no unit of their own."""
    own = set(_own(block))
    return [p for p in block.parameters if p.name.rpartition(".")[0] not in own]


def rooted(block: Block) -> frozenset[str]:
    """Names of the parameters of a block of glue that are in no unit of their own."""
    return frozenset(p.name for p in _rooted(block))


def root_bytes(work: BlockWork, block: Block, dropped: Collection[str], strategy: Strategy) -> int:
    """Bytes of the parameters of a block of glue in the root unit, whole."""
    return _root_numbers(work, block, dropped) * state.computed_bytes(strategy)


def _root_numbers(work: BlockWork, block: Block, dropped: Collection[str]) -> int:
    """Of the parameters of a block of glue those in the root unit; tensor parallelism is taken to divide all alike."""
    numel = sum(p.numel for p in _rooted(block) if p.name not in dropped)
    whole = sum(p.numel for p in block.parameters if p.name not in dropped)
    return numel * work.parameters // whole if whole else 0
