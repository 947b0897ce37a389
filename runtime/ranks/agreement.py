"""What ranks tell each other in small objects: decisions of one, and errors of any raised on all."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autoparallel.errors import UserError

T = TypeVar("T")


class FailedElsewhere(UserError):
    """Another rank raised what is no UserError: the message says which rank, and what."""

    passes = True


AGREEMENT = "agreement"  # what torch is told of these groups: they carry nothing of the model's


class Agreement:
    """All ranks over a group of their own on the host, with its own time-out; alone, nothing is sent.

    Collective: all ranks make it and call it alike.
    """

    def __init__(self, timeout_s: float) -> None:
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        limit = timedelta(seconds=timeout_s)
        alone = self.ranks == 1
        self.group = None if alone else dist.new_group(backend="gloo", timeout=limit, group_desc=AGREEMENT)

    def gathered(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value, group=self.group)
        return found

    def from_first(self, value: T) -> T:
        """Rank 0's value."""
        if self.group is None:
            return value
        found = [value]
        dist.broadcast_object_list(found, src=0, group=self.group)
        return found[0]

    def decided(self, decide: Callable[[], T]) -> T:
        """What `decide()` says on rank 0, or the UserError that it raises there, on every rank; of another error the others get a
        `FailedElsewhere`."""
        answer: Any = None
        own: Exception | None = None
        if self.rank == 0:
            try:
                answer = decide()
            except Exception as error:
                own, answer = error, self._told(error)
        answer = self.from_first(answer)
        if own is not None:
            raise own
        if isinstance(answer, UserError):
            raise answer
        return answer  # type: ignore[no-any-return]

    def alike(self, act: Callable[[], Any] | None) -> None:
        """`act()` on every rank; the first UserError is raised on all. A rank that meets another error raises that, and the others a
        `FailedElsewhere`: whatever it is, nobody waits for a rank that has left."""
        own: Exception | None = None
        try:
            if act is not None:
                act()
        except Exception as error:
            own = error
        every = self.gathered(None if own is None else self._told(own))
        if own is not None and not isinstance(own, UserError):
            raise own
        for found in every:
            if found is not None:
                raise found

    def _told(self, error: Exception) -> UserError:
        """What others are told of an error of this rank."""
        if isinstance(error, UserError):
            return error
        return FailedElsewhere(f"rank {self.rank} failed: {type(error).__name__}: {error}")

    def most(self, *numbers: float) -> list[float]:
        """The largest of all ranks, number by number: one small message."""
        if self.group is None:
            return list(numbers)
        found = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found.tolist()
