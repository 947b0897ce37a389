"""The calls of submodules inside each link: where a layout can be pinned."""

from __future__ import annotations

from collections.abc import Sequence

from autoparallel.costmodel.graph import ModuleCall
from autoparallel.planner.capture.operators import OperatorMaker
from autoparallel.planner.capture.records import Trace
from autoparallel.planner.capture.split import Link


def frames_by_link(trace: Trace, links: Sequence[Link]) -> list[list[int]]:
    """For each link the module calls that lie wholly in it, in order; a call that does nothing is left out."""
    link_of = {index: position for position, link in enumerate(links) for index in link.calls}
    touched: list[set[int]] = [set() for _ in trace.frames]
    for index, call in enumerate(trace.calls):
        frame = call.frame
        while frame >= 0:
            touched[frame].add(link_of[index])
            frame = trace.frames[frame].parent
    result: list[list[int]] = [[] for _ in links]
    for frame, where in enumerate(touched):
        if len(where) == 1 and frame and frame in trace.boundaries:
            result[next(iter(where))].append(frame)
    return result


def module_calls(
    trace: Trace, frames: Sequence[int], maker: OperatorMaker, link: Link
) -> tuple[ModuleCall, ...]:
    """The module calls of one link, with the block's names of what crosses their boundaries."""
    return tuple(
        ModuleCall(
            module=trace.frames[frame].path.removeprefix(link.path).removeprefix("."),
            inputs=tuple(
                (name, maker.value_name(v)) for name, v in trace.boundaries[frame].inputs if maker.knows(v)
            ),
            outputs=tuple(maker.value_name(v) for v in trace.boundaries[frame].outputs if maker.knows(v)),
        )
        for frame in frames
    )
