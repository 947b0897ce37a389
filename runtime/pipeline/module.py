"""`PipelineModule`: what `auto_parallelize` returns with a pipeline — this rank's stages, driven by a program."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from autoparallel.costmodel.program import Program
from autoparallel.errors import UserError
from autoparallel.planner.capture.on_meta import with_batch
from autoparallel.planner.expand.schedules import build_schedule, rank_of_stage
from autoparallel.planner.strategy.types import GradSync, Strategy, TensorRule
from autoparallel.runtime.experts.parallel import Sharing, experts_within
from autoparallel.runtime.gradients.outer import all_parameters
from autoparallel.runtime.gradients.replicas import local_updates
from autoparallel.runtime.gradients.replicated import gradient_norm_squared
from autoparallel.runtime.gradients.synchronisation import with_sync
from autoparallel.runtime.loading.checkpoint_chunks import with_chunks
from autoparallel.runtime.loading.materialise import common_seed, on_meta
from autoparallel.runtime.loading.weights import Weights
from autoparallel.runtime.lowering.lower import Dtypes, Lowered, broadcast_state, lower_module
from autoparallel.runtime.lowering.micro_batches import (
    Sequences,
    Shared,
    loss_of,
    scalar,
    sequences_of,
    shared_by_samples,
    split,
    to_device,
)
from autoparallel.runtime.lowering.parallel_module import (
    LossFn,
    clip_gradients,
    fitting,
    gather_full,
    mean_over_replicas,
    numerics,
)
from autoparallel.runtime.memory.optimizer import Optimizers, ParallelOptimizer
from autoparallel.runtime.pipeline.executor import Hooks, PipelineRunner
from autoparallel.runtime.pipeline.groups import pipeline_group
from autoparallel.runtime.pipeline.ties import OwedOfStages, TiedGradients, separate_ties
from autoparallel.runtime.ranks.mesh import RankMesh
from autoparallel.runtime.ranks.progress import Progress, silent
from autoparallel.runtime.stages.cut import StageModule, cut, release
from autoparallel.runtime.tensor.questions import to_plain


def pipeline_module(
    module: nn.Module,
    example_inputs: Any,
    strategy: Strategy,
    *,
    blocks: Sequence[str],
    mesh: RankMesh,
    dtypes: Dtypes,
    program: Callable[[], Program],
    weights: Weights | None = None,
    experts: Sequence[Sharing] = (),
    entered: Collection[str] = (),
    alone: Collection[str] = (),
    progress: Progress = silent,
) -> PipelineModule:
    """This rank's pipeline stages of `module`, lowered by `strategy`; collective.

    `module` keeps only what this rank's stages hold; the rest of it moves to the meta device.
    """
    pipeline, ranks = strategy.pipeline, strategy.mesh.pp
    rows = build_schedule(pipeline.schedule, ranks, pipeline.virtual_stages, strategy.micro_batches)
    homes = rank_of_stage(pipeline.schedule, ranks, pipeline.virtual_stages)
    _check_stages(strategy, len(homes))
    broadcast_state(module, mesh.device)
    seed = common_seed(mesh.device) if on_meta(module) else 0
    mine = [stage for stage, rank in enumerate(homes) if rank == mesh.coordinate("pp")]
    aliases = _aliases(module)
    stages = cut(
        module,
        _one_micro_batch(example_inputs, strategy),
        repeated_paths=blocks,
        stage_blocks=pipeline.stage_blocks,
        stages=mine,
        device=mesh.device,
    )
    separate_ties(stages)
    release(module, stages)
    full = strategy.recompute.per_stage or (0,) * len(homes)
    lowered = []
    for stage in stages:
        rules = rules_within(strategy.tensor, stage) if strategy.mesh.tp > 1 else ()
        own = experts_within(experts, stage)
        lowered.append(
            lower_module(
                stage, stage.stage_cut.blocks, strategy, mesh, dtypes, rules=rules, origin=module, seed=seed,
                recomputed_in_full=full[stage.stage_cut.index], weights=weights, experts=own, entered=entered,
                alone=alone, always_again=stage.stage_cut.again,
            )
        )  # fmt: skip
    if not any(True for stage in stages for _ in stage.parameters()):
        warnings.warn(
            f"pipeline rank {mesh.coordinate('pp')} holds no parameters, and torch's optimizers refuse an empty list: make yours "
            "with model.optimizer(torch.optim.AdamW, lr=...)",
            stacklevel=2,
        )
    return PipelineModule(
        stages, lowered, rows, strategy=strategy, mesh=mesh, dtypes=dtypes, program=program, aliases=aliases,
        shared=shared_by_samples(example_inputs), progress=progress,
        sequences=sequences_of(example_inputs, strategy.batch.seq_len),
    )  # fmt: skip


def _check_stages(strategy: Strategy, stages: int) -> None:
    """Refuse blocks that are not divided among the stages that there are."""
    pipeline, ranks = strategy.pipeline, strategy.mesh.pp
    if len(pipeline.stage_blocks) != stages:
        raise UserError(
            f"pipeline.stage_blocks = {list(pipeline.stage_blocks)} must have one entry for each of the "
            f"{stages} stages (mesh.pp = {ranks} times pipeline.virtual_stages = {pipeline.virtual_stages})"
        )


def _one_micro_batch(example_inputs: Any, strategy: Strategy) -> Any:
    """What one forward pass gets, of however many samples the example is: a model that counts its samples in Python (the labels
    of a contrastive loss) is traced with as many as it is run with. Of one sample alone nobody knows which tensors have samples."""
    sizes = [t.shape[0] for t in tree_leaves(example_inputs) if isinstance(t, Tensor) and t.dim()]
    if sizes[:1] in ([], [1]):
        return example_inputs
    return with_batch(example_inputs, strategy.batch.micro, numbers=True)


def rules_within(rules: Sequence[TensorRule], stage: nn.Module) -> tuple[TensorRule, ...]:
    """The rules that name a module of `stage`; where there are none, one that replicates its parameters, so
    that every stage computes on the same kind of tensor."""
    paths = [path for path, _ in stage.named_modules()]

    def matches(rule: TensorRule) -> bool:
        pattern = re.compile(re.escape(rule.module).replace(r"\*", r"[^.]+"))
        return any(pattern.fullmatch(path) for path in paths if path)

    found = tuple(rule for rule in rules if matches(rule))
    return found or ((TensorRule(module=""),) if rules else ())


def recomputed_stages(strategy: Strategy, stages: Iterable[nn.Module]) -> frozenset[int]:
    """Stages with blocks of which more than attention runs again, by the strategy or, of these `stages`, by the model's own code."""
    own = {s.stage_cut.index for s in stages if isinstance(s, StageModule) and s.stage_cut.again}
    if strategy.recompute.mode in ("full", "operators"):
        return frozenset(range(len(strategy.pipeline.stage_blocks)))
    return frozenset(n for n, count in enumerate(strategy.recompute.per_stage) if count) | own


def _aliases(module: nn.Module) -> dict[str, str]:
    """Every name in the module's state and the first name of the same tensor."""
    first: dict[int, str] = {}
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    every = {name: first.setdefault(id(tensor), name) for name, tensor in named}
    return {name: every.get(name, name) for name in module.state_dict()}


class PipelineModule(nn.Module):
    """This rank's stages of a model. Parameters have the original's names; `step` runs the program."""

    def __init__(
        self,
        stages: Sequence[StageModule],
        lowered: Sequence[Lowered],
        rows: Sequence[Sequence[Any]],
        *,
        strategy: Strategy,
        mesh: RankMesh,
        dtypes: Dtypes,
        program: Callable[[], Program],
        aliases: Mapping[str, str],
        shared: Shared,
        sequences: Sequences,
        progress: Progress,
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.training = stages[0].training
        self._by_index = {stage.stage_cut.index: stage for stage in stages}
        self._lowered = {s.stage_cut.index: low for s, low in zip(stages, lowered, strict=True)}
        self._strategy, self._mesh, self._dtypes, self._program = strategy, mesh, dtypes, program
        self._names, self._shared, self._progress, self._sequences = aliases, shared, progress, sequences
        self._ties = TiedGradients(stages, mesh)
        self._optimizers = Optimizers(
            strategy=strategy,
            device=mesh.device,
            named=partial(self.named_parameters, remove_duplicate=False),
            owed=OwedOfStages([low.sync.owed for low in lowered], self._ties),
            local=local_updates(strategy, mesh, all_parameters(self.named_parameters())),
        )
        down = pipeline_group(mesh, range(mesh.sizes.pp), "pp_back")
        assert down is not None, "every rank is on a pipeline"
        self._runner = PipelineRunner(
            self._by_index,
            rows,
            groups=(mesh.group("pp"), down),
            device=mesh.device,
            mesh=mesh.activation_mesh(),
            hooks=Hooks(
                run_stage=self._run_stage,
                before_backward=lambda stage, last, whole: self._lowered[stage].announce(
                    last=last, whole=whole
                ),
                weights=lambda stage: self._lowered[stage].weights(),
                run_weights=lambda stage, half: self._lowered[stage].run_weights(half),
                before_action=lambda action: progress(
                    f"{action.kind}{'' if action.micro is None else action.micro}", action.stage
                ),
            ),
            recomputed=recomputed_stages(strategy, stages),
            puts_off=frozenset(stage for stage, low in self._lowered.items() if low.puts_off),
            loss_dtype=torch.promote_types(dtypes.compute, torch.float32),
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A pipeline has no single forward: use `step`."""
        del args, kwargs
        raise UserError("a model with pipeline stages is run by step(inputs, targets), not called")

    def step(self, inputs: Any, targets: Any = None, *, loss_fn: LossFn | None = None) -> Tensor:
        """Forward and backward of one optimizer step, as without a pipeline (see `ParallelModule.step`).

        `inputs` and `targets` are the same on every rank of the pipeline.
        """
        self._optimizers.check()
        self._sequences.check(inputs)
        count, micro = self._strategy.micro_batches, self._strategy.batch.micro
        batches = split(inputs, micro=micro, count=count, what="inputs", shared=self._shared)
        wanted = split(targets, micro=micro, count=count, what="targets")
        batches, wanted = to_device((batches, wanted), self._mesh.device)

        def loss(output: Any, target: Any) -> Tensor:
            if loss_fn is None:
                return to_plain(loss_of(output))  # type: ignore[no-any-return]
            return scalar(to_plain(loss_fn(to_plain(output), target)))

        self._ties.begin()
        for _, lowered in sorted(self._lowered.items()):  # in the order in which they run
            lowered.begin(count)
            lowered.gather_ahead()
        mean = self._runner.step(batches, wanted, loss)
        first = min(self._by_index)
        self._progress("REDUCE_GRAD", first)
        for lowered in self._lowered.values():
            lowered.finish()
        self._ties.reduce()
        self._progress("LOSS", first)
        return mean_over_replicas(mean, self._mesh)

    def _run_stage(self, stage: StageModule, received: Sequence[Tensor], inputs: Any) -> Any:
        with numerics(self._strategy, self._dtypes, self._mesh):
            return stage(received, inputs)

    def optimizer(
        self, kind: type[Optimizer], parameters: Any = None, /, **options: Any
    ) -> ParallelOptimizer:
        """An optimizer of this rank's parameters, as without a pipeline (see `ParallelModule.optimizer`)."""
        return self._optimizers.make(kind, parameters, options)

    def synchronise_by(self, grad_sync: GradSync) -> None:
        """As without a pipeline (see `ParallelModule.synchronise_by`)."""
        self._strategy = with_sync(self._strategy, grad_sync, self._mesh)
        for lowered in self._lowered.values():
            lowered.sync.switch(self._strategy)

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the global batch this rank's data loader reads."""
        return self._mesh.data_parallel_rank

    @property
    def data_parallel_size(self) -> int:
        """Into how many shares the global batch is cut."""
        return self._mesh.data_parallel_size

    @property
    def strategy(self) -> Strategy:
        """The strategy this module runs."""
        return self._strategy

    @property
    def program(self) -> Program:
        """The program that the planner prices for this strategy."""
        return self._program()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the original's names."""
        seen: set[nn.Parameter] = set()
        for stage in self._by_index.values():
            for name, parameter in stage.named_parameters(
                prefix=prefix, recurse=recurse, remove_duplicate=remove_duplicate
            ):
                if not remove_duplicate or parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """This rank's part of the model's state under the original's names."""
        merged: dict[str, Any] = {}
        for stage in self._by_index.values():
            merged |= with_chunks(stage.state_dict(*args, **kwargs))
        return merged

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load this rank's state (what `state_dict` gave), or the whole model's, of which it takes its stages' share.

        A tied tensor may stand under any of its names. Raises UserError for names that are missing or that the model
        does not have, unless `strict` is false.
        """
        first = {self._names.get(name, name): value for name, value in state_dict.items()}
        missing: list[str] = []
        unexpected = [name for name in state_dict if name not in self._names]
        found: list[tuple[StageModule, dict[str, Any]]] = []
        for stage in self._by_index.values():
            held = stage.state_dict()
            given = {name: state_dict.get(name, first.get(self._names.get(name, name))) for name in held}
            missing += [name for name, value in given.items() if value is None]
            kept = {name: fitting(value, held[name]) for name, value in given.items() if value is not None}
            found.append((stage, kept))
        if strict and (missing or unexpected):
            raise UserError(
                f"load_state_dict: missing {', '.join(missing) or 'nothing'}; unexpected "
                f"{', '.join(unexpected) or 'nothing'}; give the state of this model, or strict=False"
            )
        loaded = [stage.load_state_dict(kept, strict=False, assign=assign) for stage, kept in found]
        return loaded[0]._replace(missing_keys=missing, unexpected_keys=unexpected)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most `max_norm`; that norm."""
        counted = [p for p in self.parameters() if not self._ties.is_copy(p)]
        squared = gradient_norm_squared(counted).to(self._mesh.device, torch.float64)
        dist.all_reduce(squared, group=self._mesh.group("pp"))
        return clip_gradients(list(self.parameters()), squared, max_norm)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """The whole model's state under the original names on rank 0, `{}` elsewhere; collective."""
        held = self._gather(self.state_dict())
        first = {self._names[name]: value for name, value in reversed(held.items()) if name in self._names}
        return {name: first[same] for name, same in self._names.items() if held and same in first}

    @torch.no_grad()
    def full_gradients(self) -> dict[str, Tensor]:
        """The whole model's gradients by parameter name on rank 0 (tied ones once), `{}` elsewhere; collective."""
        gradients = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        held = self._gather(gradients)
        first = {self._names[name]: value for name, value in reversed(held.items())}
        return {name: first[name] for name in self._names if name in first}

    def _gather(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values of all stages, whole, on rank 0; the first stage's where several hold a name."""
        group = self._mesh.group("pp")
        axes = ("dp_replicate", "dp_shard", "cp", "tp")
        keeps = not any(self._mesh.coordinate(axis) for axis in axes)
        full = gather_full(values, 0 if keeps else 1)
        target = dist.get_global_rank(group, 0)
        parts: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
        dist.gather_object(full, parts, dst=target, group=group)
        merged: dict[str, Any] = {}
        if parts is not None and self._mesh.rank == 0:
            for part in reversed(parts):
                merged |= part
        return merged
