"""This rank's tokens on their way into a layer of experts, which runs on plain tensors, and out of it.

Tokens that are sharded along the sequence (cp) are the rank's own already. Tokens that every rank of tp has are cut
among them where the layer's work is divided by tokens (`cut`), and taken whole where it is divided otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.nn.functional import pad

from autoparallel.runtime.context.values import of_parts, on_mesh, onto, own_part, placed, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShare:
    """Rows `start` to `stop` of the tokens that this rank has along cp, whose leading dims are `leading`.

    `along` is how tokens lie over `sequence`, a mesh whose first axis is cp; None where every rank of cp has all.
    `gradient` is how the gradients lie over `tensors`, the mesh of tp, of what each of its ranks has whole.
    """

    leading: tuple[int, ...]
    start: int
    stop: int
    sequence: DeviceMesh | None
    along: Placement | None
    tensors: DeviceMesh | None
    gradient: Placement

    @property
    def parts(self) -> int:
        """Ranks of cp whose tokens differ."""
        return self.sequence.size(0) if self.sequence is not None and self.along is not None else 1

    def take(self, tensor: Tensor) -> Tensor:
        """This rank's tokens of `tensor`, plain, as a matrix."""
        part = _own(tensor, self.sequence, self.along)
        if self.tensors is not None:
            wanted = [self.gradient] if tensor.is_floating_point() else None
            part = spread(part, self.tensors).to_local(grad_placements=wanted)
        return part.reshape(-1, tensor.shape[-1])[self.start : self.stop]

    def give(self, made: Tensor, like: Tensor, result: Placement) -> Tensor:
        """What the tokens get, for the rest of the model: `made` lies over tp as `result`, once the rows of other
        ranks are zeros in it."""
        after = _count(self.leading) - self.stop
        rows = pad(made, (0, 0, self.start, after)) if self.start or after else made
        found = rows if rows.shape[:-1] == self.leading else rows.view(*self.leading, rows.shape[-1])
        if self.tensors is not None:
            found = DTensor.from_local(found, self.tensors, [result], run_check=False)
            if not isinstance(like, DTensor):
                found = found.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
        if self.sequence is not None and self.along is not None:
            found = of_parts(found, self.along, self.sequence)
        return found


def token_share(hidden: Tensor, tensors: DeviceMesh | None, *, cut: bool, gradient: Placement) -> TokenShare:
    """This rank's share of the tokens `hidden` [..., width]; see `TokenShare`."""
    sequence = hidden.device_mesh if isinstance(hidden, DTensor) and _knows_of_cp(hidden) else None
    along = hidden.placements[0] if isinstance(hidden, DTensor) and sequence is not None else None
    if along is not None and (along.is_replicate() or along.is_partial()):
        along = None
    leading = tuple(_own(hidden.detach(), sequence, along).shape[:-1])
    tokens, (rank, ranks) = _count(leading), (0, 1)
    if tensors is not None and cut:
        rank, ranks = tensors.get_local_rank(), tensors.size()
    step = -(-tokens // ranks)
    start = min(rank * step, tokens)
    return TokenShare(
        leading=leading, start=start, stop=min(start + step, tokens), sequence=sequence, along=along,
        tensors=tensors, gradient=gradient,
    )  # fmt: skip


def _knows_of_cp(tensor: DTensor) -> bool:
    return (tensor.device_mesh.mesh_dim_names or ("",))[0] == "cp"


def _own(tensor: Tensor, sequence: DeviceMesh | None, along: Placement | None) -> Tensor:
    """What this rank of cp has of a tensor that lies along the tokens: plain, or on tp."""
    if sequence is None:
        return tensor
    if along is None:
        return whole(tensor, sequence) if on_mesh(tensor, sequence) else tensor
    return own_part(placed(onto(tensor, sequence), along), along)


def _count(leading: tuple[int, ...]) -> int:
    count = 1
    for size in leading:
        count *= size
    return count


def spread(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """The tensor as a DTensor that every rank of `mesh` has whole."""
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=[Replicate()])
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
