"""A submodule that cannot be traced is run once for real, on the CPU with random weights, and priced whole."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

from autoparallel.planner.capture.errors import TraceError
from autoparallel.planner.capture.structure import structure
from autoparallel.planner.capture.trees import mapped, tensors

# A leaf with more parameter bytes than this is not run here (kind: chosen; about what a laptop can spare).
_LARGEST_LEAF_BYTES = 4 << 30

# Nor one whose trial run takes longer. Kind: chosen; whoever waits should rather change its code.
_LONGEST_RUN_S = 20.0

# Weights and inputs of the trial run. Kind: chosen; small numbers keep deep submodules finite.
_SCALE = 0.02


class TracedForward:
    """What is called in the place of a module's forward while its model is traced."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> TracedForward:
        return self  # what it calls is the trace's, whichever copy of the module asks


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafCost:
    """What one call of a leaf costs: FLOPs as torch counts them, bytes of its tensors, bytes autograd keeps."""

    forward_flops: int
    backward_flops: int
    moved_bytes: int
    saved_bytes: int


class LeafError(Exception):
    """The module at `path` cannot be run here for its costs."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.path = path


class _Deadline(TorchDispatchMode):
    """Ends what runs inside when its time is over."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._end_s = time.process_time() + _LONGEST_RUN_S
        self.attends = False  # by a fused kernel

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if time.process_time() > self._end_s:
            raise LeafError(self._path, f"that takes more than {_LONGEST_RUN_S:.0f} s")
        self.attends |= "scaled_dot_product" in func._schema.name
        return func(*args, **(kwargs or {}))


def measure_leaf(
    module: nn.Module, path: str, args: Any, kwargs: Any, known: Callable[[torch.Tensor], torch.Tensor | None]
) -> tuple[Any, LeafCost]:
    """Run `module`, whose tensors are on the meta device, on real data: the values that are `known` of its arguments,
    random ones of the same shapes for the others.

    Returns its result, on the meta device, and what it cost. Raises TraceError where it does not run either, LeafError
    where it is too large or too slow for that.
    """
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    if size > _LARGEST_LEAF_BYTES:
        raise LeafError(path, f"it is too large ({size / 2**30:.1f} GiB)")
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.enable_grad():
        try:
            key = _kind(module, path, args, kwargs, known)
            if key not in _measured:
                with _Deadline(path) as deadline:
                    _measured[key] = _run(module, args, kwargs, known, deadline)
            result, cost = _measured[key]
            return mapped(_to_meta, result), cost
        except LeafError:
            raise
        except Exception as error:
            raise TraceError(path, f"{type(error).__name__}: {error}") from error


_OF_A_PLACE = re.compile(r"(layer|block)_?(idx|index|id|number)$")

# Of equal leaves called alike, in other layers and in later traces of one model, one is run.
_measured: dict[Any, tuple[Any, LeafCost]] = {}


def forget_leaves() -> None:
    """Let go of what was measured: another model is captured."""
    _measured.clear()


def _kind(
    module: nn.Module, path: str, args: Any, kwargs: Any, known: Callable[[torch.Tensor], torch.Tensor | None]
) -> Any:
    """Equal for calls that cost the same: of modules of one structure, but for the number of their layer, given the same."""
    places = {part for part in path.split(".") if part.isdigit()}
    indices = frozenset(
        (name, key)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if _OF_A_PLACE.search(key) and str(value) in places
    )
    return structure(module, indices, frozenset()), str(
        mapped(lambda leaf: _seen(leaf, known), (args, kwargs))
    )


def _seen(leaf: Any, known: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf if isinstance(leaf, int | float | str | torch.dtype | None) else type(leaf)
    values = known(leaf)
    numbers = None if values is None else hash(values.contiguous().view(-1).numpy().tobytes())
    return tuple(leaf.shape), leaf.dtype, leaf.requires_grad, numbers


def _run(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    known: Callable[[torch.Tensor], torch.Tensor | None],
    deadline: _Deadline,
) -> tuple[Any, LeafCost]:
    generator = torch.Generator().manual_seed(0)
    trial = copy.deepcopy(module)
    for part in trial.modules():  # the classes' own forwards, not what stands in for them while tracing
        if isinstance(vars(part).get("forward"), TracedForward):
            del vars(part)["forward"]
    trial = trial.to_empty(device="cpu")
    for tensor in (*trial.parameters(), *trial.buffers()):
        _fill(tensor.data, generator)
    args, kwargs = mapped(lambda leaf: _real(leaf, generator, known), (args, kwargs))
    own = {t.untyped_storage().data_ptr() for t in (*trial.parameters(), *trial.buffers())}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with (
        FlopCounterMode(display=False) as forward,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
    ):
        result = counted = trial(*args, **kwargs)
    with sdpa_kernel(SDPBackend.MATH):
        if deadline.attends:  # whose products in a fused kernel on a CPU are not counted
            with FlopCounterMode(display=False) as forward:
                counted = trial(*args, **kwargs)
        differentiable = [t for t in tensors(counted) if t.requires_grad]
        with FlopCounterMode(display=False) as backward:
            if differentiable:
                torch.autograd.backward(differentiable, [torch.ones_like(t) for t in differentiable])
    touched = [*tensors((args, kwargs)), *tensors(result), *trial.parameters()]
    cost = LeafCost(
        forward_flops=int(forward.get_total_flops()),
        backward_flops=int(backward.get_total_flops()),
        moved_bytes=sum(t.numel() * t.element_size() for t in touched),
        saved_bytes=sum(size for size, _ in kept.values()),
    )
    return mapped(_to_meta, result), cost


def _to_meta(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    meta = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    return meta.requires_grad_(leaf.requires_grad)


def _real(leaf: Any, generator: torch.Generator, known: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
    real, values = torch.empty(leaf.shape, dtype=leaf.dtype), known(leaf)
    if values is None:
        _fill(real, generator)
    else:
        real.copy_(values)
    return real.requires_grad_(leaf.requires_grad)


def _fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Random numbers; zero where they are indices or flags, which any table can be asked for."""
    if tensor.is_floating_point():
        tensor.normal_(0.0, _SCALE, generator=generator)
    else:
        tensor.zero_()
