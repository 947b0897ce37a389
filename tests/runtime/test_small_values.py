"""What follows from numbers in the code can be read on tensors without values; other values cannot."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from autoparallel.runtime.check.small_values import SmallValues
from autoparallel.runtime.torch_private import fake_tensors


def test_positions_are_read_one_by_one_and_as_a_list_and_what_was_given_is_not() -> None:
    """As a list DTensor reads which tokens a rank has, where the batch and the shares of a sequence are one dim."""
    with fake_tensors():
        given = torch.empty(3)
        with SmallValues():
            positions = torch.arange(6).view(2, 3)
            assert positions[1].sum().item() == 12
            assert positions.t().reshape(-1).tolist() == [0, 3, 1, 4, 2, 5]
            with pytest.raises(DataDependentOutputException):
                given.tolist()
