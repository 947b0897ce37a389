"""One module (the whole model, or one pipeline stage of it) made parallel by a strategy, in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoparallel.errors import UserError
from autoparallel.planner.expand.schedules import SPLIT_BACKWARD
from autoparallel.planner.strategy.types import Strategy, TensorRule
from autoparallel.runtime.context.functions import run_in_shares
from autoparallel.runtime.experts.on_shares import run_on_shares
from autoparallel.runtime.experts.parallel import Sharing, share_experts
from autoparallel.runtime.fsdp_private import adding_up, computed_with, reduce_accumulated
from autoparallel.runtime.gradients.dense import make_dense
from autoparallel.runtime.gradients.fsdp import (
    announce_micro_batch,
    gather_ahead,
    reductions_per_step,
    run_weights,
    shard_data,
)
from autoparallel.runtime.gradients.put_off import PutOff, can_put_off, put_off
from autoparallel.runtime.gradients.split_backward import WeightHalf
from autoparallel.runtime.gradients.synchronisation import Synchronisation
from autoparallel.runtime.loading.materialise import all_names, materialise, on_meta
from autoparallel.runtime.loading.weights import Weights, load_weights
from autoparallel.runtime.lowering.compiled import compile_blocks
from autoparallel.runtime.memory.host_copies import OffloadCount
from autoparallel.runtime.memory.offload import offload_blocks
from autoparallel.runtime.memory.recompute import recompute_blocks
from autoparallel.runtime.ranks.mesh import RankMesh
from autoparallel.runtime.ranks.places import sharding_axes, unit_axes
from autoparallel.runtime.tensor.plain_blocks import PlainBlocks
from autoparallel.runtime.tensor.questions import as_bytes
from autoparallel.runtime.tensor.rules import resolve_rules, shard_tensors

_MIB = 2**20
ALONE = 2  # the level at which one rank by itself keeps cast parameters for a step, and no gradients in their dtype
_DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """What is computed in, what `parameters()` hold, and what gradients are accumulated and reduced in."""

    compute: torch.dtype
    param: torch.dtype
    grad: torch.dtype
    tf32: bool = False  # products of float32 may be taken in TF32, where the device has it


def torch_dtype(name: str) -> torch.dtype:
    """A dtype by its name in strategy files; UserError for those that the runtime does not run."""
    if name not in _DTYPES:
        raise UserError(f'dtype "{name}": the runtime runs {", ".join(_DTYPES)}; choose one of them')
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in strategy files."""
    return next((name for name, known in _DTYPES.items() if known == dtype), str(dtype))


def module_dtypes(
    module: nn.Module, dtype: str | None = None, param_dtype: str | None = None, grad_dtype: str | None = None
) -> Dtypes:
    """The module's own dtype for all three, unless told otherwise."""
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.get_default_dtype())
    param = torch_dtype(param_dtype) if param_dtype else own
    return Dtypes(
        compute=torch_dtype(dtype) if dtype else param,
        param=param,
        grad=torch_dtype(grad_dtype) if grad_dtype else param,
        tf32=dtype == "tf32",
    )


class Lowered:
    """A module after lowering: what a driver of steps has to do around forward and backward passes.

    Per step: `begin(micro_batches)` and `gather_ahead()`, then per micro-batch `announce(last)`, forward and backward, at the end
    `finish()`. A driver that makes FSDP2 reduce once per step whatever the ZeRO level (torch's pipeline
    schedules do) passes `reductions=1`.
    """

    def __init__(
        self, module: nn.Module, strategy: Strategy, *, zero: int | None, sync: Synchronisation,
        offloaded: OffloadCount, plain: PlainBlocks | None = None, puts_off: bool = False,
    ) -> None:  # fmt: skip
        self.module, self.offloaded, self.plain, self.sync = module, offloaded, plain, sync
        self.puts_off = puts_off  # its products the gradients of their weights, in a split backward pass
        sharded = zero is not None  # by FSDP2, which goes by that level
        self._zero, self._sharded = zero or 0, sharded
        # The last pass of a split backward brings no gradient of what a stage receives, which FSDP2 waits for.
        self._deferred = sharded and strategy.pipeline.schedule in SPLIT_BACKWARD

    def begin(self, micro_batches: int, *, reductions: int | None = None) -> None:
        """Start a step of `micro_batches` forward and backward passes."""
        own = reductions_per_step(self._zero, micro_batches, sharded=self._sharded)
        self.sync.begin(own if reductions is None else reductions)

    def gather_ahead(self) -> None:
        """Begin to gather updated parameters that are to stand whole all through the step that has begun."""
        if self._sharded and self._zero in (1, 2):
            gather_ahead(self.module)

    def announce(self, *, last: bool, whole: bool = False) -> None:
        """Say that the next micro-batch comes, whether it is the step's last, and whether its backward is a whole one where the
        schedule splits others."""
        if self._deferred:
            announce_micro_batch(self.module, reduces=whole and self._zero >= 2, frees=self._zero == 3)
        elif self._sharded:
            announce_micro_batch(self.module, reduces=last or self._zero >= 2, frees=last or self._zero == 3)

    def weights(self) -> list[Tensor]:
        """The parameters with gradients as passes compute with them, whole, from the first forward pass on."""
        found = computed_with(self.module) if self._sharded else self.module.parameters()
        return [p for p in found if p.requires_grad]

    def run_weights(self, half: WeightHalf | PutOff) -> None:
        """The second half of a split backward pass."""
        if self._sharded and self._zero >= 2:
            run_weights(self.module, half, zero=self._zero)
        else:
            half.run(self._add_up if self._sharded else None)

    @cached_property
    def _add_up(self) -> Callable[[Tensor], None]:
        """Asked for after a forward pass, when FSDP2 has made whole parameters."""
        return adding_up(self.module)

    def finish(self) -> None:
        """End the step: `.grad` holds the mean over all data-parallel ranks."""
        if self._deferred:
            reduce_accumulated(self.module)
        self.sync.finish()

    def buffer_bytes(self) -> int:
        """Bytes of the buffers for gradients that are there now; `.grad` are views of them where dtypes agree."""
        return self.sync.buffer_bytes()


def check_rules(module: nn.Module, strategy: Strategy) -> None:
    """Refuse tensor rules that do not fit the module, before anything is changed."""
    if strategy.mesh.tp > 1:
        resolve_rules(module, strategy.tensor, strategy.mesh.tp)


def lower_module(
    module: nn.Module,
    blocks: Sequence[str],
    strategy: Strategy,
    mesh: RankMesh,
    dtypes: Dtypes,
    *,
    recomputed_in_full: int = 0,
    rules: Sequence[TensorRule] | None = None,
    origin: nn.Module | None = None,
    seed: int = 0,
    weights: Weights | None = None,
    memory: AbstractContextManager[object] | None = None,
    experts: Sequence[Sharing] = (),
    entered: Collection[str] = (), alone: Collection[str] = (), always_again: Collection[str] = (),
) -> Lowered:  # fmt: skip
    """Tensor parallelism, recomputation, data parallelism and gradient synchronisation of `module`, in place.

    `blocks` are the paths of its repeated blocks in the order in which they run (one that runs twice stands there twice),
    `recomputed_in_full` of which are recomputed wholly whatever the mode; `rules` replace the strategy's (a stage has only some of the modules), `origin` is
    the model of which `module` is a stage. Every rank must hold the same values before (see `broadcast_state`), or meta tensors,
    which are initialised from `seed`; afterwards each holds its share. With `weights` the shares are filled from files instead.
    `memory` surrounds the making of the shares, which then get no values (a dry run's are fake tensors). `experts` are layers that run on shares; `entered`, `alone`: see `entered_blocks`, `own_units`;
    `always_again` are blocks that the model's own code has a checkpoint around.
    """
    blocks, recomputed_in_full = tuple(dict.fromkeys(blocks)), len(set(blocks[:recomputed_in_full]))
    sharded, zero = _units(strategy, mesh, dtypes)
    _prepare(module, strategy, dtypes)
    compiled, plain = strategy.execution.kernels == "compiled", None
    shared = experts if mesh.sizes.ep > 1 else ()
    layers = share_experts(module, shared, mesh, dtype=dtypes.compute if sharded else None, compiled=compiled)
    if mesh.sizes.tp > 1:
        rules = strategy.tensor if rules is None else rules
        plain = _shard_tensors(module, rules, mesh, blocks, tried=_may_run_plain(mesh, experts, memory))
    if not layers:
        run_on_shares(module, experts, mesh)
    if mesh.sizes.cp > 1 and (activations := mesh.activation_mesh()) is not None:
        run_in_shares(module, blocks, activations)
    recompute_blocks(
        module, blocks, mode=strategy.recompute.mode, full=recomputed_in_full,
        attention=strategy.execution.attention, always=always_again,
    )  # fmt: skip
    puts_off = _puts_off(module, blocks, strategy)
    compile_blocks(module, blocks if compiled else ())
    away = strategy.offload.activations
    offloaded = offload_blocks(module, blocks, away, mesh.device, imagined=memory is not None)
    if plain:
        plain.try_first()
    copied = shard_data(
        module, blocks, mesh, axes=sharded, zero=zero, dtype=dtypes.compute,
        param_dtype=dtypes.param, grad_dtype=dtypes.grad, experts=layers, entered=entered,
        alone=alone, secondary=strategy.shard.secondary,
    )  # fmt: skip
    copied = _fill(module, mesh.device, copied, seed=seed, origin=origin, weights=weights, memory=memory)
    sync = Synchronisation(module, strategy, mesh, grad_dtype=dtypes.grad, copied=copied, experts=layers)
    return Lowered(
        module, strategy, zero=zero if sharded else None, sync=sync, offloaded=offloaded, plain=plain,
        puts_off=puts_off,
    )  # fmt: skip


def _prepare(module: nn.Module, strategy: Strategy, dtypes: Dtypes) -> None:
    """Parameters in the dtype that they are held in, gradients as ranks can add them."""
    if dtypes.param != next((p.dtype for p in module.parameters() if p.is_floating_point()), dtypes.param):
        hold_in(module, dtypes.param)
    if strategy.mesh.devices > 1:
        make_dense(module)


def hold_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Have parameters and buffers of real numbers in `dtype`, in place; complex ones stay, of which `Module.to` would drop a half."""
    module._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _puts_off(module: nn.Module, blocks: Sequence[str], strategy: Strategy) -> bool:
    """Make the layers of a stage put the gradients of their weights off where the schedule splits its backward; whether they do."""
    split = strategy.pipeline.schedule in SPLIT_BACKWARD and strategy.execution.kernels != "compiled"
    if not split or strategy.mesh.tp > 1 or not can_put_off(module, blocks):
        return False
    put_off(module)
    return True


def _units(strategy: Strategy, mesh: RankMesh, dtypes: Dtypes) -> tuple[tuple[str, ...], int]:
    """The axes over which FSDP2 has its units, and the level of ZeRO that it goes by there."""
    own = strategy.shard.zero
    units = unit_axes(mesh.sizes, own, casts=dtypes.compute != dtypes.param)
    return units, own if sharding_axes(mesh.sizes, own) else ALONE


def _shard_tensors(
    module: nn.Module, rules: Sequence[TensorRule], mesh: RankMesh, blocks: Sequence[str], *, tried: bool
) -> PlainBlocks | None:
    """Tensor parallelism; and what tries whether blocks run without DTensor, where they are to be tried."""
    hooked = shard_tensors(module, rules, mesh.axis("tp"), blocks, in_shares=mesh.sizes.cp > 1)
    return PlainBlocks(module, blocks, hooked, mesh.axis("tp")) if tried else None


def _may_run_plain(mesh: RankMesh, experts: Sequence[Sharing], memory: object) -> bool:
    """Experts, and shares of the sequence, are cut by other means than layout hooks; a dry run (`memory`) has no numbers to try."""
    return mesh.sizes.cp == 1 and not experts and memory is None


def _fill(
    module: nn.Module, device: torch.device, copied: Collection[nn.Parameter], *, seed: int, origin: nn.Module | None,
    weights: Weights | None, memory: AbstractContextManager[object] | None,
) -> set[nn.Parameter]:  # fmt: skip
    """Give the module's shares their values on `device` (see `lower_module`); what the parameters `copied` are then."""
    names = [name for name, parameter in module.named_parameters() if parameter in copied]
    if on_meta(module):
        given = weights or () if memory is None else all_names(module)
        with memory or nullcontext():
            materialise(module, device, seed=seed, origin=module if origin is None else origin, given=given)
    else:
        module.to(device)
    if weights is not None:
        load_weights(module, weights)
    return {module.get_parameter(name) for name in names}


def broadcast_state(module: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's parameters and buffers; collective over all ranks. Meta tensors stay."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if not tensor.is_meta:
                _broadcast(tensor, device)


def _broadcast(tensor: Tensor, device: torch.device) -> None:
    sent = tensor.detach().to(device).contiguous()
    dist.broadcast(as_bytes(sent), src=0)
    tensor.copy_(sent)
