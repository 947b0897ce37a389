"""Overheads to measure: of a launch, of a module's call and its autograd, of DTensor's dispatch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor

from autoparallel.costmodel.graph import OpKind
from autoparallel.costmodel.kernels import DTENSOR
from autoparallel.costmodel.program import Kernel
from autoparallel.runtime.profiling.case import Case, random
from autoparallel.runtime.profiling.timing import Call, device_name
from autoparallel.runtime.ranks.accelerator import own_backend
from autoparallel.runtime.tensor.functions import run_with_rules

TINY = 4  # numbers: nothing to compute, all overhead
CHAIN = 16  # tiny layers between two readings of the clock
FP32 = 4
# Forward: product, activation. Backward: activation, two products, the sum of the bias.
LAYER = Kernel(kind=OpKind.ELEMENTWISE, dtype="fp32", flops=0, bytes_moved=3 * TINY * FP32, count=CHAIN * 6)


def _layers() -> nn.Sequential:
    chain = [layer for _ in range(CHAIN) for layer in (nn.Linear(TINY, TINY), nn.GELU())]
    return nn.Sequential(*chain).to(device_name())


def _case(
    family: str, label: str, layers: nn.Module, *kernels: Kernel, mesh: DeviceMesh | None = None
) -> Case:
    """Forward and backward of the tiny layers, on DTensors where there is a mesh."""

    def make() -> Call:
        x, one = random(TINY, TINY), torch.ones(TINY, TINY, device=device_name())
        if mesh is not None:
            x, one = (distribute_tensor(t, mesh, [Replicate()], src_data_rank=None) for t in (x, one))
        x.requires_grad_()
        return lambda: torch.autograd.grad(layers(x), (x, *layers.parameters()), one)

    return Case(family=family, label=label, kernels=kernels, make=make)


def launch_case() -> Case:
    """Layers of a few numbers, forward and backward: what an operator takes by itself, its module's call and its
    share of autograd included."""
    return _case("launch", f"{LAYER.count} tiny kernels", _layers(), LAYER)


def dtensor_case(mesh: DeviceMesh) -> Case:
    """The same layers as DTensors, as tensor parallelism runs them; nothing is communicated."""
    layers = _layers()
    for layer in layers:
        for name, parameter in list(layer.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter.data, mesh, [Replicate()], src_data_rank=None)
            layer.register_parameter(name, nn.Parameter(placed))
    run_with_rules(layers, ())
    added = Kernel(kind=DTENSOR, dtype="fp32", flops=0, bytes_moved=0, count=LAYER.count)
    return _case("dtensor", f"{LAYER.count} tiny kernels of DTensors", layers, LAYER, added, mesh=mesh)


@contextmanager
def mesh_of_one() -> Iterator[DeviceMesh]:
    """A mesh of this process, or of all processes that are joined already."""
    alone = not dist.is_initialized()
    if alone:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(own_backend(device_name()), store=store, rank=0, world_size=1)
    try:
        yield DeviceMesh.from_group(dist.group.WORLD, device_name())  # type: ignore[arg-type]
    finally:
        if alone:
            dist.destroy_process_group()


def dispatch_case() -> Case:
    """Bare operators on a few numbers: the overhead that the other cases, which build no graph, have in them."""
    kernel = Kernel(kind=OpKind.ELEMENTWISE, dtype="fp32", flops=0, bytes_moved=3 * TINY * FP32, count=CHAIN)

    def make() -> Call:
        x, y = random(TINY), random(TINY)

        def run() -> None:
            for _ in range(CHAIN):
                torch.mul(x, y)

        return run

    return Case(family="dispatch", label=f"{CHAIN} bare kernels", kernels=(kernel,), make=make)
