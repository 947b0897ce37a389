"""The module that stands for `nn.Embedding` where some of its rows are elsewhere: `weight` has the hot rows alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from autoparallel.errors import UserError

LookUp = Callable[[Tensor, Any], Tensor]


class TieredEmbedding(nn.Embedding):
    """Put in the place of the class of an embedding; `_look_up(indices, weight)` finds rows wherever they are."""

    _look_up: LookUp

    def forward(self, indices: Tensor) -> Tensor:
        """The rows of `indices`, as `nn.Embedding` gives them."""
        return self._look_up(indices, self.weight)


def check_embedding(module: nn.Module, path: str) -> None:
    """Refuse a table that another module than a plain `nn.Embedding` holds. Raises UserError."""
    where = f'[[embedding]] module = "{path}"'
    if type(module) is not nn.Embedding:
        raise UserError(
            f'{where} is a {type(module).__name__}: rows elsewhere need an nn.Embedding; write one, or set tier = "device"'
        )
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise UserError(
            f"{where}: max_norm and scale_grad_by_freq need all rows in one place; leave them out, or set tier = "
            '"device"'
        )


def make_tiered(module: nn.Module, weight: nn.Parameter | None, look_up: LookUp) -> None:
    """Have `module` keep `weight` alone and ask `look_up`."""
    module.__class__ = TieredEmbedding
    module.weight = weight  # type: ignore[assignment]
    object.__setattr__(module, "_look_up", look_up)
