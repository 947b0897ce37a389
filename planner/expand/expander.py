"""From a complete strategy to the program of one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.costmodel.price import Pricer
from autoparallel.costmodel.program import BlockWork, Collective, CollectiveOp, Program, StageWork
from autoparallel.costmodel.simulate import Prepared, prepare_simulation
from autoparallel.planner.expand import state
from autoparallel.planner.expand.axes import mesh_axes as mesh_axes
from autoparallel.planner.expand.axes import nearest_stride as nearest_stride
from autoparallel.planner.expand.chain import (
    even_stages,
    find_ties,
    stage_ranges,
)
from autoparallel.planner.expand.cold import host_bytes, with_cold_rows
from autoparallel.planner.expand.deferred import with_deferred
from autoparallel.planner.expand.gathers import gathers_late, gathers_of, regather_of, updated_gather
from autoparallel.planner.expand.halves import with_whole_second_halves
from autoparallel.planner.expand.hosted import with_whole_tensors
from autoparallel.planner.expand.one_by_one import fetches, with_fetches
from autoparallel.planner.expand.places import Place, placed_unit, stage_places, waits_bytes, without
from autoparallel.planner.expand.schedules import Schedule, build_schedule, rank_of_stage
from autoparallel.planner.expand.tables import TablePlace, hot_graph, places
from autoparallel.planner.expand.under_way import with_under_way
from autoparallel.planner.expand.works import LocalWorks
from autoparallel.planner.sharding.plan import TensorPlan
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.hardware import Cluster

MIB = state.MIB


@dataclass(frozen=True)
class Expander:
    """Expands strategies of one model on one cluster.

    Work that strategies share is kept in the caches it holds, keyed by all that it depends on; an Expander
    made anew gives the same programs.
    """

    graph: ModelGraph
    cluster: Cluster
    works: LocalWorks = field(init=False, repr=False, compare=False)
    _schedules: dict[tuple[str, int, int, int], Schedule] = field(
        default_factory=dict, repr=False, compare=False
    )
    _prepared: dict[tuple[str, int, int, int, bool, bool, bool], Prepared] = field(
        default_factory=dict, repr=False, compare=False
    )
    _pricers: list[Pricer] = field(default_factory=list, repr=False, compare=False)
    _flops: dict[int, int] = field(default_factory=dict, repr=False, compare=False)  # by global batch
    placed: tuple[TablePlace, ...] = ()  # tables of which `graph` has the hot rows alone
    _tiered: dict[tuple[TablePlace, ...], Expander] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "works", LocalWorks(self.graph, self.cluster))

    def elsewhere(self, cluster: Cluster) -> Expander:
        """One for the same model on another cluster, which shares the work that is the same there."""
        other = Expander(
            graph=self.graph, cluster=cluster, placed=self.placed, _schedules=self._schedules, _prepared=self._prepared
        )  # fmt: skip
        object.__setattr__(other, "works", self.works.elsewhere(cluster))
        return other

    def tensor_plan(self, strategy: Strategy) -> TensorPlan:
        """As `LocalWorks.tensor_plan`."""
        return self.works.tensor_plan(strategy)

    def work(self, strategy: Strategy, block: int, recompute: str) -> BlockWork:
        """As `LocalWorks.work`."""
        return self.works.work(strategy, block, recompute)

    @property
    def pricer(self) -> Pricer:
        """Prices of kernels and collectives on this cluster, shared by every strategy."""
        if not self._pricers:
            self._pricers.append(Pricer(self.cluster))
        return self._pricers[0]

    def lay_out(self, strategy: Strategy, other: Expander) -> None:
        """Take over another expander's actions of the strategy's schedule, and their order."""
        self._schedules[_schedule_key(strategy)[:4]] = other.schedule(strategy)
        self._prepared[_schedule_key(strategy)] = other.prepared(strategy)

    def prepared(self, strategy: Strategy) -> Prepared:
        """What of a strategy's simulation depends on its schedule alone."""
        key = _schedule_key(strategy)
        if key not in self._prepared:
            self._prepared[key] = prepare_simulation(
                self.schedule(strategy),
                overlap=strategy.grad_sync.overlap,
                blocking_sends=strategy.execution.blocking_sends,
                late_gathers=gathers_late(strategy),
            )
        return self._prepared[key]

    def knows(self, strategy: Strategy) -> bool:
        """Whether its schedule has been laid out and `prepared`."""
        return _schedule_key(strategy) in self._prepared

    def schedule(self, strategy: Strategy) -> Schedule:
        """The actions of every pipeline rank."""
        key = _schedule_key(strategy)[:4]
        if key not in self._schedules:
            self._schedules[key] = build_schedule(*key)
        return self._schedules[key]

    def tiered(self, placed: tuple[TablePlace, ...]) -> Expander:
        """The expander of the model with these tables' cold rows elsewhere."""
        if placed not in self._tiered:
            self._tiered[placed] = Expander(
                hot_graph(self.graph, placed), self.cluster, placed=placed, _pricers=[self.pricer],
                _schedules=self._schedules, _prepared=self._prepared,
            )  # fmt: skip
        return self._tiered[placed]

    def program(self, strategy: Strategy) -> Program:
        """The program of one optimizer step. The strategy must be legal (`planner.legal`)."""
        if not self.placed and (placed := places(self.graph, strategy)):
            return self.tiered(placed).program(strategy)
        mesh, sync = strategy.mesh, strategy.grad_sync
        zero = state.zero_level(strategy)
        return Program(
            ranks=self.schedule(strategy),
            stages=self.stages(strategy),
            axes=mesh_axes(strategy),
            micro_batches=strategy.micro_batches,
            dtype=strategy.execution.dtype,
            overlap=sync.overlap,
            blocking_launches=strategy.execution.blocking_launches,
            blocking_sends=strategy.execution.blocking_sends,
            late_gathers=gathers_late(strategy),
            bucket_bytes=0 if zero == 3 else round(sync.bucket_mib * MIB),
            reduce_every_micro=state.gradient_level(strategy) >= 2,
            kernels=strategy.execution.kernels,
            model_flops=self._model_flops(strategy.batch.global_),
            tokens=strategy.batch.global_ * self.graph.tokens_per_sample,
            groups=mesh.groups,
            host_bytes=host_bytes(self.placed, strategy, self.cluster) if self.placed else 0,
        )

    def _model_flops(self, batch: int) -> int:
        if batch not in self._flops:
            self._flops[batch] = self.graph.model_flops(batch)
        return self._flops[batch]

    def stages(self, strategy: Strategy) -> tuple[StageWork, ...]:
        """Every stage's work and state."""
        pipeline, mesh = strategy.pipeline, strategy.mesh
        chunks = mesh.pp * pipeline.virtual_stages
        blocks = pipeline.stage_blocks or even_stages(len(self.graph.repeated_positions), chunks)
        ranges = stage_ranges(self.graph, blocks)
        rank_of = rank_of_stage(pipeline.schedule, mesh.pp, pipeline.virtual_stages)
        ties = find_ties(self.graph, ranges, rank_of, copies=strategy.execution.fsdp2)
        full = strategy.recompute.per_stage or (0,) * chunks
        made: dict[tuple[object, ...], StageWork] = {}
        alike: dict[tuple[object, ...], BlockWork] = {}
        found = []
        for stage, positions in enumerate(ranges):
            links = self._links(strategy, positions, full[stage])
            placed = stage_places(self.graph, positions, ties, strategy)
            crossing = tuple(tie for s, tie in ties.crossing if s == stage)
            last = stage == chunks - 1
            back = self.cluster.network is not None and not last and rank_of[stage + 1] < rank_of[stage]
            handed = self._handed_bytes(strategy, positions, links)
            # What equal blocks send may grow from stage to stage, as the outputs of a recommender's tables do.
            sends = () if last else self.graph.chain[positions[-1]].sends
            key = (links, placed, crossing, sends, last, back, handed, stage == 0)
            if key not in made:
                each = tuple(zip(links, placed, strict=True))
                for one in each:
                    if one not in alike:
                        alike[one] = self._synchronised(strategy, *one)
                works = with_whole_second_halves([alike[one] for one in each], strategy, stage, full[stage])
                send, received = (None, None) if last else self._send(strategy, positions[-1])
                tied, gathered = (
                    self.tied(strategy, positions, crossing),
                    self._gathered(strategy, positions),
                )
                if back and send is not None:
                    send = replace(send, wraps=True)
                made[key] = replace(
                    _stage(works, send, tied, gathered, strategy), received=received, input_bytes=handed
                )
            here = tuple(p for p in self.placed if p.table.position in positions)
            cold = with_cold_rows(made[key], here, positions, strategy, self.cluster) if here else made[key]
            found.append(cold)
        if strategy.execution.fsdp2 and 0.0 < strategy.offload.optimizer < 1.0 and not self.placed:
            found = with_whole_tensors(self.works, strategy, found, ranges, rank_of, ties)
        # With tables in tiers a stage has links of theirs, too, for which what reductions hold is not told apart.
        if not self.placed:
            found = with_under_way(self.works, strategy, found, ranges, ties)
            found = with_deferred(self.works, strategy, found, ranges, ties)
        return tuple(found)

    def _links(self, strategy: Strategy, positions: range, full: int) -> tuple[tuple[int, str], ...]:
        """(block, recomputation) of each link of a stage: the first `full` repeated ones in full."""
        found, repeated = [], 0
        for position in positions:
            link = self.graph.chain[position]
            mode = "none"
            if link.repeated:
                mode = "full" if repeated < full else strategy.recompute.mode
                repeated += 1
            found.append((link.block, mode))
        return tuple(found)

    def _synchronised(self, strategy: Strategy, link: tuple[int, str], place: Place) -> BlockWork:
        work = self.work(strategy, *link)
        if fetches(strategy):
            return self.fetched(strategy, work, link[0], place.dropped)
        parameters = work.parameters
        work = without(self.works, strategy, work, link[0], place.dropped)
        if strategy.execution.fsdp2:  # which gathers a tied tensor once
            parameters = work.parameters
        gather, expert_gather = gathers_of(parameters, work.expert_parameters, strategy)
        reduce = state.reduction_of(work.trainable, strategy, work.expert_trainable)
        partial, every = self.partial_gradients(strategy, link[0]), tuple[Collective, ...]()
        if strategy.execution.fsdp2 and state.casts_parameters(strategy):
            every = partial  # FSDP2 adds up what it casts as it comes
        else:
            reduce = (*partial, *reduce)
        regather = regather_of(parameters, work.expert_parameters, strategy)
        weight = (*work.backward_weight, *every, *state.accumulation_kernel(work, strategy))
        if not strategy.execution.fsdp2:
            waiting = waits_bytes(self.works, strategy, link[0], place)
            return replace(work, gather=gather, regather=regather, expert_gather=expert_gather, reduce=reduce,
                           backward_weight=weight, waiting_bytes=waiting)  # fmt: skip
        work = replace(work, gather=gather, regather=regather, expert_gather=expert_gather)
        work = placed_unit(self.works, strategy, work, link[0], reduce, place)
        return replace(work, reduce=reduce, backward_weight=weight)

    def fetched(self, strategy: Strategy, work: BlockWork, block: int, dropped: frozenset[str]) -> BlockWork:
        """A block whose parameters are fetched one by one: nothing is gathered or reduced for it as a whole."""
        plan = dict(self.tensor_plan(strategy).blocks[block].params)
        parameters = self.graph.blocks[block].parameters
        own = [p for p in parameters if p.name not in dropped]
        numels = [p.numel // (strategy.mesh.tp if plan[p.name].startswith("S") else 1) for p in own]
        return with_fetches(work, numels, strategy)

    def partial_gradients(self, strategy: Strategy, block: int) -> tuple[Collective, ...]:
        """The sum over tp of the gradients of replicated parameters that saw a part of the data, once a step or, as whatever FSDP2
        reduces or casts, in every micro-batch."""
        if strategy.mesh.tp == 1:
            return ()
        names = self.tensor_plan(strategy).blocks[block].partial_params
        count = sum(p.numel for p in self.graph.blocks[block].parameters if p.name in names)
        if not count:
            return ()
        at_once = strategy.execution.fsdp2 and (
            state.gradient_level(strategy) >= 2 or state.casts_parameters(strategy)
        )
        item = state.computed_bytes(strategy) if at_once else state.dtype_bytes(strategy.execution.grad_dtype)
        size = count * item
        return (Collective(op=CollectiveOp.ALL_REDUCE, axes=("tp",), size_bytes=size, label="tp"),)

    def _send(self, strategy: Strategy, position: int) -> tuple[Collective, Collective | None]:
        """The message after a link, and what joins its shares where it is received."""
        mesh, link = strategy.mesh, self.graph.chain[position]
        local = self.works.local(strategy, link.block)
        sharded = "S1" if strategy.shard.sequence_parallel and mesh.tp > 1 else "R"
        size = sum(local.spec_bytes(spec, sharded) for spec in link.sends)
        gather = None
        if scatters_messages(strategy):
            gather = Collective(op=CollectiveOp.ALL_GATHER, axes=("tp",), size_bytes=size, label="pp")
            size = state.share(size, mesh.tp)
        return Collective(op=CollectiveOp.SEND, axes=("pp",), size_bytes=size, label="pp"), gather

    def _handed_bytes(self, strategy: Strategy, positions: range, links: Sequence[tuple[int, str]]) -> int:
        """What a stage was handed, beside what its first block keeps of it: `auto_parallelize` holds it until the backward pass is
        over, which collects its gradient (`runtime/pipeline/executor.py`)."""
        if not strategy.execution.fsdp2 or not positions or not positions[0]:
            return 0
        sent, _ = self._send(strategy, positions[0] - 1)
        return max(sent.size_bytes - self.works.kept_input_bytes(strategy, *links[0]), 0)

    def _gathered(self, strategy: Strategy, positions: range) -> int:
        """Megatron keeps one buffer for its sequence-parallel gathers, as large as the largest of them."""
        if strategy.mesh.tp == 1 or strategy.execution.kernels != "fused":
            return 0
        found = 0
        for block in dict.fromkeys(self.graph.chain[p].block for p in positions):
            local = self.works.local(strategy, block)
            gathers = [
                r
                for r in local.plan.reshards
                if r.before.startswith("S") and r.after == "R" and r.partial_gradient
            ]
            found = max([found, *(local.value_bytes(r.value, "R") for r in gathers)])
        return found

    def tied(self, strategy: Strategy, positions: range, ties: Sequence[str]) -> tuple[Collective, ...]:
        """Gradients of tied tensors, exchanged between the two ranks that hold them."""
        found, item = [], state.tied_gradient_bytes(strategy.execution)
        for tie in ties:
            block, parameter = next(
                (self.graph.chain[p].block, parameter) for p in positions
                for parameter in self.graph.blocks[self.graph.chain[p].block].parameters if parameter.tied == tie
            )  # fmt: skip
            placement = dict(self.tensor_plan(strategy).blocks[block].params)[parameter.name]
            parts = strategy.mesh.tp if placement.startswith("S") else 1
            if state.zero_level(strategy) >= 1:
                parts *= state.shard_ranks(strategy)
            # An all-reduce of two ranks is one message each way at once.
            found.append(
                Collective(
                    op=CollectiveOp.SEND, axes=("pp",), size_bytes=state.share(parameter.numel * item, parts),
                    label="pp", wraps=self.cluster.network is not None,
                )
            )  # fmt: skip
        return tuple(found)


def scatters_messages(strategy: Strategy) -> bool:
    """Whether tensor-parallel ranks, which have the same activation, each send a share of it, which the receivers
    gather: Megatron and DeepSpeed do, this runtime does not. Under sequence parallelism they have shares anyway.

    Source: Narayanan et al. 2021, section 4.1 (scatter/gather); deepspeed.runtime.pipe.engine, PartitionedTensor.
    """
    fused = strategy.execution.kernels == "fused"
    return fused and strategy.mesh.tp > 1 and not strategy.shard.sequence_parallel


def _stage(
    works: Sequence[BlockWork], send: Collective | None, tied: tuple[Collective, ...], gathered: int,
    strategy: Strategy,
) -> StageWork:  # fmt: skip
    parameters, trainable = sum(w.parameters for w in works), sum(w.trainable for w in works)
    experts = (sum(w.expert_parameters for w in works), sum(w.expert_trainable for w in works))
    held, graded, stepped = state.state_bytes(parameters, trainable, strategy, experts)
    return StageWork(
        blocks=tuple((work, len(list(run))) for work, run in groupby(works)),
        send=send,
        optimizer=(
            *state.optimizer_kernel(trainable, strategy, experts[1]),
            *state.per_tensor_updates(sum(w.trainable_tensors for w in works), strategy),
        ),
        after_step=updated_gather(parameters, strategy, experts[0]),
        parameter_bytes=held,
        gradient_bytes=graded,
        optimizer_bytes=stepped,
        host_bytes=state.offloaded_state_bytes(trainable, strategy, experts[1]),
        output_bytes=send.size_bytes * (strategy.mesh.tp if scatters_messages(strategy) else 1)
        if send and strategy.execution.kept_outputs
        else 0,
        buffer_bytes=sum(w.buffer_bytes for w in works)
        + gathered
        + state.stage_buffers(parameters, trainable, graded, strategy),
        tied_reduce=(*tied, *state.replica_reduction(trainable, strategy, experts[1])),
    )


def _schedule_key(strategy: Strategy) -> tuple[str, int, int, int, bool, bool, bool]:
    pipeline = strategy.pipeline
    return (
        pipeline.schedule, strategy.mesh.pp, pipeline.virtual_stages, strategy.micro_batches,
        strategy.grad_sync.overlap, strategy.execution.blocking_sends, gathers_late(strategy),
    )  # fmt: skip
