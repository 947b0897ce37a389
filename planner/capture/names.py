"""Names of parameters: a tied one has several, and each place that uses it calls it by its own."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """All names of every parameter, tensors told apart by `id`."""

    of_tensor: dict[int, list[str]]
    tensor_of: dict[str, int]

    @classmethod
    def of(cls, module: nn.Module) -> ParameterNames:
        """The names in `module`."""
        of_tensor: dict[int, list[str]] = defaultdict(list)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            of_tensor[id(parameter)].append(name)
        tensor_of = {name: key for key, names in of_tensor.items() for name in names}
        return cls(dict(of_tensor), tensor_of)

    def below(self, path: str) -> dict[str, int]:
        """Names below a module, with their tensors."""
        return {name: key for name, key in self.tensor_of.items() if name.startswith(f"{path}.")}

    def near(self, name: str, caller: str, link: str) -> str:
        """Of the names of a parameter that of the calling module, else one below the link, else `name`."""
        names = self.of_tensor[self.tensor_of[name]]
        own = [n for n in names if n.rpartition(".")[0] == caller]
        inside = [n for n in names if link and n.startswith(f"{link}.")]
        return (own or inside or [name])[0]
