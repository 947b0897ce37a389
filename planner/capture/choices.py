"""What a router chooses is known when it runs. Where the model's code asks — it loops over the experts that were hit, or
counts their tokens — every expert is taken to be chosen equally often, by the same tokens of each sample.

Of entries that are compared with a threshold (scores of points, entropies) every second one is taken to pass, floats to equal
no number, and what is rounded to whole numbers (how many frames a letter lasts) to be one.
"""

from __future__ import annotations

from typing import Any

import torch

# Operators that choose along a dim, and which of their results says what. `max` and `min` do where a dim is given.
_CHOOSE = {"topk": 1, "sort": 1, "max": 1, "min": 1, "argmax": 0, "argmin": 0, "multinomial": 0}

_PASS, _EQUAL, _ROUND = (
    frozenset({"gt", "ge", "lt", "le"}),
    frozenset({"eq", "ne"}),
    frozenset({"ceil", "round"}),
)


def answered(
    func: Any, args: tuple[Any, ...], out: Any, samples: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The result of an operator that compares or rounds many unknown numbers, and what is taken to be its values. What asks
    one number alone (a branch) gets no answer: None."""
    if (
        not args
        or not isinstance(args[0], torch.Tensor)
        or not isinstance(out, torch.Tensor)
        or not out.dim()
    ):
        return None
    name, same = func._schema.name.split("::")[-1], None
    if name in _PASS:
        return out, _every_second(out.numel(), samples).view(out.shape)
    if args[0].is_floating_point():
        if name in _EQUAL or (name == "_to_copy" and out.dtype is torch.bool):
            same = name != "eq"
        elif name in _ROUND:
            same = 1
    return None if same is None else (out, torch.tensor(same, dtype=out.dtype).expand(out.shape))


def _every_second(entries: int, samples: int) -> torch.Tensor:
    """Flags of which every second one of each sample is set, from its first on; of all entries where samples have no equal
    parts of them. Flags alone, for there may be hundreds of millions."""
    parts = samples if entries % samples == 0 else 1
    flags = torch.zeros(parts, entries // parts, dtype=torch.bool)
    flags[:, ::2] = True
    return flags


def chosen(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, samples: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The result of an operator that says which entries along a dim it chose, or answers a question about unknown numbers, and
    equal shares of `samples` samples as its values: row r of a sample chooses the k entries from r · k on. None for another
    operator."""
    if (found := answered(func, args, out, samples)) is not None:
        return found
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
