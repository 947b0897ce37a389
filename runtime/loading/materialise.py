"""Parameters and buffers on the meta device made real, share by share.

Module by module: a module's own tensors are made whole, initialised by its `reset_parameters()` and the
model's `_init_weights(module)` (transformers), cut to this rank's share and dropped. So no rank ever holds
more than its share and one module's own tensors. Every module draws from a seed of its own, made of rank 0's
generator and the module's path: the values depend neither on the strategy nor on the number of processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoparallel.errors import UserError
from autoparallel.runtime.ranks.accelerator import forked_generators
from autoparallel.runtime.tensor.questions import local
from autoparallel.runtime.torch_private import dtensor_like, parts_of

_SEED_BITS = 62


def on_meta(module: nn.Module) -> bool:
    """Whether any parameter or buffer of `module` is on the meta device."""
    return any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def all_names(module: nn.Module) -> frozenset[str]:
    """Every name of a parameter or buffer, those of tied ones included."""
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return frozenset(name for name, _ in named)


def check_initialisable(module: nn.Module, given: Container[str] = ()) -> None:
    """Refuse a module with tensors on the meta device that nothing initialises; `given` are loaded."""
    known = _initialises_others(module)
    for path, owner in module.named_modules():
        names = [name for name in _meta_names(owner) if _joined(path, name) not in given]
        if names and not known and _reset(owner) is None:
            raise UserError(
                f"{path or 'the model'} ({type(owner).__name__}) has {', '.join(names)} on the meta device and no "
                "reset_parameters() to initialise them: write one, or build the model on the CPU"
            )


def materialise(
    module: nn.Module, device: torch.device, *, seed: int, origin: nn.Module, given: Container[str] = (),
    only: Container[str] | None = None,
) -> None:  # fmt: skip
    """Give every tensor of `module` that is on the meta device memory on `device`, and its initial values.

    In place; parameters may already be sharded. `origin` is the whole model, whose `_init_weights` is used if
    it has one; `module` is it or a stage of it. Of modules whose tensors are all `given` (by name) only the
    shares are made, with no values yet: they are loaded. `only` these modules, by path; all of them by default.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, owner in module.named_modules():
        names = _meta_names(owner)
        if not names or (only is not None and path not in only):
            continue
        if all(_joined(path, name) in given for name in names):
            _make_shares(owner, device, made)
            continue
        held = {name: p for name, p in owner._parameters.items() if p is not None}
        for name, parameter in held.items():
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            owner._parameters[name] = nn.Parameter(whole, parameter.requires_grad)
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
        _initialise(owner, origin, _seed(seed, path), device)
        for name, parameter in held.items():
            whole = owner._parameters[name].detach()
            if parameter.is_meta and parameter not in made:
                made[parameter] = nn.Parameter(share_of(whole, parameter), parameter.requires_grad)
            owner._parameters[name] = made.get(parameter, parameter)


def _make_shares(owner: nn.Module, device: torch.device, made: dict[nn.Parameter, nn.Parameter]) -> None:
    for name, parameter in owner._parameters.items():
        if parameter is None or not parameter.is_meta:
            continue
        if parameter not in made:
            share = torch.empty_like(local(parameter), device=device)
            tensor = dtensor_like(share, parameter) if isinstance(parameter, DTensor) else share
            made[parameter] = nn.Parameter(tensor, parameter.requires_grad)
        owner._parameters[name] = made[parameter]
    for name, buffer in owner._buffers.items():
        if buffer is not None and buffer.is_meta:
            owner._buffers[name] = torch.empty_like(buffer, device=device)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def common_seed(device: torch.device) -> int:
    """A number drawn from rank 0's generator, the same on every rank; collective."""
    seed = torch.randint(0, 2**_SEED_BITS, ()).to(device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(seed, src=0)
    return int(seed.item())


def _meta_names(owner: nn.Module) -> list[str]:
    held = {**owner._parameters, **owner._buffers}
    return [name for name, tensor in held.items() if tensor is not None and tensor.is_meta]


def _reset(owner: nn.Module) -> Callable[[], None] | None:
    # torch's own MultiheadAttention and Transformer spell it with an underscore.
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(method := getattr(owner, name, None)):
            return method  # type: ignore[no-any-return]
    return None


def _initialises_others(origin: nn.Module) -> bool:
    return hasattr(origin, "_init_weights")


@torch.no_grad()
def _initialise(owner: nn.Module, origin: nn.Module, seed: int, device: torch.device) -> None:
    with forked_generators(device):
        torch.manual_seed(seed)
        if (reset := _reset(owner)) is not None:
            reset()
        if _initialises_others(origin):
            origin._init_weights(owner)  # type: ignore[operator]


def _seed(common: int, path: str) -> int:
    digest = hashlib.sha256(f"{common}:{path}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - _SEED_BITS)


def share_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's share of `whole`, laid out like `parameter`."""
    if not isinstance(parameter, DTensor):
        return whole
    part = whole
    for size, rank, dim, parts in cuts_of(parameter):
        if parts > 1:
            part = part.unflatten(dim, (parts, -1)).chunk(size, dim + 1)[rank].flatten(dim, dim + 1)
            continue
        chunks = part.chunk(size, dim)
        part = chunks[rank] if rank < len(chunks) else part.narrow(dim, 0, 0)
    return dtensor_like(part.contiguous().clone(), parameter)


def cuts_of(tensor: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """(ranks, this one, tensor dim, parts of it) of each cut that made a share of a whole tensor, in the order in
    which it was cut: tp (last in the mesh) before dp_shard."""
    if not isinstance(tensor, DTensor):
        return
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    for mesh_dim in reversed(range(mesh.ndim)):
        placement = tensor.placements[mesh_dim]
        if not placement.is_replicate():
            # Shard, or its strided form: of tp where it shards each part of a dim, of dp_shard where that cuts
            # what tp has cut along the same dim.
            _, parts = parts_of(placement) or (0, 1)
            by_parts = bool(names) and names[mesh_dim] == "tp"
            dim = placement.dim  # type: ignore[attr-defined]
            yield mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim), dim, parts if by_parts else 1
