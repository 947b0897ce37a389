"""What counts as a repeated block."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from autoparallel.planner.capture.links import repeated_paths


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def _stage(width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(*(_Layer(width) for _ in range(depth)))


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))  # type: ignore[no-any-return]


CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "layers in a list": (lambda: nn.ModuleList(_Layer(4) for _ in range(2)), ["0", "1"]),
    "a list of layers that are sequences": (lambda: nn.ModuleList(_mlp() for _ in range(3)), ["0", "1", "2"]),
    "a sequence of sequences of unlike layers": (lambda: nn.Sequential(_mlp(), _mlp()), ["0", "1"]),
    "stages of equal layers": (
        lambda: nn.Sequential(_stage(4, 2), _stage(4, 2)),
        ["0.0", "0.1", "1.0", "1.1"],
    ),
    "unlike stages of unlike layers": (
        lambda: nn.Sequential(nn.Sequential(_Layer(4), _Layer(8)), nn.Sequential(_Layer(8), _Layer(16))),
        ["0.0", "0.1", "1.0", "1.1"],
    ),
    "one sequence": (lambda: nn.Sequential(_mlp()), ["0.0", "0.2"]),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_are_what_is_alike_one_beside_the_other(case: str) -> None:
    make, expected = CASES[case]
    assert list(repeated_paths(make())) == expected
