"""What a router chooses is known when it runs. Where the model's code asks — it loops over the experts that were hit, or
counts their tokens — every expert is taken to be chosen equally often, by the same tokens of each sample."""

from __future__ import annotations

from typing import Any

import torch

# Operators that choose along a dim, and which of their results says what. `max` and `min` do where a dim is given.
_CHOOSE = {"topk": 1, "sort": 1, "max": 1, "min": 1, "argmax": 0, "argmin": 0, "multinomial": 0}


def chosen(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, samples: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The result of an operator that says which entries along a dim it chose, and equal shares of `samples` samples as its
    values: row r of a sample chooses the k entries from r · k on. None for another operator."""
    name = func._schema.name.split("::")[-1]
    given = [arg.name for arg in func._schema.arguments]
    if name not in _CHOOSE or not (name == "multinomial" or "dim" in given):
        return None
    source, dim = args[0], -1
    if "dim" in given:
        place = given.index("dim")
        dim = kwargs.get(
            "dim", args[place] if len(args) > place else func._schema.arguments[place].default_value
        )
    indices = out[_CHOOSE[name]] if isinstance(out, tuple | list) else out
    if dim is None or not source.dim() or not source.numel() or indices.is_floating_point():
        return None
    entries, count = source.shape[dim], source.numel() // source.shape[dim]
    kept = indices.dim() == source.dim()
    each = indices.shape[dim] if kept else 1
    rows = torch.arange(count)
    if count % samples == 0:
        rows %= count // samples
    # All of them in order of preference: each row prefers another one.
    step = each if each < entries else 1
    values = (rows[:, None] * step + torch.arange(each)) % entries
    others = list(source.movedim(dim, -1).shape[:-1])
    values = values.view(*others, each).movedim(-1, dim).contiguous() if kept else values.view(others)
    return indices, values.to(indices.dtype)
