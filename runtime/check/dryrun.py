"""A dry run: the module lowered for one rank of a strategy and run for one step, on tensors without memory.

Everything is what `parallelize` does — the same shards, hooks and collectives — but the process group is a fake
one, whose collectives return at once, and the tensors are fake ones. Stages of a pipeline are lowered and run one
after another in this one process; what they would send each other is handed over and noted. The rank is the first
of each data- and tensor-parallel group: where sizes do not divide, it is the one that holds most.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from autoparallel.costmodel.program import CollectiveOp
from autoparallel.errors import UserError
from autoparallel.planner.capture.library_kernels import library_kernels
from autoparallel.planner.expand.schedules import rank_of_stage
from autoparallel.planner.strategy.types import Execution, Strategy
from autoparallel.runtime.capabilities.rows import GLOO
from autoparallel.runtime.check.device_kernels import DeviceKernels
from autoparallel.runtime.check.halves import (
    SEEN_WHOLE,
    as_scheduled,
    first_half,
    has_whole_passes,
    splits,
    whole_passes,
)
from autoparallel.runtime.check.handed import handed_on, received, ways_back
from autoparallel.runtime.check.inputs import loss_of, on_cpu, one_micro_batch
from autoparallel.runtime.check.live_bytes import Live, LiveBytes, last_of, note
from autoparallel.runtime.check.messages import Message, Place
from autoparallel.runtime.check.module_names import ModuleNames
from autoparallel.runtime.check.optimizer_state import optimizer_bytes
from autoparallel.runtime.check.small_values import SmallValues
from autoparallel.runtime.check.traffic import TrafficRecorder, dispatch_group, group_names
from autoparallel.runtime.dtensor_private import unseen_propagation
from autoparallel.runtime.experts.modules import ExpertModule
from autoparallel.runtime.experts.parallel import Sharing, check_experts, experts_within
from autoparallel.runtime.fsdp_private import accumulated_bytes
from autoparallel.runtime.gradients.replicas import with_levels
from autoparallel.runtime.loading.materialise import all_names
from autoparallel.runtime.lowering.lower import Dtypes, Lowered, hold_in, lower_module, torch_dtype
from autoparallel.runtime.lowering.micro_batches import as_call
from autoparallel.runtime.lowering.parallel_module import numerics
from autoparallel.runtime.pipeline.channels import describe, gradient_part, rebuild
from autoparallel.runtime.pipeline.module import recomputed_stages, rules_within
from autoparallel.runtime.pipeline.ties import separate_ties
from autoparallel.runtime.ranks.accelerator import CPU
from autoparallel.runtime.ranks.mesh import RankMesh, build_mesh
from autoparallel.runtime.stages.alike import alike_stages
from autoparallel.runtime.stages.cut import StageModule, cut
from autoparallel.runtime.start import check_strategy
from autoparallel.runtime.tensor.questions import local
from autoparallel.runtime.torch_private import (
    as_one_of,
    backward_under_modes,
    fake_tensors,
    traced_as,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredStage:
    """What one stage (chunk) holds on one rank, bytes, and what a step of it communicates.

    `gathered_bytes` are whole parameters that data parallelism has gathered, beside the `parameter_bytes` that the rank owns, at the
    end of a forward pass; `gradient_bytes` the most at the end of a micro-batch, `buffer_bytes` of it when the step begins.
    `places` says where its messages but those over pp come from, `live` what lived in its actions.
    """

    parameter_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    traffic: Counter[Message]
    buffer_bytes: int = 0
    under_way_bytes: int = 0  # that reductions hold beside gradients when the last backward pass is over
    places: Mapping[Message, Counter[Place]] = field(default_factory=dict)
    live: Mapping[str, Live] = field(default_factory=dict)

    def lived_in(self, action: str, *, last: bool) -> Live:
        """What lived in an action, in the `last` of its stage where that was told apart."""
        return self.live.get(last_of(action) if last else action, self.live[action])


def dry_run(
    module: nn.Module,
    example_inputs: Any,
    strategy: Strategy,
    *,
    blocks: Sequence[str],
    level_sizes: tuple[int, ...] = (),
    experts: Sequence[ExpertModule] | None = (),
    entered: Collection[str] = (),
    alone: Collection[str] = (),
    kinds: Mapping[str, int] | None = None,
    backend: str = GLOO,
) -> tuple[LoweredStage, ...]:
    """Lower `module`, which is on the meta device, by `strategy` and run a step of it; its stages in model order.

    `example_inputs` may be of any batch size; `experts` (each of them chosen equally often) `entered` and `alone` are as in
    `parallelize`. `kinds` numbers the kinds of blocks, by path: of pipeline stages that are alike one is run for all. `backend` runs the
    collectives. Raises UserError for a strategy that does not fit, and for a model whose forward reads values of its tensors, which are not there.
    """
    dtypes = _dtypes(strategy.execution)
    planned = {parameter.dtype for parameter in module.parameters()}
    hold_in(module, dtypes.param)
    with as_one_of(strategy.mesh.devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about devices and kernels that play no part here
        check_strategy(
            module, strategy, blocks, level_sizes, given=all_names(module), backend=backend,
            shares_experts=experts is not None,
        )  # fmt: skip
        sharings = check_experts(module, strategy.mesh, experts, CPU)
        mesh = with_levels(build_mesh(strategy.mesh, level_sizes), strategy)
        inputs = one_micro_batch(example_inputs, strategy.batch.micro, dict.fromkeys(planned, dtypes.param))
        stages = _stages(module, inputs, strategy, blocks, mesh)
        memory = fake_tensors()
        alike = alike_stages(stages, strategy, kinds or {})
        lowered = {
            i: _lowered(stages[i], module, strategy, blocks, mesh, dtypes, memory, sharings, entered, alone)
            for i in sorted({*alike})
        }
        with memory, library_kernels(module):
            return _Step(stages, lowered, alike, strategy, mesh, dtypes).run(on_cpu(inputs))


def _dtypes(execution: Execution) -> Dtypes:
    return Dtypes(
        compute=torch_dtype(execution.dtype),
        param=torch_dtype(execution.param_dtype),
        grad=torch_dtype(execution.grad_dtype),
    )


def _stages(
    module: nn.Module, inputs: Any, strategy: Strategy, blocks: Sequence[str], mesh: RankMesh
) -> tuple[nn.Module, ...]:
    """The whole module, or with a pipeline all of its stages, each with parameters of its own."""
    if strategy.mesh.pp == 1:
        return (module,)
    stages = cut(
        module, inputs, repeated_paths=blocks, stage_blocks=strategy.pipeline.stage_blocks, device=mesh.device
    )
    separate_ties(stages)
    return stages


def _lowered(
    stage: nn.Module, module: nn.Module, strategy: Strategy, blocks: Sequence[str], mesh: RankMesh, dtypes: Dtypes,
    memory: Any, experts: Sequence[Sharing], entered: Collection[str], alone: Collection[str],
) -> Lowered:  # fmt: skip
    full, rules, index, again = strategy.recompute.per_stage, strategy.tensor, 0, tuple[str, ...]()
    if isinstance(stage, StageModule):
        blocks, index, again = stage.stage_cut.blocks, stage.stage_cut.index, stage.stage_cut.again
        rules = rules_within(rules, stage) if strategy.mesh.tp > 1 else ()
    return lower_module(
        stage, blocks, strategy, mesh, dtypes,
        recomputed_in_full=full[index] if full else 0, rules=rules, origin=module, memory=memory,
        experts=experts_within(experts, stage), entered=entered, alone=alone, always_again=again,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Flight:
    """A micro-batch in a stage: what it received, where its backward pass begins, and what it hands on."""

    received: list[Tensor]
    ways: list[Any]
    handed: list[Tensor]


class _Step:
    """Runs the stages of a step in model order, and back, noting what each of them holds and sends.

    `alike[i]` is the stage that is `lowered` and run for stage i.
    """

    def __init__(
        self, stages: Sequence[nn.Module], lowered: Mapping[int, Lowered], alike: Sequence[int], strategy: Strategy,
        mesh: RankMesh, dtypes: Dtypes,
    ) -> None:  # fmt: skip
        self._stages, self._lowered, self._alike, self._strategy = stages, lowered, alike, strategy
        self._mesh, self._dtypes = mesh, dtypes
        self._splits, self._recomputed = splits(strategy), recomputed_stages(strategy, stages)
        self._leaves_whole = self._splits and has_whole_passes(strategy)
        self._axes, self._dispatch = group_names(mesh, strategy.shard), dispatch_group(mesh)
        self._parts = {g.group_name: g.size() for g in (*(mesh.levels or ()), *(mesh.shard_levels or ()))}
        self._activation_mesh = mesh.activation_mesh()
        pipeline = strategy.pipeline
        self._homes = rank_of_stage(pipeline.schedule, mesh.sizes.pp, pipeline.virtual_stages)
        self._own = {i: set(stages[i].parameters()) for i in lowered}  # FSDP2 puts others in their places
        self._owned = {i: _bytes_of(stages[i].parameters()) for i in lowered}
        self._gathered = [0] * len(stages)
        self._gradients, self._buffers, self._under_way = ([0] * len(stages) for _ in range(3))
        self._traffic: list[Counter[Message]] = [Counter() for _ in stages]
        self._passes: list[dict[str, Counter[Message]]] = [{} for _ in stages]
        self._sends: list[Counter[Message]] = [Counter() for _ in stages]
        self._places: list[dict[Message, Counter[Place]]] = [{} for _ in stages]
        self._tracker = ModuleNames()
        self._live = LiveBytes(self._module)
        self._lived: list[dict[str, Live]] = [{} for _ in stages]
        self._times: Counter[tuple[int, str]] = Counter()  # that an action of a stage was seen
        self._ends = False  # whether the last micro-batch runs

    def run(self, inputs: Any) -> tuple[LoweredStage, ...]:
        """One step: its micro-batches between the first and the last are alike, so that one of them is run."""
        gc.freeze()  # what is there already need not be looked at before every action
        try:
            with self._as_on_a_gpu(), self._tracker, self._live.watching_sizes(), self._live:
                self._micro_batches(inputs)
        finally:
            gc.unfreeze()
        self._exchange_tied()
        optimizer = optimizer_bytes(self._stages, self._homes, self._alike, self._strategy)
        return tuple(
            LoweredStage(
                parameter_bytes=self._owned[i], gathered_bytes=self._gathered[i],
                gradient_bytes=self._gradients[i], optimizer_bytes=optimizer[stage],
                traffic=self._scheduled(stage, i) + self._sends[stage], places=self._places[i],
                live=self._lived[i], buffer_bytes=self._buffers[i], under_way_bytes=self._under_way[i],
            )
            for stage, i in enumerate(self._alike)
        )  # fmt: skip

    @contextmanager
    def _as_on_a_gpu(self) -> Iterator[None]:
        """Kernels of attention and dropout are a GPU's, and models see no tracing, for which they would make masks."""
        flash = self._strategy.execution.attention != "unfused"
        kernels = DeviceKernels(flash=flash)
        with traced_as(eager=True), unseen_propagation(), SmallValues(), kernels:
            yield

    def _micro_batches(self, inputs: Any) -> None:
        count = self._strategy.micro_batches
        for stage, lowered in self._lowered.items():
            lowered.begin(min(count, 3 + self._leaves_whole))
            self._buffers[stage] = lowered.buffer_bytes()
        if count > 1:
            self._micro_batch(inputs)
        if self._leaves_whole:  # another whole one, which finds gradients
            self._micro_batch(inputs)
        if count > 2:
            self._micro_batch(inputs, often=count - 2 - self._leaves_whole)
        self._micro_batch(inputs, last=True)
        for stage, lowered in self._lowered.items():
            self._under_way[stage] = lowered.sync.under_way_bytes()
            with self._counting(stage, "REDUCE_GRAD"):
                lowered.finish()

    def _scheduled(self, stage: int, i: int) -> Counter[Message]:
        whole = whole_passes(self._strategy)[stage] if self._leaves_whole else SEEN_WHOLE
        return as_scheduled(self._traffic[i], self._passes[i], whole)

    def _exchange_tied(self) -> None:
        """Note the gradients of tensors that stages on several ranks hold, as `TiedGradients` adds them up."""
        first = self._stages[0]
        for tie in first.stage_cut.ties if isinstance(first, StageModule) else ():
            ranks = [self._homes[stage] for stage in tie.stages]
            for number, (stage, name) in enumerate(zip(tie.stages, tie.names, strict=True)):
                if (
                    len(set(ranks)) > 1 and ranks[number] not in ranks[:number]
                ):  # a rank adds up its own copies first
                    size = local(self._stages[stage].get_parameter(name)).nbytes
                    self._sends[stage][Message(op=CollectiveOp.SEND, axis="pp", size_bytes=size)] += 1

    def _micro_batch(self, inputs: Any, *, last: bool = False, often: int = 1) -> None:
        """Forward and backward of one micro-batch, which stands for `often` equal ones."""
        self._ends = last
        handed: list[Tensor] = []
        flights: dict[int, _Flight] = {}
        for stage, i in enumerate(self._alike):
            if i not in flights:
                flights[i] = self._forward_of(i, handed, inputs, last=last, often=often)
            handed = flights[i].handed
            self._sent(stage, stage + 1, [local(value) for value in handed], often)
        gradients: list[Tensor | None] = [None]
        parts: dict[int, list[Tensor]] = {}
        for stage, i in reversed(list(enumerate(self._alike))):
            wanted = [t for t in flights[i].received if t.requires_grad]
            if i not in parts:
                parts[i] = self._backward_of(i, flights[i].ways, gradients, wanted, often)
                self._gradients[i] = max(self._gradients[i], self._gradient_bytes(i))
            self._sent(stage, stage - 1, parts[i], often)
            gradients = [
                rebuild(p, describe(t), self._activation_mesh) for p, t in zip(parts[i], wanted, strict=True)
            ]

    def _backward_of(
        self,
        index: int,
        outputs: list[Any],
        gradients: list[Tensor | None],
        wanted: list[Tensor],
        often: int,
    ) -> list[Tensor]:
        """A backward pass, in two halves where the schedule splits it. Where it leaves some whole, so are the first two."""
        lowered = self._lowered[index]
        first = self._times[index, "B"] < SEEN_WHOLE
        if not self._splits or (first and self._leaves_whole):
            if self._splits:
                lowered.announce(last=False, whole=True)
            with self._counting(index, "B", often):
                backward_under_modes(outputs, gradients)
            return [gradient_part(t.grad, t) for t in wanted]
        weights, again = lowered.weights(), index in self._recomputed
        with self._counting(index, "B", often, half="I"):
            found, half = first_half(
                outputs, gradients, wanted, weights, puts_off=lowered.puts_off, recomputed=again
            )
        handed = sum(local(g).nbytes for g in found if g is not None)
        kept = self._lived[index]["I"].kept - handed  # that goes to another stage
        self._lived[index]["I"] = replace(self._lived[index]["I"], kept=kept)
        with self._counting(index, "B", often, half="W"):
            lowered.run_weights(half)
        return [gradient_part(g, t) for g, t in zip(found, wanted, strict=True)]

    def _forward_of(
        self, index: int, handed: list[Tensor], inputs: Any, *, last: bool, often: int
    ) -> _Flight:
        self._lowered[index].announce(last=last)
        is_last = index == len(self._stages) - 1
        with self._counting(index, "F", often):
            self._lowered[index].gather_ahead()  # in the first micro-batch: then all is there
            arrived = received(handed, self._live)
            outputs = self._forward(index, arrived, inputs)
            ways = ways_back(outputs, last=is_last)
            flight = _Flight(arrived, ways, [] if is_last else handed_on(outputs, self._live))
            del outputs
        self._gathered[index] = max(self._gathered[index], self._whole_bytes(index))
        return flight

    @contextmanager
    def _counting(self, stage: int, action: str, often: int = 1, *, half: str = "") -> Iterator[None]:
        gc.collect()  # what the action before left in cycles
        self._live.begin()
        with TrafficRecorder(self._axes, self._module, self._parts, self._dispatch) as recorder:
            yield
        self._note_lived(stage, half or action, self._live.end())
        if self._leaves_whole and action == "B":
            self._passes[stage].setdefault(half or action, Counter(recorder.found))
        self._traffic[stage].update({message: count * often for message, count in recorder.found.items()})
        for message, modules in recorder.modules.items():
            places = self._places[stage].setdefault(message, Counter())
            for module, count in modules.items():
                places[Place(action=action, module=module)] += count * often

    def _note_lived(self, stage: int, action: str, found: Live) -> None:
        self._times[stage, action] += 1
        made = self._gradients[stage] - self._buffers[stage] if self._times[stage, action] == 2 else 0
        last = self._ends and self._lowered[stage].sync.under_way_bytes() > 0
        note(self._lived[stage], action, found, made=made, alone=self._strategy.mesh.pp == 1, last=last)

    def _module(self) -> str:
        """The module that runs, forward or backward, by its path."""
        return self._tracker.innermost

    def _forward(self, index: int, received: list[Tensor], inputs: Any) -> list[Tensor]:
        stage, is_last = self._stages[index], index == len(self._stages) - 1
        args, kwargs = ((received, inputs), {}) if isinstance(stage, StageModule) else as_call(inputs)
        with numerics(self._strategy, self._dtypes, self._mesh):
            try:
                output = stage(*args, **kwargs)
            except Exception as error:
                raise UserError(
                    "the model's forward does not run on tensors without values "
                    f"({type(error).__name__}: {str(error).splitlines()[0]}): run it under torchrun instead"
                ) from error
            return [loss_of(output)] if is_last else list(output)

    def _sent(self, source: int, target: int, parts: Sequence[Tensor], often: int) -> None:
        """Note a message between two stages, if they are on two ranks."""
        if 0 <= target < len(self._homes) and self._homes[source] != self._homes[target]:
            size = sum(part.nbytes for part in parts)
            self._sends[source][Message(op=CollectiveOp.SEND, axis="pp", size_bytes=size)] += often

    def _whole_bytes(self, index: int) -> int:
        """Parameters that stand gathered in the module now, other than those that the rank owns."""
        return _bytes_of(p for p in self._stages[index].parameters() if p not in self._own[index])

    def _gradient_bytes(self, index: int) -> int:
        stage, lowered, own = self._stages[index], self._lowered[index], self._own[index]
        shares = [p.grad for p in own if p.grad is not None]
        whole = [p.grad for p in stage.parameters() if p.grad is not None and p not in own]
        return max(_bytes_of(shares), lowered.buffer_bytes()) + _bytes_of(whole) + accumulated_bytes(stage)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's parts, a tensor that several names stand for once."""
    return sum(local(tensor).nbytes for tensor in {id(t): t for t in tensors}.values())
