"""Which device a process takes, and what comes with it, where there are accelerators."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from autoparallel.errors import UserError
from autoparallel.runtime.ranks import accelerator, leaving
from autoparallel.runtime.ranks.accelerator import (
    CPU,
    backends,
    forked_generators,
    generator_state,
    take_device,
)

LAUNCHERS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "CUDA_VISIBLE_DEVICES")


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with two CUDA devices; what they are set to, one after another."""
    taken: list[int] = []
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: taken[-1])
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name in ("gloo", "nccl"))
    monkeypatch.setattr(
        torch, "get_device_module", lambda kind: SimpleNamespace(is_initialized=lambda: False)
    )
    return taken


@pytest.mark.parametrize("launcher", LAUNCHERS[:3])
def test_each_process_of_a_node_takes_a_device_of_its_own(
    devices: list[int], monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    monkeypatch.setenv(launcher, "1")
    assert take_device() == torch.device("cuda", 1)
    assert devices == [1]


def test_more_processes_than_devices_are_refused_unless_each_sees_its_own(
    devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(
        UserError, match="process 4 on its node, which has 2 cuda devices: start one process a device"
    ):
        take_device()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert take_device() == torch.device("cuda", 0)


def test_collectives_are_the_accelerators_own_and_objects_stay_on_the_host(
    devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert backends(take_device()) == "cpu:gloo,cuda:nccl"
    assert backends(CPU) == "gloo"
    config = ["cpu:gloo,cuda:nccl"]
    monkeypatch.setattr(dist, "get_backend_config", lambda: config[0])
    assert accelerator.device_of_group() == torch.device("cuda", 0)
    config[0] = "cpu:gloo,cuda:gloo"  # a group of Gloo alone
    assert accelerator.device_of_group() == CPU


@pytest.mark.parametrize(("chosen", "used"), [(0, 1), (1, 1)])
def test_a_group_of_the_users_finds_the_device_that_was_chosen_or_its_own(
    devices: list[int], monkeypatch: pytest.MonkeyPatch, chosen: int, used: int
) -> None:
    devices.append(chosen)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    assert accelerator.device_of_group() == torch.device("cuda", used)
    assert devices[-1] == used


@pytest.mark.parametrize("kind", ["mps", "nobodys"])
def test_an_accelerator_without_collectives_of_its_own_is_not_used(
    devices: list[int], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    found = type("Found", (), {"type": kind})()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(dist, "get_default_backend_for_device", _backend)
    assert take_device() == CPU
    assert not devices


def _backend(kind: str) -> str:
    if kind == "mps":
        return "gloo"
    raise ValueError(kind)


def test_what_is_drawn_inside_leaves_generators_as_they_were() -> None:
    before = generator_state(CPU)
    with forked_generators(CPU):
        torch.manual_seed(7)
        torch.rand(3)
    assert torch.equal(generator_state(CPU), before)


@pytest.mark.parametrize(
    ("error", "device", "destroyed"),
    [(None, "cuda", True), (ValueError("mine"), "cuda", False), (ValueError("mine"), "cpu", True)],
)
def test_a_process_that_fails_does_not_wait_for_accelerators_of_others(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, device: str, destroyed: bool
) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append(True))
    monkeypatch.setattr(leaving, "device_of_group", lambda: torch.device(device))
    leaving.leave(destroy=True)
    assert bool(ended) == destroyed
