"""Names of parameters: a tied one has several, and each place that uses it calls it by its own."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """All names of every parameter, tensors told apart by `id`."""

    of_tensor: dict[int, list[str]]
    tensor_of: dict[str, int]
    _sorted: tuple[tuple[str, int], ...]  # each name with its place among all

    @classmethod
    def of(cls, module: nn.Module) -> ParameterNames:
        """The names in `module`."""
        of_tensor: dict[int, list[str]] = defaultdict(list)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            of_tensor[id(parameter)].append(name)
        tensor_of = {name: key for key, names in of_tensor.items() for name in names}
        places = sorted((name, place) for place, name in enumerate(tensor_of))
        return cls(dict(of_tensor), tensor_of, tuple(places))

    def below(self, path: str) -> dict[str, int]:
        """Names below a module, with their tensors."""
        found: list[tuple[int, str]] = []
        for name, place in self._sorted[bisect_left(self._sorted, (f"{path}.", 0)) :]:
            if not name.startswith(f"{path}."):
                break
            found.append((place, name))
        return {name: self.tensor_of[name] for _, name in sorted(found)}

    def near(self, name: str, caller: str, link: str) -> str:
        """Of the names of a parameter that of the calling module, else one below the link, else `name`."""
        names = self.of_tensor[self.tensor_of[name]]
        own = [n for n in names if n.rpartition(".")[0] == caller]
        inside = [n for n in names if link and n.startswith(f"{link}.")]
        return (own or inside or [name])[0]
