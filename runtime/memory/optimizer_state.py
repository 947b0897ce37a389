"""What an optimizer knows, by the names that parameters have in the user's model: saved under one strategy, it is loaded
under another.

    state.NAME.KEY          a tensor of the state (a share of it is a DTensor), or a number such as the count of steps
    state.NAME.outer        where replicas that train by themselves began, its momentum (outer_momentum), the steps since
                            (outer_step), and what each of them has by itself (replicaN.parameter, replicaN.KEY)
    state.NAME.residual     what error feedback of compressed gradients still has to bring, where it is kept
    param_groups.NAME.KEY   an option of the group that the parameter is in

These are the keys of torch's `get_optimizer_state_dict` with `flatten_optimizer_state_dict`. A tensor that is tied
stands under each of its names, as in the model's `state_dict`: stages hold it under different ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autoparallel.errors import UserError
from autoparallel.runtime.gradients.outer import BEGINNING, MOMENTUM, STEP, LocalUpdates, own_key
from autoparallel.runtime.loading.checkpoint_chunks import with_chunks
from autoparallel.runtime.loading.materialise import share_of
from autoparallel.runtime.tensor.questions import local
from autoparallel.runtime.torch_private import laid_out, layout_of

MASTER = "master"  # the key of a float32 copy of a parameter in 16 bits
RESIDUAL = "residual"  # the key of what error feedback owes
_NO_OPTIONS = ("params", "param_names")


def residual_key(name: str) -> str:
    """Under which what error feedback owes of a parameter is saved."""
    return f"state.{name}.{RESIDUAL}"


def named_state(
    optimizer: Optimizer,
    named: Iterable[tuple[str, nn.Parameter]],
    residuals: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
) -> dict[str, Any]:
    """State and options of every parameter of `optimizer`, and `residuals`, this rank's shares."""
    options = _options(optimizer)
    found: dict[str, Any] = {}
    for name, parameter in named:
        if parameter not in options:
            continue
        held = optimizer.state.get(parameter, {})
        found |= {f"state.{name}.{key}": value for key, value in held.items() if value is not None}
        if parameter in residuals:
            found[residual_key(name)] = residuals[parameter]
        own = options[parameter].items()
        found |= {f"param_groups.{name}.{key}": value for key, value in own if key not in _NO_OPTIONS}
    return with_chunks(found)


def local_state(
    updates: LocalUpdates, optimizer: Optimizer, named: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, Any]:
    """What replicas that train by themselves need besides: what they all began with and its momentum, and each one's own
    parameters and state, under its number."""
    found: dict[str, Any] = {}
    for name, parameter in named:
        if parameter not in updates.beginning:
            continue
        own = {"parameter": parameter.detach(), **optimizer.state.get(parameter, {})}
        for key, value in updates.state(parameter).items():
            found[f"state.{name}.{key}"] = _shared(value.clone(), parameter)
        found |= {
            f"state.{name}.{own_key(updates.replica, key)}": _copied(v)
            for key, v in own.items()
            if v is not None
        }
        found[f"state.{name}.{STEP}"] = updates.steps
    return with_chunks(found)


@torch.no_grad()
def load_local_state(
    updates: LocalUpdates,
    optimizer: Optimizer,
    named: Iterable[tuple[str, nn.Parameter]],
    given: Mapping[str, Any],
) -> None:
    """Inverse of `local_state`. Where `given` is of gradients that were summed, replicas begin with what they all have."""
    updates.begin_here()
    updates.steps = 0
    for name, parameter in named:
        if parameter not in updates.beginning or (held := given.get(f"state.{name}.{BEGINNING}")) is None:
            continue
        taken = {BEGINNING: held, MOMENTUM: given[f"state.{name}.{MOMENTUM}"]}
        updates.load(
            parameter,
            {
                k: _taken(v, _shared(torch.zeros_like(updates.beginning[parameter]), parameter))
                for k, v in taken.items()
            },
        )
        updates.steps = int(given[f"state.{name}.{STEP}"])
        own = {"parameter": parameter.detach(), **optimizer.state.get(parameter, {})}
        for key, value in own.items():
            mine = given.get(f"state.{name}.{own_key(updates.replica, key)}")
            if mine is not None and key == "parameter":
                _taken(mine, value)
            elif mine is not None and value is not None:
                optimizer.state[parameter][key] = _taken(mine, value)


def _copied(value: Any) -> Any:
    """Not the memory of what stands under another name: a checkpoint is read into both."""
    return _shared(local(value).clone(), value) if isinstance(value, Tensor) else value


def _shared(part: Tensor, parameter: Tensor) -> Tensor:
    """A share laid out as its parameter is."""
    layout = layout_of(parameter.detach())
    return part if layout is None else laid_out(part, layout)


@torch.no_grad()
def named_residuals(
    named: Iterable[tuple[str, nn.Parameter]], given: Mapping[str, Any]
) -> dict[nn.Parameter, Tensor]:
    """What error feedback owed when `given` was saved, this rank's shares by parameter; empty where it kept nothing."""
    found = {}
    for name, parameter in named:
        if (value := given.get(residual_key(name))) is not None:
            found[parameter] = local(_taken(value, torch.zeros_like(parameter.detach())))
    return found


@torch.no_grad()
def load_named_state(
    optimizer: Optimizer, named: Iterable[tuple[str, nn.Parameter]], given: Mapping[str, Any]
) -> None:
    """Inverse of `named_state`; `given` may hold whole tensors, and names that `optimizer` does not have. Raises
    UserError, before anything is changed, for state that is missing."""
    options = _options(optimizer)
    places = [(name, parameter) for name, parameter in named if parameter in options]
    missing = [
        wanted
        for name, parameter in places
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None and (wanted := f"state.{name}.{key}") not in given
    ]
    if missing:
        raise UserError(
            f"load_state_dict: nothing for {', '.join(missing[:3])}{' and others' * (len(missing) > 3)}; give what "
            "state_dict() of an optimizer of the same class, made with model.optimizer, returned"
        )
    for name, parameter in places:
        held = optimizer.state.get(parameter, {})
        for key, value in held.items():
            if value is not None:
                held[key] = _taken(given[f"state.{name}.{key}"], value)
        group = options[parameter]
        for key in group:
            if key not in _NO_OPTIONS:
                group[key] = given.get(f"param_groups.{name}.{key}", group[key])


def _taken(value: Any, held: Any) -> Any:
    """`held` with the numbers of `value`, of which it takes its share."""
    if not isinstance(held, Tensor) or not isinstance(value, Tensor):
        return value
    if value is not held:
        whole = isinstance(held, DTensor) and not isinstance(value, DTensor) and value.shape == held.shape
        share = share_of(value.to(local(held)), held) if whole else value
        local(held).copy_(local(share))
    return held


def _options(optimizer: Optimizer) -> dict[nn.Parameter, dict[str, Any]]:
    """The group of each parameter."""
    return {p: group for group in optimizer.param_groups for p in group["params"]}
