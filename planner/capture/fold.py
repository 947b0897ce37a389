"""Depth must not cost: of many equal repeated modules three run, and the others are stood in for.

Repeated modules are grouped by structure. Of a group of four or more the first, the second and the last really
run while the step is traced. The others are stood in for by one opaque operation with the same inputs and
outputs, at their own place, so that everything around them runs as it does in the whole model. What proves that
the block of the second is theirs too: their structure is equal but for their position in the list, which those
that run do not look at; they are called with the same arguments from the same places; and the second and the
last trace to equal blocks. Otherwise `FoldError` is raised, and the model is traced whole.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoparallel.planner.capture.leaf import TracedForward
from autoparallel.planner.capture.structure import is_list, structure
from autoparallel.planner.capture.trees import mapped

# By submodule path and attribute: the numbers that equal modules hold there.
Positions = Mapping[tuple[str, str], tuple[int, ...]]
_FOLDED = 3  # modules that run at the head of a group, at most


class FoldError(Exception):
    """The repeated modules are not what they seem: trace the model whole."""


@dataclass(frozen=True, slots=True)
class FoldPlan:
    """Which repeated modules run, and which are stood in for by which."""

    stood_in: dict[str, str] = field(default_factory=dict)  # path -> path of the module that stands for it
    pairs: tuple[tuple[str, str], ...] = ()  # (second, last) of each group: must trace to equal blocks
    run: tuple[str, ...] = ()  # repeated modules that really run
    leaves: tuple[str, ...] = ()  # modules that cannot be traced: priced whole
    shares: bool = False  # what is chosen by numbers that nobody knows is chosen equally often (`choices`)
    lasts: tuple[tuple[str, str], ...] = ()  # (second, last): equal but for the backward pass
    positions: dict[str, Positions] = field(default_factory=dict)  # of those that run and stand for, or prove
    told: bool = False  # modules are called with their position in their list: that is hidden from them, too


def fold_plan(
    module: nn.Module, paths: Sequence[str], *, last_differs: bool = False, last_apart: bool = False
) -> FoldPlan:
    """Group the repeated modules at `paths` by structure, and choose those that run.

    With `last_differs` the backward pass of the last of a group is not compared, and the third runs for that
    instead: the last decoder layer is the first to send gradients back to the encoder, and so has nothing to add
    them to. With `last_apart` the last is none of the group: it may do what it likes.
    """
    shared = _shared_parameters(module)
    lists: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        lists[_place(module, path)].append(path)
    stood_in: dict[str, str] = {}
    pairs, lasts = [], []
    positions: dict[str, Positions] = {}
    for parent, members in lists.items():
        children = [module.get_submodule(path) for path in members]
        indices = _index_attributes(children)
        groups: dict[object, list[str]] = defaultdict(list)
        for path, child in zip(members, children, strict=True):
            groups[(parent, structure(child, indices, shared))].append(path)
        for group in groups.values():
            group = group[:-1] if last_apart else group
            first = _FOLDED if last_differs else _FOLDED - 1
            if len(group) > first + 1:
                stood_in |= dict.fromkeys(group[first:-1], group[1])
                pairs.append((group[1], group[2] if last_differs else group[-1]))
                lasts.append((group[1], group[-1]))
                same = _positions([module.get_submodule(path) for path in group[1:]], indices)
                positions |= {path: same for path in group[1:] if path not in stood_in}
    run = tuple(p for p in paths if p not in stood_in) if stood_in else ()
    return FoldPlan(stood_in=stood_in, pairs=tuple(pairs), run=run, lasts=tuple(lasts), positions=positions)


def _place(module: nn.Module, path: str) -> str:
    """What the paths of modules have in common that stand at one place of their list: "layers" for "layers.3", and
    "layers.*.attention" for "layers.3.attention", which a `ModuleDict` in a list holds."""
    parent, _, name = path.rpartition(".")
    container = module.get_submodule(parent)
    if isinstance(container, nn.Sequential) or is_list(container):
        return parent
    return f"{_place(module, parent)}.*.{name}" if parent else name


def _shared_parameters(module: nn.Module) -> frozenset[int]:
    """Identities of parameters that have more than one name."""
    seen: set[int] = set()
    shared: set[int] = set()
    for _, parameter in module.named_parameters(remove_duplicate=False):
        (shared if id(parameter) in seen else seen).add(id(parameter))
    return frozenset(shared)


def _index_attributes(children: Sequence[nn.Module]) -> frozenset[tuple[str, str]]:
    """(submodule path, attribute) pairs that hold the position of each child in its list, such as `layer_idx`: the numbers
    from 0 on, or, of children enough to be folded, others at equal distances (where a layer has two caches, say). Of a list
    of several kinds of children each kind may hold them elsewhere."""
    numbers: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)  # (position, value)
    for position, child in enumerate(children):
        for path, part in child.named_modules():
            for name, value in vars(part).items():
                if type(value) is int:
                    numbers[path, name].append((position, value))
    return frozenset(key for key, row in numbers.items() if len(row) > 1 and _is_position(row))


def _positions(children: Sequence[nn.Module], indices: frozenset[tuple[str, str]]) -> Positions:
    """Those of the pairs that equal children have, with the numbers that these hold there."""
    parts = dict(children[0].named_modules())
    return {
        (path, name): tuple(vars(child.get_submodule(path))[name] for child in children)
        for path, name in sorted(indices)
        if path in parts and name in vars(parts[path])
    }


def _is_position(row: Sequence[tuple[int, int]]) -> bool:
    """Whether values are in step with positions; of few, whether they are the positions."""
    (first, start), (second, following) = row[:2]
    step, rest = divmod(following - start, second - first)
    if rest or not step or (len(row) <= _FOLDED and (start, step) != (first, 1)):
        return False
    return all(value == start + step * (position - first) for position, value in row)


def _unless_alike(compare: Callable[[Any, Any], bool]) -> Any:
    """A comparison of a `Position`: what it gives for all its values."""

    def compared(position: Position, other: object) -> bool:
        answers = (
            {compare(value, other) for value in position.values} if isinstance(other, int | None) else set()
        )
        return answers.pop() if len(answers) == 1 else bool(_used())

    return compared


def _used(*_: object) -> Any:
    raise FoldError("a module's position in its list decides what it does")


class Position:
    """Stands for a module's position in its list while the module runs. It may be passed on, and compared with what all of
    `values`, the positions of equal modules, compare with alike (with 0, where none is the first); any other use is an error."""

    def __init__(self, values: Sequence[int] = ()) -> None:
        self.values = values

    __eq__, __ne__ = _unless_alike(operator.eq), _unless_alike(operator.ne)
    __lt__, __le__ = _unless_alike(operator.lt), _unless_alike(operator.le)
    __gt__, __ge__ = _unless_alike(operator.gt), _unless_alike(operator.ge)
    __index__ = __int__ = __float__ = __bool__ = __hash__ = __add__ = __radd__ = __sub__ = __rsub__ = _used
    __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = __rtruediv__ = __neg__ = __pow__ = _used


@contextmanager
def positions_hidden(module: nn.Module, plan: FoldPlan) -> Iterator[None]:
    """While inside, the attributes that hold a position are a `Position` in all modules of the plan that run."""
    hidden = [
        (vars(module.get_submodule(path).get_submodule(inside)), name, values)
        for path, attributes in plan.positions.items()
        for (inside, name), values in attributes.items()
    ]
    if any(name not in table for table, name, _ in hidden):
        raise FoldError("a submodule was replaced while the model ran")
    own = [table[name] for table, name, _ in hidden]
    try:
        for table, name, values in hidden:
            table[name] = Position(values)
        yield
    finally:
        for (table, name, _), value in zip(hidden, own, strict=True):
            table[name] = value


def _without_position(path: str, given: Any) -> Any:
    """Arguments of a module, those that are its position in its list hidden."""
    own = path.rpartition(".")[2]
    return mapped(lambda leaf: Position() if type(leaf) is int and str(leaf) == own else leaf, given)


@contextmanager
def forwards_replaced(module: nn.Module, plan: FoldPlan, tracer: Any) -> Iterator[None]:
    """While inside, the modules of the plan tell `tracer` of their calls or are stood in for by it."""
    patched: list[nn.Module] = []

    def patch(path: str, model: str) -> None:
        child = module.get_submodule(path)
        original = child.forward

        def remembered(*args: Any, **kwargs: Any) -> Any:
            since = len(tracer.writer.calls)
            if plan.told and path in plan.positions:
                args, kwargs = _without_position(path, (args, kwargs))
            result = original(*args, **kwargs)
            tracer.remember_call(path, args, kwargs, result, since)
            return result

        def stood_in(*args: Any, **kwargs: Any) -> Any:
            if plan.told:
                args, kwargs = _without_position(path, (args, kwargs))
            return tracer.stand_in(child, path, model, args, kwargs)

        vars(child)["forward"] = TracedForward(stood_in if model else remembered)
        patched.append(child)

    def patch_leaf(path: str) -> None:
        child = module.get_submodule(path)

        def whole(*args: Any, **kwargs: Any) -> Any:
            return tracer.leaf(child, path, args, kwargs)

        vars(child)["forward"] = TracedForward(whole)
        patched.append(child)

    replaced = (*plan.run, *plan.stood_in, *plan.leaves)
    own = [path for path in replaced if "forward" in vars(module.get_submodule(path))]
    if own:
        raise FoldError(f"{own[0]} has a forward of its own")
    try:
        for path in plan.leaves:
            patch_leaf(path)
        for path in plan.run:
            patch(path, "")
        for path, model in plan.stood_in.items():
            patch(path, model)
        yield
    finally:
        for child in patched:
            vars(child).pop("forward", None)


@dataclass(frozen=True, slots=True)
class Remembered:
    """One call of a module that stands for others."""

    arguments: list[object]
    inputs: list[torch.Tensor]
    used: list[bool]  # which of the inputs it computes with
    result: Any


class StandIn(torch.autograd.Function):
    """Outputs of given shapes that depend on all inputs; nothing is computed or kept."""

    @staticmethod
    def forward(ctx: Any, like: Sequence[torch.Tensor], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.shapes = [(t.shape, t.dtype) for t in inputs]
        return tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in like)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.shapes]
        return (
            None,
            *(g if need else None for g, need in zip(gradients, ctx.needs_input_grad[1:], strict=True)),
        )
