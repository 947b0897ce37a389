"""Buffers that a recomputed block writes into: running statistics, codebooks, the vectors of spectral norm.

A second run must neither write into them once more nor start from what the first one, or another micro-batch, left there.
So each call keeps copies of those that a run is known to write, made before it, and its second run has copies of these in
their place. What a norm counts (`track_running_stats`) a run in training does not read: there the second run has copies
of what there is, and nothing is kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoparallel.runtime.tensor.questions import copied_buffers

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
Place = tuple[nn.Module, str]


class MadeAnew(AbstractContextManager[None]):
    """A context that can be entered again: each half of a split backward pass runs the block."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make, self._open = make, list[AbstractContextManager[None]]()

    def __enter__(self) -> None:
        self._open.append(self._make())
        self._open[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)


class WrittenBuffers:
    """Which buffers a block's forward writes into, as its runs show."""

    def __init__(self, path: str, block: nn.Module) -> None:
        self._path = path
        self._norms = [m for m in block.modules() if hasattr(m, "track_running_stats")]
        norms = set(self._norms)
        self._others = [m for m in block.modules() if m not in norms and m._buffers]
        self._written: set[Place] | None = None  # until a run has shown it: all

    def contexts(self, inner: Contexts | None) -> Contexts:
        """Those of a checkpoint's two runs, around those of `inner`."""
        return partial(self._of_one_call, inner)

    def _of_one_call(
        self, inner: Contexts | None
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = (nullcontext(), nullcontext()) if inner is None else inner()
        kept: dict[Place, Tensor] = {}
        return self._watched(kept, first), MadeAnew(partial(self._as_before, kept, again))

    def _buffers(self) -> dict[Place, Tensor]:
        return {(m, name): b for m in self._others for name, b in m._buffers.items() if b is not None}

    @contextmanager
    def _watched(self, kept: dict[Place, Tensor], context: AbstractContextManager[Any]) -> Iterator[None]:
        """The first run, with what it writes into `kept` as it was before."""
        before = self._buffers()
        versions = {place: b._version for place, b in before.items()}
        wanted = before if self._written is None else self._written
        with torch.no_grad():
            kept.update({place: before[place].clone() for place in wanted if place in before})
        with context:
            yield
        now = self._buffers()
        written = {p for p, b in before.items() if now.get(p) is not b or b._version != versions[p]}
        for place in kept.keys() - written:
            del kept[place]
        if late := written - kept.keys():
            names = ", ".join(sorted(name for _, name in late))
            warnings.warn(
                f"{self._path} has begun to write into its buffers {names}: of this one micro-batch the second run, in the "
                'backward pass, starts from what the first has left there; recompute.mode = "none" has no second run',
                stacklevel=2,
            )
        self._written = written | (self._written or set())

    @contextmanager
    def _as_before(self, kept: dict[Place, Tensor], context: AbstractContextManager[Any]) -> Iterator[None]:
        """The second run, on copies."""
        now = self._buffers()
        with copied_buffers(self._norms):
            try:
                with torch.no_grad():
                    for (module, name), value in kept.items():
                        module._buffers[name] = value.clone()
                with context:
                    yield
            finally:
                for place in kept:
                    place[0]._buffers[place[1]] = now[place]
