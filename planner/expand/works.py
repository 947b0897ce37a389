"""What one device does of each block: solved, laid out and localised once for all strategies that share it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from autoparallel.costmodel.block_index import BlockIndex, index_block
from autoparallel.costmodel.collectives import group_of
from autoparallel.costmodel.fusion import Unit
from autoparallel.costmodel.graph import ModelGraph, OpKind
from autoparallel.costmodel.program import Axis, BlockWork
from autoparallel.planner.expand.axes import tensor_stride
from autoparallel.planner.expand.backward_memory import BackwardBytes
from autoparallel.planner.expand.chain import carried_inputs, first_positions
from autoparallel.planner.expand.context import KEY_AND_VALUE
from autoparallel.planner.expand.layout import Layout
from autoparallel.planner.expand.local import LocalBlock, Setting
from autoparallel.planner.expand.local_memory import puts_off
from autoparallel.planner.expand.localize import Passes, fused_units, kept_storages, localize, passes_of
from autoparallel.planner.expand.offload import whole_storages_bytes, with_offloaded
from autoparallel.planner.sharding.experts import unsolved_plan
from autoparallel.planner.sharding.pareto import pareto_plan
from autoparallel.planner.sharding.plan import BlockPlan, TensorPlan
from autoparallel.planner.sharding.solve import TensorRequest, solve_tensor_plan
from autoparallel.planner.strategy.types import Execution, Mesh, Offload, Strategy, TensorRule
from autoparallel.profiles.hardware import Cluster, Device


@dataclass(frozen=True, slots=True)
class _WorkKey:
    block: int
    plan: int  # the identity of its plan: every plan stays alive
    micro: int
    tp: int
    cp: int
    ep: int
    recompute: str
    offloaded: float
    execution: Execution


@dataclass(frozen=True)
class LocalWorks:
    """The local work of one model's blocks on one cluster, in caches keyed by all that it depends on."""

    graph: ModelGraph
    cluster: Cluster
    _indices: dict[tuple[int, bool], BlockIndex] = field(default_factory=dict, repr=False, compare=False)
    _plans: dict[TensorRequest, TensorPlan] = field(default_factory=dict, repr=False, compare=False)
    # Likewise, of any cluster: what was asked of its groups, and by which devices.
    _solved: dict[tuple[TensorRequest, tuple[Hashable, ...]], list[tuple[Device, TensorPlan]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _strides: dict[Mesh, int] = field(default_factory=dict, repr=False, compare=False)
    _pareto: dict[TensorRequest, TensorPlan | None] = field(default_factory=dict, repr=False, compare=False)
    _same: dict[BlockPlan, BlockPlan] = field(default_factory=dict, repr=False, compare=False)
    _layouts: dict[tuple[int, int, bool], Layout] = field(default_factory=dict, repr=False, compare=False)
    _units: dict[tuple[int, str], tuple[Unit, ...]] = field(default_factory=dict, repr=False, compare=False)
    _passes: dict[_WorkKey, Passes] = field(default_factory=dict, repr=False, compare=False)
    _works: dict[_WorkKey, BlockWork] = field(default_factory=dict, repr=False, compare=False)

    def index(self, block: int, *, dropout: bool) -> BlockIndex:
        """The block's look-ups; dropout off turns its operators into views."""
        key = (block, dropout)
        if key not in self._indices:
            position = first_positions(self.graph)[block]
            carried = carried_inputs(self.graph, position)
            self._indices[key] = index_block(self.graph.blocks[block], carried=carried, dropout=dropout)
        return self._indices[key]

    def tensor_plan(self, strategy: Strategy) -> TensorPlan:
        """How each distinct block runs over the tp axis: the user's rules kept, the rest solved."""
        return self._plan_of(self._request(strategy))

    def _plan_of(self, request: TensorRequest) -> TensorPlan:
        if request not in self._plans:
            self.know({request: self._solve(request)})
        return self._plans[request]

    @property
    def plans(self) -> Mapping[TensorRequest, TensorPlan]:
        """The tensor-parallel plans solved so far."""
        return self._plans

    def know(self, plans: Mapping[TensorRequest, TensorPlan]) -> None:
        """Take plans that were solved; equal plans of a block become one, as everything else follows from them."""
        for request, plan in plans.items():
            blocks = tuple(self._same.setdefault(block, block) for block in plan.blocks)
            self._plans.setdefault(request, replace(plan, blocks=blocks))

    def elsewhere(self, cluster: Cluster) -> LocalWorks:
        """The same model on another cluster: other links ask for other plans, but where those are equal, so is the work."""
        return replace(self, cluster=cluster, _plans={}, _strides={}, _pareto={})

    def _solve(self, request: TensorRequest) -> TensorPlan:
        indices = tuple(
            self.index(b, dropout=request.execution.dropout > 0) for b in range(len(self.graph.blocks))
        )
        if request.tp == 1:
            return TensorPlan(blocks=tuple(unsolved_plan(index, request.ep) for index in indices))
        if request.cp > 1:
            alone = self._plan_of(replace(request, cp=1))
            if not any(self._has_whole_keys(b, plan) for b, plan in enumerate(alone.blocks)):
                return alone  # no other has less to communicate along cp
        asked = (replace(request, stride=0), self._groups(request))
        for device, plan in self._solved.setdefault(asked, []):
            if device is self.cluster.device:
                return plan
        without_experts = self._plans.get(replace(request, ep=1))
        plan = solve_tensor_plan(self.graph, indices, self.cluster, request, without_experts)
        self._solved[asked].append((self.cluster.device, plan))
        return plan

    def _groups(self, request: TensorRequest) -> tuple[Hashable, ...]:
        """What the cluster says of a request besides its devices: of its ranks' groups, and those of cp right outside them."""
        axes = (
            Axis(name="tp", size=request.tp, stride=request.stride),
            Axis(name="cp", size=request.cp, stride=request.tp * request.stride),
        )
        return tuple(group_of(axis, self.cluster) for axis in axes)

    def _has_whole_keys(self, block: int, plan: BlockPlan) -> bool:
        """Whether some attention of a block reads keys or values that no two ranks of tp divide."""
        return any(
            operator.kind is OpKind.ATTENTION
            and (sharding is None or not all(one.startswith("S") for one in sharding.inputs[KEY_AND_VALUE]))
            for operator, sharding in zip(self.graph.blocks[block].operators, plan.shardings, strict=True)
        )

    def pareto_plan(self, strategy: Strategy, memory_price: float) -> TensorPlan | None:
        """The plan that is best where memory has a price (`planner.sharding.pareto`); None where that is no other than the
        strategy's own, or no better in anything."""
        key = replace(self._request(strategy), memory_price=memory_price)
        if key not in self._pareto:

            def solve(rules: tuple[TensorRule, ...], price: float | None) -> TensorPlan:
                asked = replace(strategy, tensor=rules)
                if price is None:
                    return self.tensor_plan(asked)
                return self._solve(replace(self._request(asked), memory_price=price))

            self._pareto[key] = pareto_plan(self.graph, solve, strategy.tensor, memory_price)
        return self._pareto[key]

    def _layout(self, strategy: Strategy, block: int) -> Layout:
        plan, dropout = self.tensor_plan(strategy).blocks[block], strategy.execution.dropout > 0
        key = (block, id(plan), dropout)  # every plan stays alive
        if key not in self._layouts:
            self._layouts[key] = Layout(index=self.index(block, dropout=dropout), plan=plan)
        return self._layouts[key]

    def work(self, strategy: Strategy, block: int, recompute: str) -> BlockWork:
        """A block's local work for one micro-batch, before data parallelism."""
        mesh, execution = strategy.mesh, strategy.execution
        offloaded = strategy.offload.activations if block in self.graph.repeated_blocks else 0.0
        micro, plan = strategy.batch.micro, self.tensor_plan(strategy).blocks[block]
        ep = mesh.ep if plan.has_experts else 1  # elsewhere its size changes nothing
        key = _WorkKey(block, id(plan), micro, mesh.tp, mesh.cp, ep, recompute, offloaded, execution)
        if key not in self._works:
            if offloaded:
                here = self.work(replace(strategy, offload=Offload()), block, recompute)
                self._works[key] = with_offloaded(here, self._moved(strategy, block, key, here.saved_bytes))
            else:
                passes = self._passes_of(strategy, block, replace(key, recompute=""))
                self._works[key] = localize(passes, recompute)
        return self._works[key]

    def _moved(self, strategy: Strategy, block: int, key: _WorkKey, saved_bytes: int) -> int:
        """Bytes of what a block keeps that go to the host: a share of it, or under `auto_parallelize` whole storages."""
        if not strategy.execution.fsdp2:
            return round(saved_bytes * key.offloaded)
        passes = self._passes_of(strategy, block, replace(key, recompute="", offloaded=0.0))
        return whole_storages_bytes(kept_storages(passes, key.recompute).values(), key.offloaded)

    def kept_input_bytes(self, strategy: Strategy, block: int, recompute: str) -> int:
        """Bytes of what a block is given that it keeps until its backward pass."""
        mesh, plan = strategy.mesh, self.tensor_plan(strategy).blocks[block]
        ep = mesh.ep if plan.has_experts else 1
        key = _WorkKey(block, id(plan), strategy.batch.micro, mesh.tp, mesh.cp, ep, "", 0.0, strategy.execution)  # fmt: skip
        kept = kept_storages(self._passes_of(strategy, block, key), recompute)
        return sum(size for storage, size in kept.items() if storage.startswith("input:"))

    def backward(self, strategy: Strategy, block: int) -> BackwardBytes:
        """The memory of a block's backward pass where nothing is recomputed."""
        mesh, plan = strategy.mesh, self.tensor_plan(strategy).blocks[block]
        ep = mesh.ep if plan.has_experts else 1
        key = _WorkKey(
            block, id(plan), strategy.batch.micro, mesh.tp, mesh.cp, ep, "", 0.0, strategy.execution
        )
        return self._passes_of(strategy, block, key).backward_bytes

    def puts_off(self, strategy: Strategy) -> bool:
        """Whether all blocks put the gradients of their weights off in split backwards."""
        return all(puts_off(self.local(strategy, block)) for block in range(len(self.graph.blocks)))

    def _passes_of(self, strategy: Strategy, block: int, key: _WorkKey) -> Passes:
        if key not in self._passes:
            layout, kernels = self._layout(strategy, block), strategy.execution.kernels
            shape = (id(layout), kernels)
            if shape not in self._units:
                self._units[shape] = fused_units(layout, kernels)
            self._passes[key] = passes_of(layout, self._setting(strategy), self._units[shape])
        return self._passes[key]

    def local(self, strategy: Strategy, block: int) -> LocalBlock:
        """A block as one device of the strategy sees it."""
        return LocalBlock(layout=self._layout(strategy, block), setting=self._setting(strategy))

    def _request(self, strategy: Strategy) -> TensorRequest:
        tp, ep = (
            strategy.mesh.tp,
            min(strategy.mesh.ep, 2),
        )  # expert layers have one way to run, whatever ep is
        if tp == 1:  # nothing to solve: all such strategies share one plan
            return TensorRequest(tp=1, stride=1, sequence_parallel=False, execution=Execution(), ep=ep)
        if strategy.mesh not in self._strides:
            self._strides[strategy.mesh] = tensor_stride(strategy.mesh, self.cluster)
        return TensorRequest(
            tp=tp, stride=self._strides[strategy.mesh], ep=ep, cp=strategy.mesh.cp, rules=strategy.tensor,
            sequence_parallel=strategy.shard.sequence_parallel, execution=strategy.execution,
        )  # fmt: skip

    def _setting(self, strategy: Strategy) -> Setting:
        mesh = strategy.mesh
        return Setting(
            graph_dtype=self.graph.dtype, micro=strategy.batch.micro, tp=mesh.tp, cp=mesh.cp, ep=mesh.ep,
            execution=strategy.execution,
        )  # fmt: skip
