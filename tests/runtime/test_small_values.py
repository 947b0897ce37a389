"""What follows from numbers in the code can be read on tensors without values; other values cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel.runtime.check.small_values import SmallValues
from autoparallel.runtime.torch_private import fake_tensors


class Reading(TorchDispatchMode):
    """Reads a tensor as a list before each operator, below autograd, as DTensor does to learn which tokens a rank has."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value, self.found = value, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.value.tolist()
        return func(*args, **(kwargs or {}))


def test_positions_are_read_one_by_one_and_as_a_list_and_what_was_given_is_not() -> None:
    with fake_tensors():
        given = torch.empty(3)
        with SmallValues():
            positions = torch.arange(6).view(2, 3)
            assert positions[1].sum().item() == 12
            turned = positions.t().reshape(-1)
            with Reading(turned) as reading:
                torch.sin(given)
            assert reading.found == [0, 3, 1, 4, 2, 5]
            with pytest.raises(DataDependentOutputException), Reading(given):
                torch.sin(given)
