"""Blocks of a tensor-parallel model that run on plain tensors: each rank its shares, without DTensor's dispatch.

What DTensor does in a block is mostly the same work on the shares; only where `[[tensor]]` rules fix a layout something
is communicated. So the first call of each kind of block is a trial: once as DTensors, writing down how each layout hook changes
the placement of a value and of its gradient, and once on the plain shares, changing just these. Where both give every
rank the same outputs and gradients, the block runs plain from then on; else (a reshape that names whole sizes, an operator
that communicates by itself, dropout) it stays as it was. Cf. "static eager" of veScale (arXiv:2509.07003).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from autoparallel.planner.capture.again import checkpoints_seen
from autoparallel.runtime.ranks.accelerator import CPU, generator_state, set_generator_state
from autoparallel.runtime.tensor.functions import TensorParallel
from autoparallel.runtime.tensor.layout_hooks import NotPlain, Plain, Player, Recorder, decided_by, sound
from autoparallel.runtime.tensor.questions import copied_buffers, is_replicated, local, own_parameters
from autoparallel.runtime.tensor.shares import from_share, to_share
from autoparallel.runtime.torch_private import dtensor_like, layout_of, without_function_mode

Forward = Callable[..., Any]
Layout = tuple[object, ...]  # of the arguments of a call
# How far two ways to compute a value may be apart, relative to its largest. Kind: formula: the same kernels on the same
# numbers, gradients added up in another order.
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
_ZERO = 1e-3  # of the median of these largest values: a tensor that is smaller is rounding
_VARIATION = 0.1  # of the numbers of a trial, by their size


class _Nothing(torch.autograd.Function):
    """Zeros in place of what another rank adds; its gradient is the same on every rank."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Block:
    """A block and the places where it holds parameters, each of them named once.

    `once` are replicated parameters beside a sharded one: the bias of a product whose parts are summed over the ranks, of
    which the first adds it.
    """

    def __init__(self, module: nn.Module, hooked: Sequence[tuple[str, Any]]) -> None:
        """`hooked` are the layout hooks of the modules in it, by path in it."""
        self.module, self.forward = module, module.forward
        names = {id(p): name for name, p in module.named_parameters()}
        self._places = [(owner._parameters, key, names[id(p)]) for owner, key, p in own_parameters(module)]
        beside = [[p for p in owner._parameters.values() if p is not None] for owner in module.modules()]
        self.once = {
            names[id(p)]
            for held in beside
            if not all(map(is_replicated, held))
            for p in held
            if is_replicated(p)
        }
        layouts = [
            (n, tuple(p.shape), str(getattr(p, "placements", ""))) for n, p in module.named_parameters()
        ]
        self.kind = (type(module), repr(module), tuple(layouts), str(hooked))

    def parameters(self) -> dict[str, Tensor]:
        """What it holds now: FSDP2 puts whole parameters in the place of its shards."""
        return {name: parameter for held, key, name in self._places if (parameter := held[key]) is not None}

    def shares(self, parameters: Mapping[str, Tensor], plain: Plain) -> dict[str, Tensor]:
        """What this rank's part of the work takes of its parameters, differentiable."""
        found = {}
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                found[name] = to_share(parameter, plain.parameters.get(name, parameter.placements[-1]))
                if name in self.once and plain.mesh.get_local_rank() > 0:
                    found[name] = _Nothing.apply(found[name])
        return found

    @contextmanager
    def holding(self, others: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, these stand in place of its parameters."""
        before = [(held, key, held[key]) for held, key, name in self._places if name in others]
        for held, key, name in self._places:
            if name in others:
                held[key] = others[name]  # type: ignore[assignment]
        try:
            yield
        finally:
            for held, key, parameter in before:
                held[key] = parameter


class PlainBlocks:
    """The blocks of a module that run plain where a trial shows that they may; `hooked` are the layout hooks of its modules, by path."""

    def __init__(
        self, module: nn.Module, blocks: Sequence[str], hooked: Mapping[str, Any], mesh: DeviceMesh
    ) -> None:
        self._mesh, self.found = mesh, dict[tuple[Any, Layout], Plain | None]()
        self._blocks = []
        for path in dict.fromkeys(blocks):
            own = [(at[len(path) :], hook) for at, hook in hooked.items() if f"{at}.".startswith(f"{path}.")]
            self._blocks.append(_Block(module.get_submodule(path), own))
        for block in self._blocks:
            block.module.forward = self._as_found(block)

    def try_first(self) -> None:
        """Let the first call of each kind of block be a trial; to be called when all else is around the blocks, which a
        trial must not see: recomputation and copies to the host."""
        for block in self._blocks:
            block.module.forward = self._tried(block, block.module.forward)

    def _as_found(self, block: _Block) -> Forward:
        @functools.wraps(block.forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = tree_flatten((args, kwargs))
            plain = self.found.get((block.kind, _layout(leaves, self._mesh.size())))
            return _run_plain(block, plain, leaves, tree) if plain else block.forward(*args, **kwargs)

        return run

    def _tried(self, block: _Block, forward: Forward) -> Forward:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = tree_flatten((args, kwargs))
            key = (block.kind, _layout(leaves, self._mesh.size()))
            if key not in self.found and torch.is_grad_enabled():
                self.found[key] = self._trial(block, leaves, tree)
            return forward(*args, **kwargs)

        return run

    def _trial(self, block: _Block, leaves: Sequence[Any], tree: TreeSpec) -> Plain | None:
        """Both ways on arguments like those of a call, without a trace; the same answer on every rank."""
        plain: Plain | None = None
        with _without_a_trace(block.module, self._mesh), checkpoints_seen(_not_plain):
            try:
                plain = _compared(block, Plain(self._mesh), leaves, tree)
            except (NotPlain, RuntimeError, ValueError, TypeError, IndexError, AssertionError):
                plain = None
        agreed = torch.tensor([plain is not None], dtype=torch.int32, device=self._mesh.device_type)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self._mesh.get_group())
        return plain if agreed.item() else None


def _not_plain(_: Forward) -> Any:
    """Checkpoints of a block's own code run again without what stands in for its parameters."""
    raise NotPlain


def _compared(block: _Block, plain: Plain, leaves: Sequence[Any], tree: TreeSpec) -> Plain:
    """`plain`, filled from a run as DTensors and run so itself. Raises where outputs or gradients differ.

    All numbers get gradients, those of frozen parameters too: what is found serves blocks and calls that freeze others.
    """
    if any(not isinstance(leaf, Tensor | bool | int | float | str | None) for leaf in leaves):
        raise NotPlain  # an object, which a call may change
    if any(_needs_gradient(leaf) and not isinstance(leaf, DTensor) for leaf in leaves):
        raise NotPlain
    given = [_varied(leaf) for leaf in leaves]
    held = {name: _varied(parameter) for name, parameter in block.parameters().items()}
    trained = {name: parameter for name, parameter in held.items() if parameter.requires_grad}
    into = [leaf for leaf in given if _needs_gradient(leaf)]
    with decided_by(Recorder(plain)), block.holding(held):
        made = _outputs(block, given, tree)
        drawn = [_noise(out) for out in made]
        gradients = _gradients(made, [*into, *trained.values()], drawn)
    plain.outputs = tuple(sound(out.placements[-1]) if isinstance(out, DTensor) else None for out in made)
    for leaf, gradient in zip(into, gradients, strict=False):
        if gradient is not None and gradient.placements != leaf.placements:
            raise NotPlain
    for (name, parameter), gradient in zip(trained.items(), gradients[len(into) :], strict=True):
        if isinstance(parameter, DTensor):
            told = parameter if gradient is None else gradient
            plain.parameters[name] = sound(told.placements[-1])
    shares = [_share(leaf) for leaf in given]
    player = Player(plain)
    with without_function_mode(TensorParallel), decided_by(player), block.holding(block.shares(held, plain)):
        own = _outputs(block, shares, tree)
        if next(player.next, None) is not None or any(isinstance(out, DTensor) for out in own):
            raise NotPlain
        own_gradients = _gradients(own, [*into, *trained.values()], drawn)
    _check_equal([*made, *gradients], [*own, *own_gradients])
    return plain


def _run_plain(block: _Block, plain: Plain, leaves: Sequence[Any], tree: TreeSpec) -> Any:
    with without_function_mode(TensorParallel):
        args, kwargs = tree_unflatten([_share(leaf) for leaf in leaves], tree)
        with decided_by(Player(plain)), block.holding(block.shares(block.parameters(), plain)):
            made, tree = tree_flatten(block.forward(*args, **kwargs))
        placements = iter(plain.outputs)
        for n, leaf in enumerate(made):
            placement = next(placements) if isinstance(leaf, Tensor) else None
            if placement is not None:
                made[n] = from_share(leaf, placement, plain.mesh, plain.layouts)
    return tree_unflatten(made, tree)


def _outputs(block: _Block, leaves: Sequence[Any], tree: TreeSpec) -> list[Tensor]:
    args, kwargs = tree_unflatten(leaves, tree)
    return [out for out in tree_flatten(block.forward(*args, **kwargs))[0] if isinstance(out, Tensor)]


@contextmanager
def _without_a_trace(block: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
    """Random numbers and buffers are afterwards as they were; nobody else's hooks see what autograd keeps."""
    devices = dict.fromkeys((CPU, torch.device(mesh.device_type)))
    states = {device: generator_state(device) for device in devices}
    try:
        unseen = saved_tensors_hooks(lambda kept: kept, lambda kept: kept)
        with copied_buffers(block.modules()), torch.enable_grad(), unseen:
            yield
    finally:
        for device, state in states.items():
            set_generator_state(state, device)


def _varied(leaf: Any) -> Any:
    """Numbers like those of `leaf`, the same on every rank where it is replicated, and none of them special: a bias that is
    zero hides what is done to it."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not isinstance(leaf, DTensor):
        return leaf.detach() if isinstance(leaf, Tensor) else leaf
    share = local(leaf)
    size = share.double().square().mean().sqrt() if share.any() else 1.0
    return dtensor_like(share + (_VARIATION * size * _noise(leaf)).to(share.dtype), leaf).requires_grad_()


def _noise(tensor: Tensor) -> Tensor:
    """Normal numbers, one for each element that this rank has; the same on every rank where they are replicated.

    Numbers in a row would not do: what softmax saturates at, and what a norm takes away, is then nearly all there is, and
    rounding the rest.
    """
    share, seed = local(tensor), 0
    if isinstance(tensor, DTensor) and not is_replicated(tensor):
        seed = 1 + tensor.device_mesh.get_local_rank()
    generator = torch.Generator(share.device)
    generator.manual_seed(seed)
    return torch.randn(share.shape, generator=generator, device=share.device).to(share.dtype)


def _gradients(outputs: Sequence[Tensor], sources: Sequence[Tensor], arriving: Sequence[Tensor]) -> list[Any]:
    """By each source, where these shares of gradients arrive at the outputs."""
    flowing = [
        (out, dtensor_like(share, out) if isinstance(out, DTensor) else share)
        for out, share in zip(outputs, arriving, strict=True)
        if out.requires_grad
    ]
    if not flowing or not sources:
        raise NotPlain
    ends, given = zip(*flowing, strict=True)
    return list(torch.autograd.grad(ends, sources, given, allow_unused=True))


def _check_equal(these: Sequence[Any], those: Sequence[Any]) -> None:
    """Raises where two are apart; those that should be zero (of a bias that softmax ignores) by the size of the others."""
    if [one is None for one in these] != [other is None for other in those]:
        raise NotPlain
    pairs = [
        (local(one), local(other))
        for one, other in zip(these, those, strict=True)
        if one is not None and one.numel()
    ]
    if any(one.shape != other.shape or one.dtype != other.dtype for one, other in pairs):
        raise NotPlain
    sizes = [one.abs().amax().double() for one, _ in pairs]
    least = _ZERO * torch.stack(sizes).median()
    for (one, other), size in zip(pairs, sizes, strict=True):
        if bool((one - other).abs().amax() > _TOLERANCE.get(one.dtype, 0.0) * torch.maximum(size, least)):
            raise NotPlain


def _layout(leaves: Sequence[Any], tp: int) -> Layout:
    """What decides whether shares add up: sizes count by whether `tp` divides them."""
    found: list[object] = []
    for leaf in leaves:
        layout = layout_of(leaf)
        if layout is not None:
            found += layout.placements, *[size % tp for size in layout.shape]
        elif isinstance(leaf, Tensor):
            found += leaf.requires_grad and torch.is_grad_enabled(), *[size % tp for size in leaf.shape]
        else:
            found.append(type(leaf))
    return tuple(found)


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _share(leaf: Any) -> Any:
    return to_share(leaf, leaf.placements[-1]) if isinstance(leaf, DTensor) else leaf
