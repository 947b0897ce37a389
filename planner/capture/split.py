"""Cuts a trace into the links of the chain: calls of repeated modules, and the glue between them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import nn

from autoparallel.planner.capture.fold import FoldError
from autoparallel.planner.capture.records import Trace


@dataclass(slots=True)
class Link:
    """A run of calls: one call of a repeated module, or glue (path "")."""

    path: str
    frame: int  # the frame of the repeated module's call, -1 for glue
    calls: list[int] = field(default_factory=list)
    model: str = ""  # path of the module whose block this one's is, where it was stood in for

    @property
    def repeated(self) -> bool:
        return self.frame >= 0


def repeated_paths(module: nn.Module) -> tuple[str, ...]:
    """Paths of the outermost repeated modules: children with parameters of a `ModuleList`, and those of a
    `Sequential` whose class occurs there more than once. In order of registration.

    A container is looked into first; it counts itself where nothing in it is repeated.
    """
    return tuple(_repeated(module, ""))


def _repeated(parent: nn.Module, path: str) -> list[str]:
    found: list[str] = []
    for name, child in parent.named_children():
        child_path = f"{path}.{name}" if path else name
        container = isinstance(child, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        inside = _repeated(child, child_path) if container or not _is_repeated(parent, child) else []
        found += inside or ([child_path] if _is_repeated(parent, child) else [])
    return found


def _is_repeated(parent: nn.Module, child: nn.Module) -> bool:
    if next(child.parameters(), None) is None:
        return False
    if isinstance(parent, nn.ModuleList):
        return not isinstance(child, nn.ModuleList | nn.ModuleDict)
    classes = Counter(type(c) for c in parent.children())
    return isinstance(parent, nn.Sequential) and classes[type(child)] > 1


def split(trace: Trace, paths: tuple[str, ...]) -> list[Link]:
    """The links of the chain, in execution order. Raises FoldError where a module was stood in for in the glue."""
    known = set(paths)
    owner: list[int] = []  # frame -> the frame of the repeated module it stands in, -1 outside
    for index, frame in enumerate(trace.frames):
        inside = owner[frame.parent] if frame.parent >= 0 else -1
        owner.append(index if inside < 0 and frame.path in known else inside)
    links: list[Link] = []
    for index, call in enumerate(trace.calls):
        frame_index = owner[call.frame]
        if index in trace.stand_ins and frame_index < 0:  # its `forward` is called, not the module
            raise FoldError(f"what {trace.stand_ins[index]} stands for is called past the module")
        if not links or links[-1].frame != frame_index:
            path = trace.frames[frame_index].path if frame_index >= 0 else ""
            links.append(Link(path=path, frame=frame_index))
        links[-1].calls.append(index)
        links[-1].model = trace.stand_ins.get(index, "")
    return _hoist(trace, links)


def _hoist(trace: Trace, links: list[Link]) -> list[Link]:
    """Moves glue between repeated links that does not depend on them (choosing a mask, drawing a random number)
    into the glue before the first of them, so that the chain shows what really stands between the blocks."""
    first = next((i for i, link in enumerate(links) if link.repeated), None)
    last = next((i for i in reversed(range(len(links))) if links[i].repeated), None)
    if first is None or last is None or first == 0:
        return links
    home = links[0]
    movable = set(home.calls)
    for link in links[first + 1 : last]:
        if link.repeated:
            continue
        for index in list(link.calls):
            makers = {trace.values[v].call for v in trace.calls[index].inputs} - {-1}
            if makers <= movable and not trace.calls[index].saved and not trace.calls[index].backward:
                link.calls.remove(index)
                home.calls.append(index)
                movable.add(index)
    return [link for link in links if link.calls]
