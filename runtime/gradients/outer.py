"""Local updates: replicas that train by themselves, and an outer optimizer over what they have become (`[outer]`).

DiLoCo (Douillard et al. 2023, arXiv:2311.08105): once in `every` steps the mean over the replicas of how far each has come since
the last exchange is the gradient of torch's SGD with Nesterov momentum, on what all of them began with; each begins again with
the result. With several fragments (Streaming DiLoCo, arXiv:2501.18512, without the delay) a fragment of the parameters is
exchanged at a time, at steps that are spread evenly. What is exchanged is float32, or encoded by a method without bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoparallel.planner.expand.local_updates import METHODS
from autoparallel.planner.strategy.types import Outer
from autoparallel.runtime.gradients.feedback import Memory
from autoparallel.runtime.gradients.reductions import make_reducer
from autoparallel.runtime.tensor.questions import local

BEGINNING, MOMENTUM, STEP = "outer", "outer_momentum", "outer_step"  # keys of the state of a parameter


class LocalUpdates:
    """The exchanges of this rank's shares of `parameters` with the ranks of `group`, which hold the same ones in other
    replicas. `replica` is this one's number."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, outer: Outer, replica: int
    ) -> None:
        self.outer, self.replica = outer, replica
        self.parameters = tuple(dict.fromkeys(p for p in parameters if p.requires_grad))
        self._reducer = make_reducer(group, METHODS[outer.bits])
        self.beginning = {p: local(p).detach().to(torch.float32, copy=True) for p in self.parameters}
        self._optimizer = torch.optim.SGD(
            list(self.beginning.values()), lr=outer.lr, momentum=outer.momentum, nesterov=outer.momentum > 0
        )  # fmt: skip
        self.steps = 0
        self._fragments = _fragments(self.parameters, outer.fragments)

    def due(self, step: int) -> list[int]:
        """The fragments that are exchanged after so many steps."""
        every, count = self.outer.every, self.outer.fragments
        return [
            n
            for n in range(count)
            if (step - (n + 1) * every // count) % every == 0 and step >= (n + 1) * every // count
        ]

    @torch.no_grad()
    def step(self, masters: Mapping[nn.Parameter, Tensor]) -> None:
        """The end of an inner step. `masters` are float32 copies of parameters in 16 bits."""
        self.steps += 1
        for number in self.due(self.steps):
            self._exchange(self._fragments[number], masters)

    def _exchange(self, parameters: Sequence[nn.Parameter], masters: Mapping[nn.Parameter, Tensor]) -> None:
        held = [p for p in parameters if local(p).numel()]
        if not held:
            return
        came = [self.beginning[p] - local(masters.get(p, p)).to(torch.float32) for p in held]
        buffer = torch.cat([part.reshape(-1) for part in came])
        self._reducer.start(buffer, Memory()).wait()
        for parameter, mean in zip(held, buffer.split([part.numel() for part in came]), strict=True):
            self.beginning[parameter].grad = mean.view(self.beginning[parameter].shape)
        self._optimizer.step()  # of those that have a gradient
        for parameter in held:
            begin = self.beginning[parameter]
            begin.grad = None
            local(parameter).copy_(begin)
            if parameter in masters:
                local(masters[parameter]).copy_(begin)

    def state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What the outer optimizer knows of a parameter, this rank's share."""
        begin = self.beginning[parameter]
        momentum = self._optimizer.state.get(begin, {}).get("momentum_buffer")
        return {BEGINNING: begin, MOMENTUM: torch.zeros_like(begin) if momentum is None else momentum}

    @torch.no_grad()
    def load(self, parameter: nn.Parameter, held: Mapping[str, Tensor]) -> None:
        """The inverse of `state`."""
        begin = self.beginning[parameter]
        begin.copy_(local(held[BEGINNING]))
        momentum = local(held[MOMENTUM]).to(begin).clone()
        # Before its first step torch's momentum is the gradient itself, which zeros lead to as well.
        self._optimizer.state[begin] = {"momentum_buffer": momentum}

    def begin_here(self) -> None:
        """Begin with what the parameters are now."""
        for parameter, begin in self.beginning.items():
            begin.copy_(local(parameter).detach())
        self._optimizer.state.clear()


def _fragments(parameters: Sequence[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """Parameters in their order, cut into so many parts of about equal size."""
    total = sum(p.numel() for p in parameters) or 1
    found: list[list[nn.Parameter]] = [[] for _ in range(count)]
    before = 0
    for parameter in parameters:
        middle = before + parameter.numel() / 2
        found[min(int(middle * count / total), count - 1)].append(parameter)
        before += parameter.numel()
    return found


def own_key(replica: int, key: str) -> str:
    """The key of what one replica has for itself."""
    return f"replica{replica}.{key}"


def all_parameters(named: Iterable[tuple[str, Any]]) -> list[nn.Parameter]:
    """The parameters under any of their names, each once."""
    return list(dict.fromkeys(parameter for _, parameter in named))
