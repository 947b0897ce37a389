"""`ParallelModule`: what `auto_parallelize` returns without a pipeline — the user's module, still itself.

The class of the user's module gets `ParallelModule` in front of its bases, as FSDP2 does with its own mixin:
names, `state_dict`, `train`/`eval`, attributes and the call signature stay what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autoparallel.costmodel.program import Program
from autoparallel.errors import UserError
from autoparallel.planner.strategy.types import GradSync, Strategy
from autoparallel.runtime.gradients.replicated import gradient_norm_squared, scale_gradients
from autoparallel.runtime.gradients.synchronisation import with_sync
from autoparallel.runtime.loading.checkpoint_chunks import with_chunks
from autoparallel.runtime.loading.materialise import share_of
from autoparallel.runtime.lowering.lower import Dtypes, Lowered
from autoparallel.runtime.lowering.members import OF_TIERS
from autoparallel.runtime.lowering.micro_batches import (
    Sequences,
    Shared,
    as_call,
    loss_of,
    scalar,
    split,
    to_device,
)
from autoparallel.runtime.memory.optimizer import Optimizers, ParallelOptimizer
from autoparallel.runtime.memory.recompute import attention_kernel
from autoparallel.runtime.own_checkpoints import alike
from autoparallel.runtime.ranks.mesh import RankMesh
from autoparallel.runtime.ranks.progress import Progress, silent
from autoparallel.runtime.servers.tiering import whole_norm_squared
from autoparallel.runtime.servers.whole import WholeTables
from autoparallel.runtime.tensor.questions import to_plain

LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a module is run: what was decided, where, and what lowering made of it."""

    strategy: Strategy
    mesh: RankMesh
    dtypes: Dtypes
    lowered: Lowered
    program: Callable[[], Program]
    optimizers: Optimizers
    shared: Shared = frozenset()  # inputs that are not samples
    sequences: Sequences = field(default_factory=Sequences)
    progress: Progress = silent
    tables: WholeTables | None = None  # embedding tables of which some rows are elsewhere

    def numerics(self) -> AbstractContextManager[None]:
        """What forward passes run under."""
        return numerics(self.strategy, self.dtypes, self.mesh)


class ParallelModule(nn.Module):
    """Put in front of the bases of the user's class; see `docs` of `auto_parallelize` for its members."""

    _run: Run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward; whatever the strategy, the output is plain tensors."""
        with self._run.numerics():
            return to_plain(super().__call__(*args, **kwargs))

    def step(self, inputs: Any, targets: Any = None, *, loss_fn: LossFn | None = None) -> Tensor:
        """Forward and backward of one optimizer step, in the strategy's micro-batches.

        `inputs` (a tensor, a tuple, or a dict of keyword arguments) and `targets` are this data-parallel
        rank's share of the global batch. `loss_fn(output, target)` gets the module's output; without it the
        output is the loss or has `.loss`. Adds to `.grad` the gradient of the mean loss over the global
        batch, and returns that mean on every rank. Raises UserError for a share of another size, and for sequences of another
        length than the strategy's, if it has one.
        """
        run, count = self._run, self._run.strategy.micro_batches
        run.optimizers.check()
        run.sequences.check(inputs)
        micro = run.strategy.batch.micro
        batches = split(inputs, micro=micro, count=count, what="inputs", shared=run.shared)
        wanted = split(targets, micro=micro, count=count, what="targets")
        run.lowered.begin(count)
        run.lowered.gather_ahead()
        losses = []
        for index, (batch, target) in enumerate(zip(batches, wanted, strict=True)):
            run.lowered.announce(last=index == count - 1)
            batch, target = to_device((batch, target), run.mesh.device)
            run.progress(f"F{index}", 0)
            loss = self._loss(batch, target, loss_fn)
            run.progress(f"B{index}", 0)
            (loss / count).backward()
            losses.append(loss.detach())
        run.progress("REDUCE_GRAD", 0)
        run.lowered.finish()
        if run.tables is not None:
            run.tables.tables.finish()
        run.progress("LOSS", 0)
        return mean_over_replicas(torch.stack(losses).mean(), run.mesh)

    def _loss(self, batch: Any, target: Any, loss_fn: LossFn | None) -> Tensor:
        args, kwargs = as_call(batch)
        if loss_fn is not None:
            return scalar(to_plain(loss_fn(self(*args, **kwargs), target)))
        # Only the loss is made plain: logits sharded over tp are never gathered.
        with self._run.numerics():
            return to_plain(loss_of(super().__call__(*args, **kwargs)))  # type: ignore[no-any-return]

    def optimizer(
        self, kind: type[Optimizer], parameters: Any = None, /, **options: Any
    ) -> ParallelOptimizer:
        """`kind(parameters, **options)` with its state where the strategy wants it, which any strategy loads.

        `parameters` (or groups of them) are all of this rank's by default. See `runtime.optimizer`.
        """
        return self._run.optimizers.make(kind, parameters, options)

    def synchronise_by(self, grad_sync: GradSync) -> None:
        """From the next step on synchronise gradients so: other compression, algorithm, buckets. Between two steps; what
        error feedback owes goes along. Collective. Raises UserError, on every rank and before anything is changed, for what
        cannot be run. `program` stays that of the strategy that was planned."""
        strategy = with_sync(self._run.strategy, grad_sync, self._run.mesh)
        self._run.lowered.sync.switch(strategy)
        object.__setattr__(self, "_run", replace(self._run, strategy=strategy))

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the global batch this rank's data loader reads."""
        return self._run.mesh.data_parallel_rank

    @property
    def data_parallel_size(self) -> int:
        """Into how many shares the global batch is cut."""
        return self._run.mesh.data_parallel_size

    @property
    def strategy(self) -> Strategy:
        """The strategy this module runs."""
        return self._run.strategy

    @property
    def program(self) -> Program:
        """The program that the planner prices for this strategy."""
        return self._run.program()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most `max_norm`; that norm."""
        norm_squared = whole_norm_squared(gradient_norm_squared(self.parameters()), self._run.tables)
        norm = clip_gradients(list(self.parameters()), norm_squared, max_norm)
        if self._run.tables is not None:
            self._run.tables.tables.scale(clip_factor(norm, max_norm))
        return norm

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """The whole model's state under the original names on rank 0, `{}` elsewhere; collective."""
        return gather_full(self.state_dict(), self._run.mesh.rank)

    @torch.no_grad()
    def full_gradients(self) -> dict[str, Tensor]:
        """The whole model's gradients by parameter name on rank 0 (tied ones once), `{}` elsewhere; collective."""
        gradients = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        if self._run.tables is not None:
            gradients |= self._run.tables.gradients()
        return gather_full(gradients, self._run.mesh.rank)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """This rank's state under the original names."""
        state = with_chunks(super().state_dict(*args, **kwargs))
        return state if self._run.tables is None else state | self._run.tables.state()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load this rank's state (what `state_dict` gave), or the whole model's, of which it takes its share."""
        held = with_chunks(super().state_dict())
        if self._run.tables is not None:
            state_dict = {
                **self._run.tables.load(state_dict),
                **{name: held[name] for name in self._run.tables.tables.names if name in held},
            }
        return super().load_state_dict(
            {name: fitting(value, held.get(name)) for name, value in state_dict.items()}, strict, assign
        )

    def __deepcopy__(self, memo: Any) -> Self:
        raise UserError("a parallel module cannot be copied; copy the original before auto_parallelize")


class _WithTables(ParallelModule):
    """Of a module that has no `tables` of its own."""

    @property
    def tables(self) -> WholeTables | None:
        """Embedding tables of which some rows are on other ranks or with servers; None where there are none."""
        return self._run.tables


def fitting(value: Any, held: Any) -> Any:
    """A whole tensor as the share that this rank holds of it; what is such a share already as it is."""
    whole = isinstance(held, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor)
    return share_of(value.to(held.device, held.dtype), held) if whole and value.shape == held.shape else value


def make_parallel(module: nn.Module, run: Run) -> nn.Module:
    """`module` with `ParallelModule` in front of its class."""
    own = type(module)
    kind = ParallelModule if hasattr(module, OF_TIERS) else _WithTables
    module.__class__ = type(f"Parallel{own.__name__}", (kind, own), {})
    object.__setattr__(module, "_run", run)
    return module


def clip_gradients(parameters: list[nn.Parameter], norm_squared: Tensor, max_norm: float) -> Tensor:
    """Scale gradients whose whole norm is `sqrt(norm_squared)` down to `max_norm`; the norm before."""
    norm = norm_squared.sqrt()
    scale_gradients(parameters, clip_factor(norm, max_norm))
    return norm


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """By what gradients of this norm are multiplied, as `torch.nn.utils.clip_grad_norm_` does."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def gather_full(values: dict[str, Any], rank: int) -> dict[str, Any]:
    """Every tensor whole and on the CPU on rank 0; `{}` elsewhere. Collective, in the order of `values`."""
    full: dict[str, Any] = {}
    for name, value in values.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if rank == 0:
            full[name] = whole.detach().cpu().clone() if isinstance(whole, Tensor) else whole
    return full


def mean_over_replicas(value: Tensor, mesh: RankMesh) -> Tensor:
    """The mean of `value` over the ranks that read different samples."""
    for axis in ("dp_shard", "dp_replicate"):
        if getattr(mesh.sizes, axis) > 1:
            dist.all_reduce(value, group=mesh.group(axis))
    return value / mesh.data_parallel_size


@contextmanager
def numerics(strategy: Strategy, dtypes: Dtypes, mesh: RankMesh) -> Iterator[None]:
    """Attention kernel and, where there are no ranks and hence no FSDP2 that casts, autocast to the compute dtype."""
    with ExitStack() as stack:
        attention = partial(attention_kernel, strategy.execution.attention)
        stack.enter_context(attention())
        stack.enter_context(alike(attention))
        if dtypes.compute != dtypes.param and mesh.device_mesh is None:
            stack.enter_context(torch.autocast(mesh.device.type, dtype=dtypes.compute))
        yield
