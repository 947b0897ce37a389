"""Example inputs of other sizes, as the error of a forward pass says that they should be."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from typing import Any

import torch

Inputs = dict[str, Any]

# Sizes that are tried in the place of others. Kind: chosen
_LEAST, _LARGEST = 8, 1 << 20
_MOST = 4  # sizes of one error that are tried. Kind: chosen
_PLACES = re.compile(r"value tensor of shape \[(\d+)\D.*indexing result of shape \[(\d+)\D")
_COUNT = "is invalid for input of size"
_TOKENS = ("input_ids", "inputs_embeds", "decoder_input_ids")


def fewer_places(given: Inputs, error: Exception) -> Iterator[Inputs]:
    """Where a mask says that more places are filled than there are rows to fill them: one that says it of so many, the first of
    each sample."""
    found = _PLACES.search(str(error))
    rows, places = (int(found[1]), int(found[2])) if found else (0, 0)
    for name, mask in given.items():
        if not isinstance(mask, torch.Tensor) or mask.is_meta or mask.is_floating_point() or mask.dim() != 2:
            continue
        if "mask" in name and 0 < rows < places == int(mask.sum()) and not rows % mask.shape[0]:
            first = torch.arange(mask.shape[1]) < rows // mask.shape[0]
            yield given | {name: first.to(mask.dtype).expand(mask.shape).contiguous()}


def resized(given: Inputs, error: Exception, there: Container[str]) -> Iterator[Inputs]:
    """Where the error names the size of a dim beside others: dims of that size with another of these sizes, of the arguments
    that stand `there`, where it failed, then of all. Of a size that is k times one that is given, a k-th of this."""
    if _COUNT in str(error):  # other numbers are not sizes
        return
    said = list(dict.fromkeys(int(n) for n in re.findall(r"\d+", str(error)) if _LEAST <= int(n) < _LARGEST))
    own = {size for value in given.values() if isinstance(value, torch.Tensor) for size in value.shape[1:]}
    pairs = [(have, want) for have in said if have in own for want in said if want != have]
    pairs = [
        *((have, have * have // want) for have, want in pairs if want not in own and want % have == 0),
        *pairs,
    ]
    named = {name for name in given if name in there}
    for have, want in pairs[:_MOST]:
        if named:
            yield with_size(given, have, want, names=named)
        yield with_size(given, have, want)


def shorter(given: Inputs) -> Iterator[Inputs]:
    """The text half as long: positions may be counted from 1 on, or reach further than the table of them says."""
    length = next((given[name].shape[1] for name in _TOKENS if name in given), 1)
    if length > 1:
        yield with_size(given, length, length // 2, dims=(1,))


def with_size(
    given: Inputs,
    have: int,
    want: int,
    *,
    dims: Container[int] = range(1, 9),
    names: Container[str] | None = None,
) -> Inputs:
    """The inputs with `want` entries along each dim, but the samples', that has `have`; of these `dims` and `names` alone."""

    def other(value: Any) -> Any:
        for dim in range(1, value.dim()):
            if value.shape[dim] == have and dim in dims:
                value = value.index_select(dim, torch.arange(want, device=value.device) % have)
        return value

    chosen = {n for n, v in given.items() if isinstance(v, torch.Tensor) and (names is None or n in names)}
    return {name: other(value) if name in chosen else value for name, value in given.items()}
