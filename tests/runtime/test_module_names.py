"""What a dry run observes modules by: their names, and no more."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from autoparallel.runtime.check.module_names import ModuleNames


class Stacks(nn.Module):
    """Hands on what its first layer made beside what the others make of it, as an encoder-decoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8)
        self.seen = Tensor()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        early = self.encoder(x)
        self.seen = self.decoder(early)
        return early, self.head(self.seen)


def test_gradients_of_a_models_outputs_are_gone_when_they_have_been_used() -> None:
    model, names = Stacks(), ModuleNames()
    gradients: list[weakref.ref[Tensor]] = []
    found: list[tuple[str, bool]] = []
    with names:
        early, late = model(torch.ones(2, 4, requires_grad=True))
        late.register_hook(lambda gradient: gradients.append(weakref.ref(gradient)))
        model.seen.register_hook(lambda _: found.append((names.innermost, gradients[0]() is not None)))
        (early.sum() + (late**2).sum()).backward()
    assert found == [("head", False)] or found == [("decoder", False)], found
