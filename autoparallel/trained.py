"""What a run trains, as its strategy has it now: the model, its optimizer and its schedule, made anew where a phase needs that."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autoparallel.api import auto_parallelize
from autoparallel.errors import UserError
from autoparallel.phases import enter_phase
from autoparallel.plan_cache import StrategySource
from autoparallel.planner.strategy.types import Strategy
from autoparallel.runtime.loading.materialise import all_names, materialise

# Makes a parallel model of a module by a strategy, which is whole or for the planner to complete.
Lower = Callable[[nn.Module, StrategySource | Strategy], Any]


class Trained:
    """The parallel model of a run, its optimizer and, if there is one, its schedule of the learning rate.

    Where phases change more than `[grad_sync]`, a copy of the module without its parameters is kept, of which another model is made when
    such a phase begins. Raises UserError for a module that cannot be copied, then.
    """

    def __init__(
        self, module: nn.Module, source: StrategySource, lower: Lower, *, optimizer: Callable[..., Optimizer],
        scheduler: Callable[[Optimizer], Any] | None,
    ) -> None:  # fmt: skip
        self._lower, self._kind, self._schedule = lower, optimizer, scheduler
        self._bare = _bare(module) if _remakes(source) else None
        self.model = lower(module, source)
        self._phased: Strategy = self.model.strategy
        self.optimizer = self._optimizer(self.model)
        self.scheduler = scheduler(self.optimizer) if scheduler is not None else None

    def enter(self, step: int) -> bool:
        """Begin the phase of this step, if another one does; whether model, optimizer and schedule were made anew. Collective."""
        remake = self._remade if self._bare is not None else None
        model, optimizer = enter_phase(self.model, self.optimizer, self._phased, step, remake)
        if model is self.model:
            return False
        self.model, self.optimizer = model, optimizer
        return True

    def _remade(self, strategy: Strategy) -> tuple[Any, Optimizer]:
        module: Any = copy.deepcopy(self._bare)
        # Parameters without values, which are loaded; nothing is initialised.
        materialise(module, torch.device("cpu"), seed=0, origin=module, given=all_names(module))
        model = self._lower(module, strategy)
        optimizer = self._optimizer(model)
        if self.scheduler is not None and self._schedule is not None:
            passed = self.scheduler.state_dict()
            self.scheduler = self._schedule(optimizer)  # the optimizer gets its learning rates with its state
            self.scheduler.load_state_dict(passed)
        return model, optimizer

    def _optimizer(self, model: Any) -> Optimizer:
        """The model's optimizer of the class, and with the options, that were given."""
        given = self._kind
        kind, options = (given.func, given.keywords) if isinstance(given, partial) else (given, {})
        made: Optimizer = model.optimizer(kind, **options)
        return made


def lowered(
    example: Callable[[int], Any], lengths: Sequence[int], given: Any, size: int, module: nn.Module,
    strategy: StrategySource | Strategy, **options: Any,
) -> Any:  # fmt: skip
    """`auto_parallelize`, whose members no type names. A source is of a run whose global batch is `size`, and a whole strategy that of
    a phase. `example(tokens)` has inputs with sequences of so many tokens (0: the first ones, for which others may be `given`);
    `lengths` are those of later phases."""
    first = isinstance(strategy, StrategySource) or strategy.batch.seq_len not in lengths
    inputs = given if first and given is not None else None
    if isinstance(strategy, Strategy):
        inputs = example(strategy.batch.seq_len) if inputs is None else inputs
        return auto_parallelize(module, inputs, strategy=strategy, **options)
    others = {tokens: example(tokens) for tokens in lengths}
    inputs = example(0) if inputs is None else inputs
    return auto_parallelize(
        module, inputs, strategy=strategy, phase_inputs=others, global_batch=size, **options
    )


def _remakes(source: StrategySource) -> bool:
    """Whether some phase changes more than `[grad_sync]`."""
    phases: Any = (
        source.strategy.phases if source.strategy is not None else source.constraints.get("phase", ())
    )
    return any(not key.startswith("grad_sync.") for phase in phases for key, _ in phase.keys)


def _bare(module: nn.Module) -> Any:
    """A copy of a module whose parameters take no memory; its buffers are copied."""
    empty = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()
    }
    try:
        return copy.deepcopy(module, dict(empty))
    except Exception as error:
        raise UserError(
            f"[[phase]]: a phase changes more than [grad_sync], for which the model is made anew, and {type(module).__name__} cannot "
            f"be copied ({type(error).__name__}: {error}); make it copyable by copy.deepcopy, or leave other keys out of the phases"
        ) from error
