"""Replicas of a run that may drop out and come back: each is a job of its own, and torchft joins them.

Every step begins with who is there (torchft's lighthouse counts heartbeats), and whoever comes back is given the state of those
who went on. Gradients are summed over the replicas that are there; where one goes in the middle of it the sum is thrown away, on
all, and the step is done again by those that are left. A rank is joined with the ranks of the same number in the other replicas, so that
nothing but their shares is sent.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from autoparallel.errors import UserError
from autoparallel.runtime.ranks.accelerator import backend_of_ranks
from autoparallel.runtime.ranks.agreement import Agreement
from autoparallel.runtime.tensor.questions import local

LIGHTHOUSE, NAME = "TORCHFT_LIGHTHOUSE", "AUTOPARALLEL_REPLICA"  # of the environment
BUCKET_BYTES = 32 * 2**20  # of gradients that are summed at once. Kind: choice
TIMEOUT_S, QUORUM_S = 60.0, 120.0  # for a sum, and for all others to come to the next step. Kind: choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """This replica among those that are there: its place, and how many there are."""

    place: int
    number: int
    healed: bool = False  # its state is that of the others, just now


class Replicas:
    """This replica's part. `state` gives what another one needs to go on, `load` takes it: tensors and what pickles.

    Collective over the ranks of the replica. Raises UserError where torchft is not installed, or no launcher started the ranks.
    """

    def __init__(
        self, everyone: Agreement, *, lighthouse: str, name: str, state: Callable[[], Any], load: Callable[[Any], None]
    ) -> None:  # fmt: skip
        if "MASTER_ADDR" not in os.environ:
            raise UserError(
                "replicas that drop out are started by `autoparallel run --replica NAME --lighthouse ADDRESS` or by torchrun, "
                "which say where the ranks of one meet (MASTER_ADDR)"
            )
        os.environ.setdefault("RUST_LOG", "warn")  # else torchft says every step what it does
        try:
            from torchft.manager import Manager
        except ImportError:
            raise UserError(
                'replicas that drop out need torchft: pip install "autoparallel-planner[replicas]"'
            ) from None
        logging.getLogger("torchft").setLevel(logging.CRITICAL)
        self._all, self._lighthouse, self._loaded = everyone, lighthouse, False
        group = _group_of(backend_of_ranks())(timeout=timedelta(seconds=TIMEOUT_S))

        def taken(found: Any) -> None:
            load(found)
            self._loaded = True

        def make() -> None:
            try:
                self._manager = Manager(
                    pg=group, load_state_dict=taken, state_dict=state, min_replica_size=1, use_async_quorum=False,
                    timeout=timedelta(seconds=TIMEOUT_S), quorum_timeout=timedelta(seconds=QUORUM_S),
                    rank=everyone.rank, world_size=everyone.ranks, lighthouse_addr=lighthouse, replica_id=name,
                )  # fmt: skip
            except Exception as error:
                raise UserError(
                    f"replica {name!r} does not reach the lighthouse at {lighthouse} ({error}): start it with "
                    "`torchft_lighthouse --min_replicas 1`, and give its address"
                ) from None

        # The first rank tells the others where it is.
        everyone.alike(make if everyone.rank == 0 else None)
        everyone.alike(make if everyone.rank else None)

    def at_step(self, step: int) -> None:
        """This replica has done so many steps: whoever has done most is whom others take the state of."""
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    def begin(self) -> Standing:
        """A step begins: wait for who is there, and take over their state where this replica's is older. Whoever was given it
        takes part in this very step. Raises UserError where nobody says who is there."""
        self._loaded = False
        try:
            self._manager.start_quorum()
        except Exception as error:
            raise UserError(
                f"who else is here was not learnt in {QUORUM_S:.0f} s ({error}): the lighthouse at {self._lighthouse} or a rank of "
                "this replica has gone; this replica goes on from its checkpoint, or from the others, when it is started again"
            ) from error
        place = self._manager.participating_rank()
        assert place is not None, "nobody is spare"
        return Standing(place=place, number=self._manager.num_participants(), healed=self._loaded)

    @torch.no_grad()
    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Sum each tensor, in place, over the replicas; `commit` says whether that came to an end."""
        from torch.distributed import ReduceOp

        for bucket in _buckets([local(tensor) for tensor in tensors]):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            self._manager.allreduce(flat, reduce_op=ReduceOp.SUM).wait()
            for tensor, summed in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(summed.view_as(tensor))

    def commit(self) -> bool:
        """Whether all sums of the step are whole, on all ranks of this replica: else it is done again."""
        return bool(self._manager.should_commit())

    def close(self) -> None:
        """Drop out."""
        self._manager.shutdown(wait=False)


def _group_of(backend: str) -> Any:
    """torchft's process group of a backend of torch's."""
    from torchft import process_group

    name = {"gloo": "Gloo"}.get(backend, backend.upper())
    found = getattr(process_group, f"ProcessGroup{name}", None)
    if found is None:
        raise UserError(
            f"torchft joins no replicas over {backend}: start a Gloo process group yourself, or leave replicas in one job"
        )
    return found


def _buckets(tensors: list[Tensor]) -> Iterable[list[Tensor]]:
    """Tensors of one dtype, in their order, as many at once as a bucket holds."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket, size = list[Tensor](), 0
        for tensor in (one for one in tensors if one.dtype == dtype):
            if bucket and size + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def named_here() -> str:
    """The replica's name, by the environment, or that of this process."""
    return os.environ.get(NAME, "") or f"replica-{os.getpid()}"
