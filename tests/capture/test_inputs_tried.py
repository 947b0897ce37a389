"""What a model is fed is found from what it says when it fails: sizes, places of a mask, arguments that a condition asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoparallel.planner.capture.inputs_tried import failure, fitted

Inputs = dict[str, Any]
LENGTH, WIDTH = 24, 16


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


class _FrameByToken(nn.Module):
    """Adds a frame of sound, eight of which become one, to each token."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.sounds = nn.Embedding(32, WIDTH), nn.Conv1d(4, WIDTH, 8, stride=8)

    def forward(self, input_ids: Tensor, input_features: Tensor) -> Tensor:
        embedded = self.words(input_ids)
        embedded += self.sounds(input_features).transpose(1, 2)
        return embedded


class _Wide(nn.Module):
    """Reads the states of several layers side by side, and noise as wide as one."""

    def __init__(self) -> None:
        super().__init__()
        self.reduced = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, states: Tensor, noise: Tensor) -> Tensor:
        states = self.reduced(states)
        return states + noise


class _CountedFromTwo(nn.Module):
    """Positions as many as it says, of which the first two are for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        table = self.places.weight[2:]
        return (
            table[None, : input_ids.shape[1]].expand(len(input_ids), -1, -1).reshape(*input_ids.shape, WIDTH)
        )


class _Placed(nn.Module):
    """Puts the rows of an image where a mask says."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.image = nn.Embedding(32, WIDTH), nn.Parameter(torch.zeros(6, WIDTH))

    def forward(self, input_ids: Tensor, image_mask: Tensor | None = None) -> Tensor:
        embedded = self.words(input_ids).clone()
        embedded[image_mask.to(torch.bool)] = self.image.repeat(len(input_ids), 1)  # type: ignore[union-attr]
        return embedded


class _Asking(nn.Module):
    """Wants all of its targets in training, and says so without their names; the language it must be told."""

    def forward(
        self,
        states: Tensor,
        lang: Tensor | None = None,
        pitch: Tensor | None = None,
        energy: Tensor | None = None,
    ) -> Tensor:
        incomplete = (
            pitch is None  # one of them
            or energy is None
        )
        if self.training and incomplete:
            raise ValueError("All targets must be given in training.")
        if lang is None:
            raise ValueError("Unknown. Call `set_default()`")
        return states + pitch + energy


class _Untrained(nn.Module):
    """Has no loss yet, as it says itself."""

    def forward(self, states: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is not None:
            raise NotImplementedError("Training is not supported")
        return states


CASES: dict[str, tuple[nn.Module, Inputs, dict[str, Tensor], dict[str, tuple[int, ...]]]] = {
    "a text as long as the sound": (
        _FrameByToken(),
        {"input_ids": torch.zeros(2, LENGTH, dtype=torch.int64), "input_features": meta(2, 4, 64)},
        {},
        {"input_ids": (2, 8)},
    ),
    "the width that a layer reads, of what it is given alone": (
        _Wide(),
        {"states": meta(2, LENGTH, WIDTH), "noise": meta(2, LENGTH, WIDTH)},
        {},
        {"states": (2, LENGTH, 3 * WIDTH), "noise": (2, LENGTH, WIDTH)},
    ),
    "a shorter text": (
        _CountedFromTwo(),
        {"input_ids": torch.zeros(2, LENGTH, dtype=torch.int64)},
        {},
        {"input_ids": (2, LENGTH // 2)},
    ),
    "a mask of as many places as are filled": (
        _Placed(),
        {"input_ids": torch.zeros(2, LENGTH, dtype=torch.int64)},
        {"image_mask": torch.ones(2, LENGTH, dtype=torch.int64)},
        {"image_mask": (2, LENGTH)},
    ),
    "what the condition of an error asks for": (
        _Asking(),
        {"states": meta(2, WIDTH)},
        {"lang": torch.zeros(2, dtype=torch.int64), "pitch": meta(2, WIDTH), "energy": meta(2, WIDTH)},
        {"lang": (2,), "pitch": (2, WIDTH), "energy": (2, WIDTH)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_fails_is_given_what_it_says(case: str) -> None:
    module, inputs, more, expected = CASES[case]
    module = module.to("meta")
    assert failure(module, inputs)[0] is not None
    makers = {name: [lambda _, made=made: made] for name, made in {**inputs, **more}.items()}
    found = fitted(module, inputs, makers, ())
    assert failure(module, found)[0] is None
    assert {name: tuple(found[name].shape) for name in expected} == expected
    if "image_mask" in found:
        assert found["image_mask"].sum(1).tolist() == [6, 6]
        assert found["image_mask"][:, :6].all()


def test_what_a_model_refuses_itself_is_left_out() -> None:
    inputs = {"states": meta(2, WIDTH), "labels": torch.zeros(2, dtype=torch.int64)}
    assert "Training is not supported" in str(failure(_Untrained(), inputs)[0])
    assert fitted(_Untrained(), inputs, {"states": [lambda _: inputs["states"]]}, ["labels"]).keys() == {
        "states"
    }
