"""An optimizer whose state lies where the strategy says: `model.optimizer(torch.optim.AdamW, lr=...)`.

The class that the user names gets `ParallelOptimizer` in front of its bases, as modules do: parameter groups, hooks and
schedules of the learning rate are what they were. `step` runs the class's own step on one piece of the parameters after
the other, once its state is there. It adds

- `offload.optimizer`: this share of the state, and of the master weights, is in pinned memory of the host. A piece comes
  to the device while the one before it is updated and leaves, so that two pieces are there at most;
- `execution.master_weights`: parameters in 16 bits have a float32 copy in the state ("master"), which is what is updated;
- `state_dict` by the names of parameters, which any other strategy loads (`optimizer_state`); with what error feedback of
  compressed gradients still owes, so that `state_dict` is collective where there is any.

Method: what moves between steps is the state; parameters and gradients stay on the device, which does the arithmetic
(ZeRO-Offload computes on the host instead, and is priced otherwise).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoparallel.errors import UserError
from autoparallel.planner.expand.hosted import hosted as hosted_tensors
from autoparallel.planner.strategy.types import Strategy
from autoparallel.runtime.gradients.outer import LocalUpdates
from autoparallel.runtime.gradients.owed import Owed
from autoparallel.runtime.memory.host_copies import HostCopies, OffloadCount
from autoparallel.runtime.memory.optimizer_state import (
    MASTER,
    load_local_state,
    load_named_state,
    local_state,
    named_residuals,
    named_state,
    residual_key,
)
from autoparallel.runtime.servers.whole import WholeTables
from autoparallel.runtime.tensor.questions import local
from autoparallel.runtime.torch_private import laid_out, layout_of, step_without_hooks

# Of parameters that are updated at once, in float32. Kind: choice; large enough for the bandwidth of a host's link.
PIECE_BYTES = 64 * 2**20

Named = Callable[[], Iterable[tuple[str, nn.Parameter]]]
Group = dict[str, Any]


def hosted(parameters: Iterable[nn.Parameter], share: float) -> set[nn.Parameter]:
    """Parameters whose state is on the host: the largest first, as long as they are within `share` of all numbers."""
    every = [p for p in dict.fromkeys(parameters) if p.requires_grad]
    return {every[n] for n in hosted_tensors([local(p).numel() for p in every], share)}


@dataclass(slots=True, kw_only=True)
class Optimizers:
    """Makes the optimizers of one model; `named` gives its parameters under all of their names."""

    strategy: Strategy
    device: torch.device
    named: Named
    owed: Owed | None = None  # what error feedback holds back of the gradients
    count: OffloadCount = field(default_factory=OffloadCount)
    local: LocalUpdates | None = None  # exchanges of replicas that train by themselves
    tables: WholeTables | None = None  # embedding tables in tiers: their rows move with a step
    made: bool = False

    def make(self, kind: type[Optimizer], parameters: Any, options: Mapping[str, Any]) -> ParallelOptimizer:
        """An instance of `kind` that keeps its state as the strategy says."""
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            raise UserError(
                f"model.optimizer takes the class of an optimizer, such as torch.optim.AdamW, not {kind!r}"
            )
        given = list(dict.fromkeys(p for _, p in self.named()) if parameters is None else parameters)
        given = given or [{"params": []}]  # a pipeline rank may hold none: its stage pools, or flattens
        made: Any = type(f"Parallel{kind.__name__}", (ParallelOptimizer, kind), {})
        optimizer: ParallelOptimizer = made(given, **options)
        optimizer._home, optimizer._own_step, optimizer._kind = self, step_without_hooks(kind), kind
        self.made = True
        return optimizer

    def check(self) -> None:
        """Refuse a step whose optimizer could not keep its state where the strategy wants it."""
        share = self.strategy.offload.optimizer
        if self.local is not None and not self.made:
            raise UserError(
                f'outer.algorithm = "{self.strategy.outer.algorithm}": replicas exchange when the optimizer steps; make it with '
                "model.optimizer(torch.optim.AdamW, lr=...)"
            )
        if self.tables is not None and not self.made:
            raise UserError(
                "[[embedding]] with tiers: rows that are not on this device are updated where they are; make the optimizer with "
                'model.optimizer(torch.optim.Adagrad, lr=...), or set tier = "device"'
            )
        if share and not self.made:
            raise UserError(
                f"offload.optimizer = {share}: torch's optimizers keep their state where the parameters are; make "
                "yours with model.optimizer(torch.optim.AdamW, lr=...), or set it to 0"
            )


class ParallelOptimizer(Optimizer):
    """Put in front of the bases of the user's class; see the module's docstring."""

    _home: Optimizers
    _own_step: Callable[..., Any]
    _kind: type[Optimizer]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update, piece by piece; the closure's result, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._update_all()
            if self._home.tables is not None:
                self._home.tables.tables.commit(self, self._kind)
            if self._home.local is not None:
                masters = {
                    p: self.state[p][MASTER] for p in self._parameters() if MASTER in self.state.get(p, {})
                }
                self._home.local.step(masters)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, of rows elsewhere too."""
        super().zero_grad(set_to_none)
        if self._home.tables is not None:
            self._home.tables.tables.forget()

    def state_dict(self) -> dict[str, Any]:
        """The state by the names of parameters, this rank's shares: what `load_state_dict` and
        `torch.distributed.checkpoint` load under any strategy."""
        self._begin()
        return self._named_state({} if self._home.owed is None else self._home.owed.gather())

    def state_to_load(self, saved: Collection[str]) -> dict[str, Any]:
        """What is to be read of a checkpoint that holds the names `saved`, for `load_state_dict`: all of `state_dict`, but of what
        error feedback owes, and of what replicas that train by themselves need, what the checkpoint has."""
        self._begin()
        owed = {p for name, p in self._home.named() if residual_key(name) in saved}
        return self._named_state({p: torch.zeros_like(local(p.detach())) for p in owed}, saved)

    def _named_state(
        self, owed: Mapping[nn.Parameter, Tensor], saved: Collection[str] | None = None
    ) -> dict[str, Any]:
        residuals = {p: laid_out_like(part, p.detach()) for p, part in owed.items()}
        found = named_state(self, self._home.named(), residuals)
        if self._home.local is not None:
            own = local_state(self._home.local, self, self._home.named())
            found |= {key: value for key, value in own.items() if saved is None or key in saved}
        if self._home.tables is None:
            return found
        names = tuple(f"state.{name}." for name in self._home.tables.tables.names)
        kept_here = {key: value for key, value in found.items() if not key.startswith(names)}
        return kept_here | self._home.tables.optimizer_state(self, self._kind)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's shares of what `state_dict` gave, under this strategy or another."""
        self._begin()
        tables = self._home.tables
        tiered = tables.tables.names if tables is not None else {}
        load_named_state(self, [one for one in self._home.named() if one[0] not in tiered], state_dict)
        if tables is not None:
            tables.load_optimizer_state(self, state_dict)
        if self._home.local is not None:
            load_local_state(self._home.local, self, self._home.named(), state_dict)
        if self._home.owed is not None:
            self._home.owed.give(named_residuals(self._home.named(), state_dict))

    def _update_all(self) -> None:
        away = hosted(self._parameters(), self._home.strategy.offload.optimizer)
        ready = [p for p in self._parameters() if p.grad is not None]
        here = [p for p in ready if p not in away]
        copied = [p for p in here if self._has_master(p)]
        with self._groups_kept() as run:
            run([p for p in here if not self._has_master(p)])
            for piece in _pieces(copied):
                run(piece)
            self._update_hosted(_pieces([p for p in ready if p in away]), run)

    def _update_hosted(
        self, pieces: Sequence[list[nn.Parameter]], run: Callable[[list[nn.Parameter]], None]
    ) -> None:
        """Two pieces are on the device at most: the next one comes once the last one has left."""
        arriving, leaving = (HostCopies(self._home.device, self._home.count) for _ in range(2))
        visits = [_Visit(self, piece) for piece in pieces]
        for index, piece in enumerate(pieces):
            leaving.finish()
            for visit in visits[index : index + 2]:
                visit.begin(arriving)
            visits[index].arrive(arriving)
            run(piece)
            visits[index].leave(leaving)
        leaving.finish()

    @contextmanager
    def _groups_kept(self) -> Iterator[Callable[[list[nn.Parameter]], None]]:
        """What runs the class's own step on some parameters: groups, and what a step writes into them, are for each run
        what they were before the first."""
        groups, before = self.param_groups, [dict(group) for group in self.param_groups]

        def run(parameters: list[nn.Parameter]) -> None:
            masters = self._masters(parameters)
            wanted = set(parameters)
            for group, kept in zip(groups, before, strict=True):
                own = [masters.get(p, p) for p in kept["params"] if p in wanted]
                group.update({**kept, "params": own})
            self.param_groups = [group for group in groups if group["params"]]
            if parameters:
                self._own_step(self)
            self._put_back(masters)

        try:
            yield run
        finally:
            self.param_groups = groups
            for group, kept in zip(groups, before, strict=True):
                group["params"] = kept["params"]

    def _masters(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Float32 copies in the places of 16-bit parameters, with their gradients and their state."""
        found = {}
        for parameter in parameters:
            if self._has_master(parameter):
                held = self.state.pop(parameter, {})
                master = held.pop(MASTER) if MASTER in held else _wide(parameter)
                master.grad = _wide(parameter.grad) if parameter.grad is not None else None
                self.state[master] = held
                found[parameter] = master
        return found

    def _put_back(self, masters: Mapping[nn.Parameter, Tensor]) -> None:
        for parameter, master in masters.items():
            local(parameter).copy_(local(master))
            master.grad = None
            self.state[parameter] = {**self.state.pop(master), MASTER: master}

    def _begin(self) -> None:
        """Give parameters that no step has updated the state that they begin with: what a step of zeros leaves."""
        away = hosted(self._parameters(), self._home.strategy.offload.optimizer)
        copies = HostCopies(self._home.device, self._home.count)
        for parameter in self._parameters():
            if not parameter.requires_grad or self.state.get(parameter):
                continue
            stand_in = _wide(parameter) if self._has_master(parameter) else parameter.detach().clone()
            local(stand_in).zero_()
            stand_in.grad = laid_out_like(torch.zeros_like(local(stand_in)), stand_in)
            with torch.no_grad(), self._only(parameter, stand_in):
                self._own_step(self)
            held = {key: _at_start(key, value) for key, value in self.state.pop(stand_in, {}).items()}
            self.state[parameter] = held | ({MASTER: _wide(parameter)} if self._has_master(parameter) else {})
            if parameter in away:
                _Visit(self, [parameter]).leave(copies)
                copies.finish()

    @contextmanager
    def _only(self, parameter: nn.Parameter, stand_in: Tensor) -> Iterator[None]:
        """Inside, the optimizer has one parameter: `stand_in`, with the options of `parameter`."""
        groups = self.param_groups
        group = next(g for g in groups if any(p is parameter for p in g["params"]))
        self.param_groups = [{**group, "params": [stand_in]}]
        try:
            yield
        finally:
            self.param_groups = groups

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _has_master(self, parameter: Tensor) -> bool:
        narrow = parameter.is_floating_point() and parameter.dtype.itemsize < torch.float32.itemsize
        return narrow and self._home.strategy.execution.master_weights


class _Visit:
    """The state of some parameters on its way to the device and back."""

    def __init__(self, optimizer: ParallelOptimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._state, self._parameters = optimizer.state, parameters
        self._homes: dict[tuple[nn.Parameter, str], Tensor] = {}
        self._coming: dict[tuple[nn.Parameter, str], tuple[Tensor, torch.Event | None]] = {}

    def begin(self, copies: HostCopies) -> None:
        """Start to bring it; once."""
        if not self._homes:
            self._homes = {(p, key): local(value) for p, key, value in self._moving()}
            self._coming = {place: copies.copied_back(home) for place, home in self._homes.items()}

    def arrive(self, copies: HostCopies) -> None:
        """What comes next on the current stream finds it on the device."""
        for (parameter, key), coming in self._coming.items():
            self._put(parameter, key, copies.arrived(*coming))
        self._coming.clear()

    def leave(self, copies: HostCopies) -> None:
        """Start to send it where it was, or to new memory of the host."""
        for parameter, key, value in self._moving():
            self._put(parameter, key, copies.copied_out(local(value), self._homes.get((parameter, key))))

    def _moving(self) -> list[tuple[nn.Parameter, str, Tensor]]:
        """What is as large as a parameter, not counts of steps."""
        return [
            (p, key, value)
            for p in self._parameters
            for key, value in self.state_of(p).items()
            if isinstance(value, Tensor) and value.dim()
        ]

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        held: dict[str, Any] = self._state.get(parameter, {})
        return held

    def _put(self, parameter: nn.Parameter, key: str, part: Tensor) -> None:
        self._state[parameter][key] = laid_out_like(part, self._state[parameter][key])


def laid_out_like(part: Tensor, like: Tensor) -> Tensor:
    """`part`, or the DTensor of which it is this rank's part where `like` is one."""
    layout = layout_of(like)
    return part if layout is None else laid_out(part, layout)


def _wide(tensor: Tensor) -> Tensor:
    """A float32 copy."""
    return laid_out_like(local(tensor).to(torch.float32, copy=True), tensor)


def _at_start(key: str, value: Any) -> Any:
    """A count of steps is 0 before the first."""
    if key != "step":
        return value
    return torch.zeros_like(value) if isinstance(value, Tensor) else 0


def _pieces(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in order, cut where a piece would be over `PIECE_BYTES`."""
    found: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        size = local(parameter).numel() * torch.float32.itemsize
        if not found or filled + size > PIECE_BYTES:
            found.append([])
            filled = 0
        found[-1].append(parameter)
        filled += size
    return found
