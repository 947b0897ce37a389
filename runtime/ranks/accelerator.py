"""The device that a rank computes on, and what goes with it: its collectives, its random numbers, its streams.

`torch.accelerator` says which accelerator there is, and torch's registry of backends whose collectives it has; no other
part of the runtime names one. One that has none of its own (Apple's) is not used: ranks then compute on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.errors import UserError

CPU = torch.device("cpu")
_HOST_BACKEND = "gloo"
# Which of the processes on its node this one is, by launcher: torchrun, Slurm, Open MPI.
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def accelerator_type() -> str | None:
    """The kind of accelerator that is here and has collectives of its own, such as "cuda"; None if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and own_backend(found.type) != _HOST_BACKEND else None


def own_backend(kind: str) -> str:
    """The backend of collectives on devices of a kind; Gloo where this torch has no other."""
    try:
        found = dist.get_default_backend_for_device(kind)
    except ValueError:  # it knows of none
        return _HOST_BACKEND
    return found if dist.is_backend_available(found) else _HOST_BACKEND


def current_device() -> torch.device:
    """The accelerator that this process uses now; the CPU where there is none."""
    kind = accelerator_type()
    return CPU if kind is None else torch.device(kind, torch.accelerator.current_device_index())


def take_device() -> torch.device:
    """The accelerator that is this process's by its place on the node, made the current one; the CPU where there is
    none. Raises UserError where the node has fewer than it has processes.

    A launcher may show each process its own device only, which is then its first.
    """
    kind = accelerator_type()
    if kind is None:
        return CPU
    place = next((int(os.environ[name]) for name in _LOCAL_RANKS if name in os.environ), 0)
    count = torch.accelerator.device_count()
    if place >= count and f"{kind.upper()}_VISIBLE_DEVICES" not in os.environ:
        raise UserError(
            f"this is process {place + 1} on its node, which has {count} {kind} device{'s' * (count > 1)}: start one "
            "process a device (torchrun --nproc-per-node), or start a Gloo process group yourself to compute on the CPU"
        )
    torch.accelerator.set_device_index(place if place < count else 0)
    return current_device()


def backends(device: torch.device) -> str:
    """What `init_process_group` takes: collectives of tensors on `device`, and on the host of objects."""
    if device.type == "cpu":
        return _HOST_BACKEND
    return f"cpu:{_HOST_BACKEND},{device.type}:{own_backend(device.type)}"


def device_of_group() -> torch.device:
    """Where this rank of the default process group computes: on an accelerator if the group has their own collectives.

    Whoever started the group has chosen the device; where nobody has, it is the one that `take_device` takes.
    """
    kind = accelerator_type()
    if kind is None or f"{kind}:{own_backend(kind)}" not in dist.get_backend_config().split(","):
        return CPU
    untouched = not torch.get_device_module(kind).is_initialized()
    return take_device() if untouched and torch.accelerator.current_device_index() == 0 else current_device()


def backend_of_ranks() -> str:
    """What runs, or will run, the collectives of ranks on their devices; looks, and takes nothing."""
    kind = accelerator_type()
    if kind is None:
        return _HOST_BACKEND
    own = own_backend(kind)
    taken = not dist.is_initialized() or f"{kind}:{own}" in dist.get_backend_config().split(",")
    return own if taken else _HOST_BACKEND


def device_module(device: torch.device) -> Any:
    """torch's module of streams, events and generators for a device: `torch.cuda` and the like."""
    return torch.get_device_module(device)


def device_name(device: torch.device) -> str:
    """What the driver calls an accelerator."""
    return str(device_module(device).get_device_name(device))


@contextmanager
def forked_generators(device: torch.device) -> Iterator[None]:
    """What is drawn inside, on the CPU and on `device`, leaves their generators as they were."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=None if device.type == "cpu" else device.type):
        yield


def generator_state(device: torch.device) -> Tensor:
    """The state of the default generator of a device, bytes on the CPU."""
    state: Tensor = (
        torch.get_rng_state() if device.type == "cpu" else device_module(device).get_rng_state(device)
    )
    return state


def set_generator_state(state: Tensor, device: torch.device) -> None:
    """Inverse of `generator_state`."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        device_module(device).set_rng_state(state, device)
