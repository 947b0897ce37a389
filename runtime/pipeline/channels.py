"""Point-to-point messages between pipeline ranks: a channel for each ordered pair of ranks.

Receives of a channel are posted in the order in which its sender's program sends, so that backends without
tags (NCCL) match them; the two directions use different process groups, so that neither waits for the other. What
travels is bytes, whatever the dtype. The first activations over an edge are preceded by a description of them (shapes,
layout, whether they want gradients); gradients go back in the same layout and need none.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from autoparallel.costmodel.program import Action, ActionKind
from autoparallel.runtime.tensor.questions import as_bytes, local

SENDS = (ActionKind.SEND_F, ActionKind.SEND_B)


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A tensor as it travels: this rank's part of it, and the layout over the axes that activations are cut along."""

    shape: tuple[int, ...]  # of the part that travels
    dtype: torch.dtype
    wants_gradient: bool
    whole: tuple[int, ...] | None = None  # shape of the whole, of a DTensor
    placements: tuple[Placement, ...] = ()


def describe(tensor: Tensor) -> Described:
    """How `tensor` travels."""
    part = local(tensor)
    sharded = isinstance(tensor, DTensor)
    return Described(
        shape=tuple(part.shape),
        dtype=part.dtype,
        wants_gradient=tensor.requires_grad,
        whole=tuple(tensor.shape) if sharded else None,
        placements=tuple(tensor.placements) if isinstance(tensor, DTensor) else (),
    )


def rebuild(part: Tensor, described: Described, mesh: DeviceMesh | None) -> Tensor:
    """The tensor of which `part` travelled, on this rank's `mesh` of activations, or on its last axis alone."""
    if described.whole is None:
        return part
    assert mesh is not None, "a DTensor arrived on a rank without a mesh for it"
    if len(described.placements) < mesh.ndim:
        assert mesh.mesh_dim_names is not None
        mesh = mesh[mesh.mesh_dim_names[-1]]
    shape = torch.Size(described.whole)
    stride = torch.empty(shape, device="meta").stride()  # parts travel contiguous
    return DTensor.from_local(part, mesh, described.placements, run_check=False, shape=shape, stride=stride)


def gradient_part(gradient: Tensor | None, value: Tensor) -> Tensor:
    """The part of `gradient` that travels back for `value`: laid out like it, zero where there is none."""
    if gradient is None:
        return torch.zeros_like(local(value))
    if isinstance(value, DTensor):
        assert isinstance(gradient, DTensor), "the gradient of a DTensor is one"
        gradient = gradient.redistribute(placements=value.placements)
    return local(gradient).to(value.dtype)


@dataclass(slots=True, kw_only=True)
class _Arriving:
    works: list[dist.Work]
    parts: list[Tensor]
    described: tuple[Described, ...]


@dataclass(slots=True, kw_only=True)
class _Channel:
    """One direction between two ranks: the order of its messages within a step, and how far they are."""

    peer: int  # global rank
    group: dist.ProcessGroup
    order: list[Action]  # the sender's actions
    posted: int = 0
    arriving: dict[Action, _Arriving] = field(default_factory=dict)


class Channels:
    """All messages of one rank. `rows` are the actions of every pipeline rank, `home` the rank of each stage."""

    def __init__(
        self,
        rows: Sequence[Sequence[Action]],
        home: Mapping[int, int],
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        device: torch.device,
    ) -> None:
        """`groups` both hold the ranks of the pipeline: one for messages to higher, one to lower ranks."""
        self._home, self._device = home, device
        self._me = dist.get_rank(groups[0])
        orders: dict[tuple[int, int], list[Action]] = {}
        for source, row in enumerate(rows):
            for action in row:
                if action.kind in SENDS:
                    orders.setdefault((source, home[receiver(action)]), []).append(action)
        self._out: dict[int, _Channel] = {}
        self._in: dict[int, _Channel] = {}
        for (source, target), order in sorted(orders.items()):
            if self._me in (source, target):
                peer = target if source == self._me else source
                group = groups[0] if source < target else groups[1]
                channel = _Channel(peer=dist.get_global_rank(group, peer), group=group, order=order)
                (self._out if source == self._me else self._in)[peer] = channel
            self._open(source, target)
        self._sent: list[tuple[dist.Work, Tensor]] = []
        # Descriptions already exchanged, by receiving stage and shape of the step.
        self._known: dict[tuple[int, Hashable], tuple[Described, ...]] = {}
        self._step: Hashable = None

    def _open(self, source: int, target: int) -> None:
        """Let the first message between two ranks pass. Backends may connect them only then (NCCL), and hold either
        until the other is there: here all ranks come to their channels in one order."""
        token = torch.zeros(1, dtype=torch.uint8, device=self._device)
        if self._me == source:
            channel = self._out[target]
            dist.send(token, channel.peer, group=channel.group)
        elif self._me == target:
            channel = self._in[source]
            dist.recv(token, channel.peer, group=channel.group)

    def begin(self, step: Hashable) -> None:
        """Start a step; `step` tells steps whose activations have other shapes apart."""
        self._step = step
        for channel in self._in.values():
            assert not channel.arriving, "a message of the last step was never read"
            channel.posted = 0

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Send activations (SEND_F, any tensors) or gradients (SEND_B, parts) to the stage they are for."""
        stage = receiver(action)
        channel = self._out[self._home[stage]]
        if action.kind is ActionKind.SEND_F and (stage, self._step) not in self._known:
            described = tuple(describe(t) for t in tensors)
            self._known[stage, self._step] = described
            text = torch.frombuffer(bytearray(pickle.dumps(described)), dtype=torch.uint8)
            self._isend(torch.tensor([text.numel()], device=self._device), channel)
            self._isend(text, channel)
        for tensor in tensors:
            self._isend(local(tensor), channel)

    def _isend(self, tensor: Tensor, channel: _Channel) -> None:
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        tensor = tensor.to(self._device).contiguous()
        work = dist.isend(as_bytes(tensor), channel.peer, group=channel.group)
        assert work is not None
        self._sent.append((work, tensor))  # keeps the memory until it has left

    def post(self, action: Action) -> None:
        """Post the receive of `action` (RECV_F, RECV_B), after all that its sender sends before."""
        sent = _sent_as(action)
        channel = self._in[self._home[sent.stage]]
        while sent not in channel.arriving and channel.posted < len(channel.order):
            upcoming = channel.order[channel.posted]
            channel.posted += 1
            channel.arriving[upcoming] = self._post(upcoming, channel)

    def _post(self, sent: Action, channel: _Channel) -> _Arriving:
        stage = receiver(sent)
        if sent.kind is ActionKind.SEND_F:
            key = (stage, self._step)
            if key not in self._known:
                self._known[key] = self._receive_description(channel)
            described = self._known[key]
        else:
            # What this stage sent forward comes back: only gradients, in the layout of the activations.
            described = tuple(d for d in self._known[sent.stage, self._step] if d.wants_gradient)
        parts = [torch.empty(d.shape, dtype=d.dtype, device=self._device) for d in described]
        works = [dist.irecv(as_bytes(part), channel.peer, group=channel.group) for part in parts]
        assert all(work is not None for work in works)
        return _Arriving(works=[w for w in works if w is not None], parts=parts, described=described)

    def _receive_description(self, channel: _Channel) -> tuple[Described, ...]:
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        dist.recv(as_bytes(size), channel.peer, group=channel.group)
        text = torch.empty(int(size.item()), dtype=torch.uint8, device=self._device)
        dist.recv(text, channel.peer, group=channel.group)
        described: tuple[Described, ...] = pickle.loads(bytes(text.cpu().numpy()))
        return described

    def take(self, action: Action) -> tuple[list[Tensor], tuple[Described, ...]]:
        """Wait for what `action` (RECV_F, RECV_B) receives: the parts, and their descriptions."""
        self.post(action)
        sent = _sent_as(action)
        arriving = self._in[self._home[sent.stage]].arriving.pop(sent)
        for work in arriving.works:
            work.wait()
        return arriving.parts, arriving.described

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


def receiver(action: Action) -> int:
    """The stage that a send is for."""
    return action.stage + (1 if action.kind is ActionKind.SEND_F else -1)


def _sent_as(action: Action) -> Action:
    """The send that a receive is the other end of."""
    if action.kind is ActionKind.RECV_F:
        return Action(action.stage - 1, ActionKind.SEND_F, action.micro)
    assert action.kind is ActionKind.RECV_B
    return Action(action.stage + 1, ActionKind.SEND_B, action.micro)
