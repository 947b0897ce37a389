"""torch's optimizers on some rows of a table: the class's own step on these rows and their part of its state.

A row that is not touched in a step is left as it is, with its state (torch's SparseAdam, Adagrad with sparse gradients), unless
all rows are given. Counts of steps are the table's, as in SparseAdam. Optimizers whose state is not as large as the parameter
(Adafactor) know more than one row at a time, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoparallel.errors import UserError

STEP = "step"
# Of which the state of a step of zeros is not what a first step begins with, or whose step wants more than gradients.
_WIDTH_TRIED = 3


class RowsOptimizer:
    """Steps of `kind` on rows; `names` are the parts of its state that a row has."""

    def __init__(self, kind: type[Optimizer], options: Mapping[str, Any]) -> None:
        self.kind = kind
        self._parameter = nn.Parameter(torch.zeros(1, _WIDTH_TRIED))
        self._optimizer = kind([self._parameter], **options)
        self._parameter.grad = torch.zeros_like(self._parameter)
        self._optimizer.step()
        self.start: dict[str, float] = {}
        for key, value in self._optimizer.state[self._parameter].items():
            if key == STEP or value is None:
                continue
            if not isinstance(value, Tensor) or value.shape != self._parameter.shape:
                raise UserError(
                    f"{kind.__name__}: its state ({key}) is not a number for each number of a parameter, which rows on other "
                    'ranks or servers need; take another optimizer, or set [[embedding]] tier = "device"'
                )
            self.start[key] = float(value[0, 0])
        self._counts = STEP in self._optimizer.state[self._parameter]
        self._tensor_count = isinstance(self._optimizer.state[self._parameter].get(STEP), Tensor)

    @property
    def names(self) -> tuple[str, ...]:
        """The parts of a row's state, in the class's order."""
        return tuple(self.start)

    def step(
        self, values: Tensor, state: dict[str, Tensor], gradients: Tensor, steps: int, options: Mapping[str, Any]
    ) -> None:  # fmt: skip
        """Update `values` [rows, dim] and `state` in place; `steps` have been before."""
        if not len(values):
            return
        parameter = nn.Parameter(values, requires_grad=True)
        parameter.grad = gradients.to(values.dtype)
        held: dict[str, Any] = dict(state)
        if self._counts:
            held[STEP] = torch.tensor(float(steps)) if self._tensor_count else steps
        group = self._optimizer.param_groups[0]
        group.update({**options, "params": [parameter]})
        self._optimizer.state.clear()
        self._optimizer.state[parameter] = held
        self._optimizer.step()
        for name in state:
            state[name] = self._optimizer.state[parameter][name]
        self._optimizer.state.clear()
        group["params"] = [self._parameter]
