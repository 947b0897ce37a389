"""Cuts a step into the links of the chain: calls of repeated modules, and the glue between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx, nn

from autoparallel.planner.capture.fold import FoldError
from autoparallel.planner.capture.nodes import Frame, Role, calls, is_held, maker, tensor_inputs
from autoparallel.planner.capture.structure import is_list


@dataclass(slots=True, eq=False)
class Link:
    """A run of calls: one call of a repeated module, or glue (path "")."""

    path: str
    frame: Frame | None  # the repeated module's call, None for glue
    model: str = ""  # path of the module whose block this one's is, where it was stood in for
    same: Link | None = None  # the first link of the same structure, where that is another one

    @property
    def repeated(self) -> bool:
        return self.frame is not None

    @property
    def first(self) -> bool:
        """Whether it is the first link of its structure, and ran: the others' block is its own."""
        return not self.model and self.same is None


def repeated_paths(module: nn.Module) -> tuple[str, ...]:
    """Paths of the outermost repeated modules: children with parameters of a `ModuleList` (or of a `ModuleDict` whose keys are numbers), and those of a
    `Sequential` whose class occurs there more than once. In order of registration.

    A container is looked into first; it counts itself where nothing in it is repeated, or where it is (a `Sequential` of layers in a
    list of such) and no two modules in it are alike. What has no `forward` (a
    `ModuleDict`, a bare `Module` that only holds others) is never called: in a list, what it holds counts.
    """
    return tuple(_repeated(module, "", holds=False))


def _repeated(parent: nn.Module, path: str, *, holds: bool) -> list[str]:
    """The repeated modules below `parent`; where it `holds`, it is an entry of a list that is never called."""
    found: list[str] = []
    for name, child in parent.named_children():
        child_path = f"{path}.{name}" if path else name
        counts = _is_repeated(parent, child, holds=holds)
        if counts and not isinstance(child, nn.Sequential):
            found.append(child_path)
            continue
        entry = holds or is_list(parent)
        inside = _repeated(child, child_path, holds=entry and not _has_forward(child))
        if (
            counts
            and inside
            and _is_whole(parent, child, [child.get_submodule(p[len(child_path) + 1 :]) for p in inside])
        ):
            inside = []
        found += inside or ([child_path] if counts else [])
    return found


def _is_whole(parent: nn.Module, child: nn.Module, inside: Sequence[nn.Module]) -> bool:
    """Whether a container has its like beside it, and no two of the modules inside of it are alike."""
    own = _outline(child)
    if not any(_outline(other) == own for other in parent.children() if other is not child):
        return False
    outlines = [_outline(part) for part in inside]
    return len(set(outlines)) == len(outlines)


def _outline(module: nn.Module) -> tuple[object, ...]:
    """The classes of a module's parts and the shapes of its parameters."""
    return tuple(
        (path, type(part), *((name, p.shape) for name, p in part.named_parameters(recurse=False)))
        for path, part in module.named_modules()
    )


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _is_repeated(parent: nn.Module, child: nn.Module, *, holds: bool) -> bool:
    if next(child.parameters(), None) is None or not _has_forward(child):
        return False
    if is_list(parent) or holds:
        return True
    classes = Counter(type(c) for c in parent.children())
    return isinstance(parent, nn.Sequential) and classes[type(child)] > 1


def with_links(graph: fx.Graph, paths: Sequence[str]) -> fx.Graph:
    """`graph`, each call told its `link`: that of the outermost of the modules at `paths` that it stands in, or glue.

    Raises FoldError where a module was stood in for in the glue.
    """
    known = frozenset(paths)
    last: Link | None = None
    for call in calls(graph):
        frames = [frame for frame in call.meta["frame"].stack() if frame.path in known]
        frame = frames[-1] if frames else None
        if "stood_in_by" in call.meta and frame is None:  # its `forward` is called, not the module
            raise FoldError(f"what {call.meta['stood_in_by']} stands for is called past the module")
        if last is None or last.frame is not frame:
            last = Link(path=frame.path if frame else "", frame=frame)
        last.model = call.meta.get("stood_in_by", "")
        call.meta["link"] = last
    return graph


def links(graph: fx.Graph) -> list[Link]:
    """The links of the chain, in execution order."""
    return list(dict.fromkeys(call.meta["link"] for call in calls(graph)))


def calls_by_link(graph: fx.Graph) -> dict[Link, list[fx.Node]]:
    """The calls of each link, links and calls in execution order."""
    found: dict[Link, list[fx.Node]] = {}
    for call in calls(graph):
        found.setdefault(call.meta["link"], []).append(call)
    return found


def hoisted(graph: fx.Graph) -> fx.Graph:
    """`graph` with glue between repeated links that does not depend on them (choosing a mask, drawing a random number)
    moved into the glue before the first of them, so that the chain shows what really stands between the blocks."""
    by_link = calls_by_link(graph)
    order = list(by_link)
    repeated = [position for position, link in enumerate(order) if link.repeated]
    if not repeated or repeated[0] == 0:
        return graph
    home, movable = order[0], set(by_link[order[0]])
    end = _last(by_link[home][-1])
    for link in order[repeated[0] + 1 : repeated[-1]]:
        for call in by_link[link] if not link.repeated else ():
            makers = {made for node in tensor_inputs(call) if (made := maker(node)) is not None}
            if makers <= movable and not call.meta["saved"] and not call.meta["backward"]:
                end = _moved(call, end)
                call.meta["link"] = home
                movable.add(call)
    return graph


def _results(node: fx.Node) -> list[fx.Node]:
    """The nodes that take the result of a call apart, in order."""
    taken = [
        user
        for user in node.users
        if user.meta.get("role") is Role.RESULT and user.meta["call"] is maker(node)
    ]
    return sorted({found: None for user in taken for found in (user, *_results(user))})


def _last(call: fx.Node) -> fx.Node:
    return max([call, *_results(call)])


def _moved(call: fx.Node, end: fx.Node) -> fx.Node:
    """Move a call, its results and the constants that it reads behind `end`; the last of them."""
    held = [node for node in call.all_input_nodes if is_held(node) and node > end]
    for node in (*held, call, *_results(call)):
        end.append(node)
        end = node
    return end
