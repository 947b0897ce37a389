"""A loss is one number, whoever computes it; anything else is told in words."""

from __future__ import annotations

import pytest
import torch

from autoparallel.errors import UserError
from autoparallel.runtime.micro_batches import loss_of, scalar


def test_what_a_loss_function_returns_is_one_number_of_any_shape() -> None:
    assert scalar(torch.tensor([[2.0]])).shape == ()


@pytest.mark.parametrize("value", [torch.ones(4), 3.0, None])
def test_a_loss_function_that_returns_something_else_is_told_so(value: object) -> None:
    with pytest.raises(UserError, match=r"loss_fn returned .*: return one number"):
        scalar(value)


def test_an_output_without_a_loss_asks_for_a_loss_function() -> None:
    assert loss_of({"loss": torch.tensor(1.0)}) == 1.0
    with pytest.raises(UserError, match=r"shape \(4,\): pass loss_fn"):
        loss_of(torch.ones(4))
