"""Tensor and sequence parallelism: `[[tensor]]` rules applied to the user's own modules.

Every parameter becomes a DTensor on the tp mesh (replicated where no rule shards it), and layouts are fixed
by hooks at the boundaries of the modules that rules name. What lies between two boundaries is DTensor
semantics, so that a fused projection or an odd reshape stays right by construction. Tensors that are not
DTensors (token ids, masks, rotary tables) count as replicated.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_map_only

from autoparallel.errors import UserError
from autoparallel.planner.strategy.types import TensorRule
from autoparallel.runtime.dtensor_private import replicate_without_rule
from autoparallel.runtime.tensor.dtensor_rules import allow_plain_tensors, register_missing_rules
from autoparallel.runtime.tensor.functions import run_with_rules
from autoparallel.runtime.tensor.fused_parts import cut_parts_apart
from autoparallel.runtime.tensor.islands import run_block_locally, run_replicated_locally
from autoparallel.runtime.tensor.layout_hooks import at_pin
from autoparallel.runtime.tensor.questions import is_replicated, own_parameters
from autoparallel.runtime.torch_private import (
    distribute_in_parts,
    knows_parts,
    parts_of,
    shard_in_parts,
)

# The layouts fixed at a module: inputs by name or position, outputs.
Fixed = tuple[tuple[tuple[str, Placement], ...], tuple[Placement, ...]]
_SHARD = re.compile(r"shard\((-?\d+)(?:, strided (\d+))?\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRule:
    """A rule at one module of the model, layouts parsed."""

    path: str
    params: Mapping[str, Placement]
    inputs: Mapping[str, Placement]
    outputs: tuple[Placement, ...]


def parse_layout(text: str, where: str) -> Placement:
    """`replicate`, `shard(dim)`, `shard(dim, strided parts)` or `partial` as a DTensor placement."""
    if text == "replicate":
        return Replicate()
    if text == "partial":
        return Partial()
    if match := _SHARD.fullmatch(text):
        if match[2] and not knows_parts():
            raise UserError(f'{where}: "{text}" needs torch 2.12 or newer; plan without it on this torch')
        return shard_in_parts(int(match[1]), int(match[2])) if match[2] else Shard(int(match[1]))
    raise UserError(
        f'{where}: unknown layout "{text}"; write "replicate", "shard(DIM)", "shard(DIM, strided PARTS)" or '
        '"partial"'
    )


def _from_start(placement: Placement, dims: int) -> Placement:
    """The placement with its dim counted from the first."""
    if isinstance(placement, Shard):
        return Shard(placement.dim % dims)
    if (parts := parts_of(placement)) is not None:
        return shard_in_parts(parts[0] % dims, parts[1])
    return placement


def resolve_rules(module: nn.Module, rules: Sequence[TensorRule], tp: int) -> tuple[ModuleRule, ...]:
    """The rules at each module they match (`*` is one component of a path), checked against the module.

    Raises UserError where a rule matches nothing, names a parameter or argument the module lacks, or shards
    a dimension that `tp` does not divide.
    """
    resolved: dict[str, ModuleRule] = {}
    paths = dict(module.named_modules())
    for rule in rules:
        pattern = re.compile(re.escape(rule.module).replace(r"\*", r"[^.]+"))
        matches = [path for path in paths if pattern.fullmatch(path)]
        if not matches:
            raise UserError(f'[[tensor]] module = "{rule.module}" matches no module of the model')
        for path in matches:
            if path in resolved:
                raise UserError(f'[[tensor]] two rules match the module "{path}": leave one')
            resolved[path] = _resolve(rule, path, paths[path], tp)
    return tuple(resolved.values())


def _resolve(rule: TensorRule, path: str, module: nn.Module, tp: int) -> ModuleRule:
    where = f'[[tensor]] module = "{rule.module}" (at {path or "the root"})'
    params = {name: parse_layout(text, where) for name, text in rule.params}
    for name, placement in params.items():
        parameter = module._parameters.get(name)
        if parameter is None:
            if name in module._parameters:  # `bias = None`: the rule serves blocks with and without
                continue
            raise UserError(f"{where}: no parameter {name}; it has {list(module._parameters)}")
        if isinstance(placement, Partial):
            raise UserError(f"{where}: parameter {name} cannot be partial")
        if not placement.is_replicate():
            _check_shard(where, name, parameter, placement, tp)
    inputs = {name: parse_layout(text, where) for name, text in rule.inputs}
    accepted = inspect.signature(module.forward).parameters
    open_ended = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in accepted.values())
    for name in inputs:
        if not name.isdigit() and name not in accepted and not open_ended:
            raise UserError(f"{where}: forward has no argument {name}; it has {list(accepted)}")
    outputs = tuple(parse_layout(text, where) for text in rule.outputs)
    return ModuleRule(path=path, params=params, inputs=inputs, outputs=outputs)


def _check_shard(where: str, name: str, parameter: Tensor, placement: Placement, tp: int) -> None:
    dim, parts = parts_of(placement) or (placement.dim, 1)  # type: ignore[attr-defined]
    if not -parameter.dim() <= dim < parameter.dim():
        raise UserError(f"{where}: parameter {name} has {parameter.dim()} dims, no dim {dim}")
    size = parameter.shape[dim]
    if size % (tp * parts):
        held = f"{parts} parts of dim {dim}" if parts > 1 else f"dim {dim}"
        raise UserError(
            f"{where}: mesh.tp = {tp} does not divide {held} of {name}, which has size {size}; "
            "choose a tp that divides it, or replicate the parameter"
        )


def shard_tensors(
    module: nn.Module, rules: Sequence[TensorRule], mesh: DeviceMesh, blocks: Sequence[str] = (),
    *, in_shares: bool = False,
) -> dict[str, Fixed]:  # fmt: skip
    """Make every parameter a DTensor on the one-dimensional `mesh` and fix the layouts the rules ask for.

    In place; parameter names and ties stay. Each rank keeps its own part of the values it has: all ranks must
    hold the same ones. Without rules nothing is sharded and the module stays as it is.
    `in_shares`: tokens are cut over cp, too, and embeddings are `context`'s business. Sets torch's
    process-wide permission to mix DTensors with plain (replicated) tensors. Returns what its hooks fix, by path.
    """
    resolved = resolve_rules(module, rules, mesh.size())
    if not resolved:
        return {}
    register_missing_rules()
    replicate_without_rule("tp")
    allow_plain_tensors()
    _distribute_parameters(module, resolved, mesh)
    for rule in resolved:
        _pin_inputs(module.get_submodule(rule.path), rule, mesh)
    for path, owner in module.named_modules():
        held = [p for p in owner._parameters.values() if p is not None]
        if held and not list(owner.children()) and all(is_replicated(p) for p in held):
            (run_block_locally if path in blocks else run_replicated_locally)(owner)
    for rule in resolved:
        _pin_outputs(module.get_submodule(rule.path), rule, mesh)
    for path in _around_fused(
        [rule for rule in resolved if any(map(parts_of, rule.params.values()))], blocks
    ):
        cut_parts_apart(module.get_submodule(path))
    run_with_rules(module, blocks, in_shares=in_shares)
    return {rule.path: (tuple(rule.inputs.items()), rule.outputs) for rule in resolved}


def _around_fused(rules: Sequence[ModuleRule], blocks: Sequence[str]) -> list[str]:
    """Where code may cut what a fused projection returns: the repeated blocks around it, else the root."""
    inside = {rule.path: [b for b in blocks if f"{rule.path}.".startswith(f"{b}.")] for rule in rules}
    return list(dict.fromkeys(path for found in inside.values() for path in (found or [""])))


def _distribute_parameters(module: nn.Module, rules: Sequence[ModuleRule], mesh: DeviceMesh) -> None:
    wanted: dict[nn.Parameter, tuple[Placement, str]] = {}
    for rule in rules:
        owner = module.get_submodule(rule.path)
        for name, placement in rule.params.items():
            parameter = owner._parameters.get(name)
            if parameter is None:
                continue
            placement = _from_start(placement, parameter.dim())
            before = wanted.setdefault(parameter, (placement, f"{rule.path}.{name}"))
            if before[0] != placement:
                raise UserError(
                    f"[[tensor]] {rule.path}.{name} and {before[1]} are one tied parameter but have "
                    f"different placements, {placement} and {before[0]}: give them the same"
                )
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner, name, parameter in own_parameters(module):
        if isinstance(parameter, DTensor):  # of experts, shared over ep
            made[parameter] = parameter
        if parameter not in made:
            placement = wanted.get(parameter, (Replicate(), ""))[0]
            # No communication: all ranks hold the same values already (or meta tensors).
            if (parts := parts_of(placement)) is not None:
                tensor = distribute_in_parts(parameter.data, mesh, *parts)
            else:
                tensor = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None)
            made[parameter] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        owner._parameters[name] = made[parameter]


def _pin_inputs(module: nn.Module, rule: ModuleRule, mesh: DeviceMesh) -> None:
    if rule.inputs:
        names = list(inspect.signature(module.forward).parameters)

        def pin_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            positional, named = list(args), dict(kwargs)
            for name, placement in rule.inputs.items():
                position = int(name) if name.isdigit() else names.index(name) if name in names else -1
                if name in named:
                    named[name] = lay_out(named[name], placement, mesh)
                elif 0 <= position < len(positional):
                    positional[position] = lay_out(positional[position], placement, mesh)
                elif 0 <= position < len(names) and names[position] in named:
                    named[names[position]] = lay_out(named[names[position]], placement, mesh)
            return tuple(positional), named

        module.register_forward_pre_hook(pin_inputs, with_kwargs=True)


def _pin_outputs(module: nn.Module, rule: ModuleRule, mesh: DeviceMesh) -> None:
    if rule.outputs:

        def pin_outputs(_: nn.Module, __: Any, output: Any) -> Any:
            if isinstance(output, Tensor):
                return lay_out(output, rule.outputs[0], mesh)
            if isinstance(output, tuple | list):
                laid_out = list(output)
                for i, placement in enumerate(rule.outputs):
                    laid_out[i] = lay_out(laid_out[i], placement, mesh)
                return type(output)(laid_out)
            return output

        module.register_forward_hook(pin_outputs)


def lay_out(value: Any, placement: Placement, mesh: DeviceMesh) -> Any:
    """`value` (a tensor or any nest of them) in `placement`; its gradient comes back in the layout it had.

    The gradient of a tensor that is replicated and stays so is made replicated here, at one place, however
    many consumers produce partial sums of it.
    """

    def one(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            if placement.is_replicate():
                return tensor
            tensor = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
        # The last axis is tp; before it context parallelism may have its own.
        return tensor.redistribute(placements=[*tensor.placements[:-1], _from_start(placement, tensor.dim())])

    by = at_pin()

    def decided(tensor: Tensor) -> Tensor:
        return by.changed(tensor, _from_start(placement, tensor.dim()), one) if by else one(tensor)

    return decided(value) if isinstance(value, Tensor) else tree_map_only(Tensor, decided, value)
