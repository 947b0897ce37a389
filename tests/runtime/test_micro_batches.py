"""A loss is one number, whoever computes it; anything else is told in words."""

from __future__ import annotations

import pytest
import torch

from autoparallel.errors import UserError
from autoparallel.planner.capture.losses import scalar_losses
from autoparallel.runtime.lowering.micro_batches import loss_of, scalar, shared_by_samples, split


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


def test_the_loss_is_found_by_name_or_as_the_one_number_that_needs_a_gradient() -> None:
    loss, other = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
    logits, metric = torch.ones(4, requires_grad=True), torch.tensor(0.5)
    for output in (
        (logits, loss),
        (loss, {"logits": logits, "accuracy": metric}),
        {"metric": metric, "ce": loss},
    ):
        assert loss_of(output).data_ptr() == loss.data_ptr(), output
        assert [t is loss for t in scalar_losses(output)] == [True], output
    named = {"z": other, "accuracy": metric, "loss": loss}
    assert [t is loss for t in scalar_losses(named)] == [True]
    assert loss_of(named).data_ptr() == loss.data_ptr()
    with pytest.raises(
        UserError, match="2 numbers that need gradients, any of which could be it: pass loss_fn"
    ):
        loss_of((loss, other))


def test_what_samples_share_in_the_example_goes_to_every_micro_batch_whole() -> None:
    example = {"image": torch.zeros(2, 3), "places": torch.arange(5), "mask": torch.ones(1, 3)}
    given = {**example, "image": torch.arange(4.0)}
    parts = split(given, micro=2, count=2, what="inputs", shared=shared_by_samples(example))
    assert [part["image"].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert all(part["places"] is given["places"] and part["mask"] is given["mask"] for part in parts)
    with pytest.raises(UserError, match=r"inputs\['places'\] has 3 samples"):
        split(
            {**given, "places": torch.arange(3)},
            micro=2,
            count=2,
            what="inputs",
            shared=shared_by_samples(example),
        )
