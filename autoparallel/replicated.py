"""`ReplicaTrainer`: a `Trainer` whose replicas are jobs of their own, which may drop out of a run and come back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoparallel.errors import UserError
from autoparallel.plan_cache import StrategySource
from autoparallel.profiles import Cluster
from autoparallel.replan import of_one_replica
from autoparallel.runtime.checkpoints.nests import leaves_of, put_back, states_of
from autoparallel.runtime.elastic.draws import seed_step
from autoparallel.runtime.elastic.replicas import LIGHTHOUSE, Replicas, Standing, named_here
from autoparallel.runtime.guards.guards import Verdict
from autoparallel.runtime.tensor.questions import local
from autoparallel.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """`count` replicas make up the run, this one is called `name` (by default as `autoparallel run --replica` says); those that
    are there meet at `lighthouse` (HTTP address; by default as `--lighthouse` says)."""

    count: int
    lighthouse: str = ""
    name: str = ""


class ReplicaTrainer(Trainer):
    """Trains as `Trainer` does, on the processes of one replica of `replicas.count`.

    `strategy` is that of the whole run: `mesh.dp_replicate` is a multiple of the count, and each replica has its share of it and
    of the global batch. A step sums the gradients of all that are there. While replicas are away the others do their shares of the
    batch too, one after the other: the global batch, the order of samples and the losses stay. A replica that comes back takes
    over the state of the others. Each keeps checkpoints of its own, in `folder`/its name.

    Raises UserError for what `Trainer` refuses, without torchft, and where the lighthouse is not reached.
    """

    def __init__(
        self, model: torch.nn.Module, *, replicas: ReplicaOptions, folder: str | os.PathLike[str] = "run", **options: Any
    ) -> None:  # fmt: skip
        self._count, name = replicas.count, replicas.name or named_here()
        lighthouse = replicas.lighthouse or os.environ.get(LIGHTHOUSE, "")
        if not lighthouse:
            raise UserError(
                "ReplicaTrainer needs the address of a lighthouse: ReplicaOptions(lighthouse=…) or `autoparallel run "
                "--lighthouse http://HOST:PORT`"
            )
        super().__init__(model, folder=Path(folder) / name, **options)
        self._replicas = Replicas(
            self._all, lighthouse=lighthouse, name=name, state=self._handed_on, load=self._taken_over
        )
        self._replicas.at_step(self.step)

    def _for_those_here(
        self, source: StrategySource, cluster: Cluster | str | None, size: int, *, pinned: bool
    ) -> tuple[StrategySource, Cluster | None, int]:
        if size % self._count:
            raise UserError(
                f"a global batch of {size} samples has no {self._count} equal shares for replicas: change one"
            )
        own = of_one_replica(source, self._count)
        return super()._for_those_here(own, cluster, size // self._count, pinned=pinned)

    def _until_rolled_back(self, steps: int) -> None:
        readers: dict[int, Iterator[tuple[Any, list[int]]]] = {}
        stood: Standing | None = None
        while self.step < steps:
            begun = time.perf_counter()
            self._status.begin(self.step + 1)
            self._monitor.begin(self.step + 1)
            self._at("REPLICAS", self._stage)
            now = self._replicas.begin()
            if now.healed or stood is None or (now.place, now.number) != (stood.place, stood.number):
                readers, stood = {}, now
                self._say(f"step {self.step + 1}: {now.number} of {self._count} replicas are here")
            if now.place >= self._count:
                raise UserError(
                    f"{now.number} replicas are here, and the run has {self._count}: start no more than these"
                )
            loss, own, ids = self._pass(now, readers)
            if not self._replicas.commit():
                self._say(f"step {self.step + 1} is done again: a replica has gone")
                self._guards.end(time.perf_counter() - begun)
                readers, stood = {}, None
                continue
            verdict = self._optimize(loss, own, ids)
            if verdict is Verdict.ROLL_BACK:
                self._roll_back(leave_out=loss != loss)
                self._replicas.at_step(self.step)
                return
            self._after_step(loss, ids, begun, skipped=verdict is Verdict.SKIP)
            if not self._keep(last=self.step >= steps):  # which may lie beyond, as others had gone on
                self._replicas.at_step(self.step)
                return

    def _pass(
        self, standing: Standing, readers: dict[int, Iterator[tuple[Any, list[int]]]]
    ) -> tuple[float, list[Tensor], list[int]]:
        """Forward and backward of this replica's shares, and the sum over the replicas: the mean loss over the global batch,
        the losses of this rank's micro-batches, and its samples."""
        ranks, rank = self.model.data_parallel_size, self.model.data_parallel_rank
        self.optimizer.zero_grad()
        own, ids, loss = list[Tensor](), list[int](), torch.zeros(1, dtype=torch.float64)
        for share in range(standing.place, self._count, standing.number):
            self._at("DATA", self._stage)
            place = share * ranks + rank
            if share not in readers:
                readers[share] = self._samples.shares(place, self._count * ranks)
            items, named = next(readers[share])
            ids += named
            self._guards.begin(self.step + 1, items)
            seed_step(self._seed, self.step, place, self._stage)
            loss += float(self._forward_and_backward(items, own)) / self._count
        self._at("REDUCE_GRAD", self._stage)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        for gradient in gradients:
            local(gradient).div_(self._count)
        self._replicas.sum([*gradients, loss])
        return float(loss), own, ids

    def _handed_on(self) -> dict[str, Any]:
        """What another replica's rank of this number needs to go on."""
        tensors, values = leaves_of(states_of(self._state()))
        shares = {name: local(tensor.detach()).cpu().clone() for name, tensor in tensors.items()}
        return {"tensors": shares, "values": values, "step": self.step, "ledger": self._samples.state()}

    @torch.no_grad()
    def _taken_over(self, found: dict[str, Any]) -> None:
        """Inverse of `_handed_on`."""
        states = states_of(self._state())
        tensors, _ = leaves_of(states)
        for name, tensor in tensors.items():
            local(tensor).copy_(found["tensors"][name])
        put_back(self._state(), states, {**tensors, **found["values"]})
        self.step = found["step"]
        self._samples.go_on(found["ledger"], "the other replicas")
        self._say(f"going on after step {self.step} with the state of the other replicas")

    def close(self) -> None:
        """Drop out of the run, and let the folder go."""
        super().close()
        self._replicas.close()
