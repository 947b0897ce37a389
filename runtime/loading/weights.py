"""Weights from safetensors files (Hugging Face checkpoints) into shares: each rank reads only its own slices."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoparallel.errors import UserError
from autoparallel.runtime.loading.materialise import cuts_of
from autoparallel.runtime.tensor.questions import local

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_SHOWN = 5  # names in a message

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Where each tensor of a model's state lies: `places[name]` is a file and the name there.

    A tied tensor, which files hold once, is found under each of its names.
    """

    places: Mapping[str, tuple[Path, str]]

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def without(self, names: Collection[str]) -> Weights:
        """The places of all but these."""
        return Weights(places={name: place for name, place in self.places.items() if name not in names})


def find_weights(path: str | os.PathLike[str], module: nn.Module) -> Weights:
    """The safetensors file, or the folder of them, at `path`, checked against the module; reads headers only.

    Raises UserError where a tensor of the module is missing or has another shape.
    """
    where = Path(path)
    files = _files(where)
    state = module.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    places: dict[str, tuple[Path, str]] = {}
    for same in names.values():
        known = next((name for name in same if name in files), None)
        if known is not None:
            places |= dict.fromkeys(same, (files[known], known))
    missing = [name for name in state if name not in places]
    if missing:
        raise UserError(
            f"weights = {where}: {len(missing)} of the module's {len(state)} tensors are not there: "
            f"{_some(missing)}; the files hold {_some(sorted(files))}. Rename the tensors, or load them on the CPU "
            "before auto_parallelize"
        )
    _check_shapes(where, state, places)
    return Weights(places=places)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


def _files(where: Path) -> dict[str, Path]:
    """Every tensor's name and file."""
    folder = where if where.is_dir() else where.parent
    index = folder / INDEX if where.is_dir() else where
    try:
        if index.suffix == ".json" and index.exists():
            held = json.loads(index.read_text())["weight_map"]
            return {name: folder / file for name, file in held.items()}
        single = folder / SINGLE if where.is_dir() else where
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"weights = {where}: cannot read it ({type(error).__name__}: {error}); give a .safetensors file, or a "
            f"folder with {SINGLE} or {INDEX}"
        ) from error


def _open(path: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise UserError(
            "weights= needs safetensors: pip install 'autoparallel-planner[safetensors]'"
        ) from error
    return safe_open(path, framework="pt")


def _check_shapes(where: Path, state: Mapping[str, Any], places: Mapping[str, tuple[Path, str]]) -> None:
    with ExitStack() as stack:
        opened = {path: stack.enter_context(_open(path)) for path, _ in set(places.values())}
        for name, (path, key) in places.items():
            shape = tuple(opened[path].get_slice(key).get_shape())
            if isinstance(state[name], Tensor) and shape != tuple(state[name].shape):
                raise UserError(
                    f"weights = {where}: {key} has shape {list(shape)} but the module's {name} has "
                    f"{list(state[name].shape)}: the weights are of another model"
                )


@torch.no_grad()
def load_weights(module: nn.Module, weights: Weights) -> None:
    """Fill this rank's shares of `module` (the model, or a stage of it, lowered), whatever their layout.

    Memory: besides the shares themselves one share at a time.
    """
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        filled: set[int] = set()
        for name, tensor in module.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor) or id(tensor) in filled:
                continue
            filled.add(id(tensor))
            if name not in weights.places:  # see `Weights.without`
                continue
            path, key = weights.places[name]
            if path not in opened:
                opened[path] = stack.enter_context(_open(path))
            local(tensor).copy_(_read(opened[path], key, share_ranges(tensor)))


def load_rows(weights: Weights, name: str, first: int, stop: int) -> Tensor:
    """Some rows of a matrix."""
    path, key = weights.places[name]
    with _open(path) as file:
        found: Tensor = file.get_slice(key)[first:stop]
    return found


def _read(file: Any, key: str, ranges: Sequence[Sequence[Range]]) -> Tensor:
    if not ranges:  # a number has no slices
        whole: Tensor = file.get_tensor(key)
        return whole
    held = file.get_slice(key)
    parts = [held[tuple(slice(*r) for r in pick)] for pick in product(*ranges)]
    if len(parts) == 1:
        return parts[0]  # type: ignore[no-any-return]
    dim = next(d for d, own in enumerate(ranges) if len(own) > 1)
    return torch.cat(parts, dim=dim)


def share_ranges(tensor: Tensor) -> tuple[tuple[Range, ...], ...]:
    """For each dim of the whole tensor the ranges that this rank holds, one after another."""
    ranges: list[tuple[Range, ...]] = [((0, size),) for size in tensor.shape]
    for size, rank, dim, parts in cuts_of(tensor):
        ranges[dim] = tuple(_cut(own, size, rank) for held in ranges[dim] for own in _split(held, parts))
    assert sum(len(own) > 1 for own in ranges) <= 1, "one dim at most is held in parts"
    return tuple(ranges)


def _split(held: Range, parts: int) -> Iterator[Range]:
    start, stop = held
    step = (stop - start) // parts
    return ((start + step * n, start + step * (n + 1) if parts > 1 else stop) for n in range(parts))


def _cut(held: Range, size: int, rank: int) -> Range:
    """The range of `rank` among `size`, as `Tensor.chunk` cuts."""
    start, stop = held
    step = -(-(stop - start) // size)
    return min(start + step * rank, stop), min(start + step * (rank + 1), stop)
