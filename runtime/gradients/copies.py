"""Copies that FSDP2 leaves alone (`fsdp.unshardable`), read in the dtype that is computed in.

A unit gathers its parameters in that dtype; what is no part of a unit would stay in its own, and everything after it be
computed in the wider of the two, where a kernel takes both at all.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn


def cast_copies(module: nn.Module, copied: Collection[nn.Parameter], dtype: torch.dtype) -> None:
    """While a module runs, those of its own parameters that are `copied` are in `dtype`; gradients come back to what is held."""
    for owner in module.modules():
        names = [
            name
            for name, parameter in owner._parameters.items()
            if parameter is not None
            and parameter in copied
            and parameter.is_floating_point()
            and parameter.dtype != dtype
        ]
        if names:
            cast = _Cast(names, dtype)
            owner.register_forward_pre_hook(cast.begin)
            owner.register_forward_hook(cast.end, always_call=True)


class _Cast:
    """The parameters `names` of one module in `dtype`, from the beginning of its call to the end."""

    def __init__(self, names: Collection[str], dtype: torch.dtype) -> None:
        self._names, self._dtype = names, dtype
        self._held: list[dict[str, Tensor]] = []  # by call: a module may call itself

    def begin(self, module: nn.Module, _: Any) -> None:
        parameters: dict[str, Any] = module._parameters  # other code may have put plain tensors there
        held = {name: parameters[name] for name in self._names if parameters[name] is not None}
        self._held.append(held)
        for name, tensor in held.items():
            parameters[name] = tensor.to(self._dtype)

    def end(self, module: nn.Module, *_: Any) -> None:
        if not self._held:  # the call failed before it began
            return
        parameters: dict[str, Any] = module._parameters
        parameters.update(self._held.pop())
