"""The calls of submodules inside each link: where a layout can be pinned."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from autoparallel.planner.capture.links import Link
from autoparallel.planner.capture.nodes import Frame, calls


def frames_by_link(graph: fx.Graph) -> dict[Link, list[Frame]]:
    """For each link the module calls that lie wholly in it, in order; a call that does nothing is left out."""
    touched: dict[Frame, set[Link]] = defaultdict(set)
    for call in calls(graph):
        for frame in call.meta["frame"].stack():
            touched[frame].add(call.meta["link"])
    result: dict[Link, list[Frame]] = defaultdict(list)
    for frame in sorted(touched, key=lambda frame: frame.index):
        if len(touched[frame]) == 1 and frame.inputs is not None:
            result[next(iter(touched[frame]))].append(frame)
    return result
