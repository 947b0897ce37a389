"""Where torch sends: its process groups' methods, and the operators by which DTensor reaches them past Python.

A hook around each says what is sent and when it is there. Seen on Gloo: a future tells when a collective has ended, whoever waits for
it; messages between two ranks have none, nor have reduce-scatters, and end when somebody waits for them; what DTensor's operators begin ends when their result
is waited for. On one idle core a hook takes 5 to 20 microseconds (torch 2.13).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

# By method of a process group: the kind of collective, and which argument has the whole tensor.
_METHODS: Mapping[str, tuple[str, int]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "allgather": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "all_gather_single_coalesced": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "broadcast": ("broadcast", 0),
    "send": ("send", 0),
}
# By operator: the kind, and whether the whole tensor is the result (else the first argument).
_OPERATORS: Mapping[str, tuple[str, bool]] = {
    "all_reduce": ("all_reduce", False),
    "all_reduce_": ("all_reduce", False),
    "all_gather_into_tensor": ("all_gather", True),
    "reduce_scatter_tensor": ("reduce_scatter", False),
    "all_to_all_single": ("all_to_all", False),
    "broadcast": ("broadcast", False),
    "broadcast_": ("broadcast", False),
}
# What has been there before is waited for in less. Kind: choice, ten times what such a wait takes.
_NO_TIME_S = 1e-4
_NAMESPACE = "_c10d_functional"
# The key that every call passes, whatever its tensors are and whether gradients are wanted, and those after it.
_KEY = "BackendSelect"


class Sent:
    """A collective of this rank: its kind, bytes of the whole tensor, and when it began and ended by `time.perf_counter`, seconds;
    `ended_s` is None where nobody knows. `told`: another thread says so, as soon as it gets to."""

    __slots__ = ("begun_s", "ended_s", "group", "op", "size_bytes", "told")

    def __init__(self, op: str, size_bytes: int, group: Any, begun_s: float) -> None:
        self.op, self.size_bytes, self.group, self.begun_s = op, size_bytes, group, begun_s
        self.ended_s: float | None = None
        self.told = False

    def end(self, _: object = None) -> None:
        """It is there now, if it has not been before."""
        if self.ended_s is None:
            self.ended_s = time.perf_counter()

    def waited(self, since_s: float) -> None:
        """Somebody has waited for it since then: until it was there, or where that took no time, for what had been there before."""
        now_s = time.perf_counter()
        if self.told:  # else it would have been told by now
            self.end()
        elif now_s - since_s >= min(_NO_TIME_S, 0.2 * (now_s - self.begun_s)):
            self.ended_s = now_s

    def group_now(self) -> dist.ProcessGroup:
        """Who takes part: DTensor's operators are told a group's name."""
        group: Any = self.group
        if isinstance(group, str):
            group = _resolve_process_group(cast("Any", group))
        elif not isinstance(group, dist.ProcessGroup):
            group = dist.ProcessGroup.unbox(group)
        found: dist.ProcessGroup = group
        return found


class Ear:
    """Who is told of what this process sends: `hear`, None for nobody. Threads send too (checkpoints are saved in one), while another
    one changes `hear`: it is read once for each collective."""

    def __init__(self) -> None:
        self.hear: Callable[[Sent], None] | None = None
        self.waited: dict[int, Sent] = {}  # by what is waited for: a Work of a message, or a result's memory

    def forget(self) -> None:
        """Nobody will wait for what nobody has waited for."""
        self.waited.clear()


@contextmanager
def hooked(ear: Ear) -> Iterator[None]:
    """Inside, `ear` hears of what torch sends."""
    before = {name: vars(dist.ProcessGroup).get(name) for name in _METHODS}
    wait = dist.Work.wait
    library = torch.library.Library(_NAMESPACE, "IMPL")
    try:
        for name, inner in before.items():
            if inner is not None:
                setattr(dist.ProcessGroup, name, _method(ear, inner, *_METHODS[name]))
        setattr(dist.Work, "wait", _wait(ear, wait))  # noqa: B010
        for name, (op, whole) in _OPERATORS.items():
            operator = getattr(getattr(torch.ops, _NAMESPACE), name, None)
            if operator is not None:
                library.impl(name, _operator(ear, operator.default, op, whole), _KEY, with_keyset=True)
        waits = getattr(torch.ops, _NAMESPACE).wait_tensor.default
        library.impl("wait_tensor", _waited(ear, waits), _KEY, with_keyset=True)
        yield
    finally:
        library._destroy()
        setattr(dist.Work, "wait", wait)  # noqa: B010
        for name, inner in before.items():
            if inner is not None:
                setattr(dist.ProcessGroup, name, inner)


def _bytes(given: Any) -> int:
    return given.nbytes if isinstance(given, Tensor) else sum(map(_bytes, given))


def _on_host(given: Any) -> bool:
    """Whether the host's clock says when it is there: an accelerator's collectives have only been asked for."""
    return given.is_cpu if isinstance(given, Tensor) else all(map(_on_host, given))


def _method(ear: Ear, inner: Callable[..., Any], op: str, at: int) -> Callable[..., Any]:
    def method(group: Any, *args: Any, **kwargs: Any) -> Any:
        hear = ear.hear
        if hear is None or len(args) <= at:
            return inner(group, *args, **kwargs)
        sent = Sent(op, _bytes(args[at]), group, time.perf_counter())
        work = inner(group, *args, **kwargs)
        hear(sent)
        if not _on_host(args[at]):
            return work
        sent.told = op != "send" and _tells(work, sent)
        ear.waited[id(work)] = sent
        return work

    return method


def _tells(work: Any, sent: Sent) -> bool:
    """Have a future tell when it is there; False where there is none."""
    try:
        work.get_future().add_done_callback(sent.end)
    except RuntimeError:
        return False
    return True


def _wait(ear: Ear, inner: Callable[..., Any]) -> Callable[..., Any]:
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        since_s = time.perf_counter()
        done = inner(work, *args, **kwargs)
        if ear.waited and (sent := ear.waited.pop(id(work), None)) is not None:
            sent.waited(since_s)
        return done

    return wait


def _operator(ear: Ear, inner: Any, op: str, whole: bool) -> Callable[..., Any]:
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def operator(keys: Any, tensor: Tensor, *args: Any) -> Any:
        hear = ear.hear
        if hear is None:
            return inner.redispatch(keys & after, tensor, *args)
        begun_s = time.perf_counter()
        made = inner.redispatch(keys & after, tensor, *args)
        sent = Sent(op, (made if whole else tensor).nbytes, args[-1], begun_s)
        hear(sent)
        if _on_host(tensor):
            ear.waited[-made.data_ptr()] = sent  # below the numbers of objects
        return made

    return operator


def _waited(ear: Ear, inner: Any) -> Callable[..., Any]:
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def waited(keys: Any, tensor: Tensor) -> Any:
        since_s = time.perf_counter()
        done = inner.redispatch(keys & after, tensor)
        if ear.waited and (sent := ear.waited.pop(-tensor.data_ptr(), None)) is not None:
            sent.waited(since_s)
        return done

    return waited
