"""Models that go through the samples of a micro-batch one by one, as vision towers do whose images differ in size.

Their step at another micro-batch has other calls: more rounds of the same. The rounds are found in the longest of the
graphs as calls that follow one another again and again, the others are read by that pattern, and of each loop that has
other rounds at another micro-batch one round is left, told how often it runs (`rounds`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autoparallel.planner.capture.nodes import (
    Launch,
    Meta,
    Role,
    calls,
    outputs,
    role,
    tensor,
    tensor_inputs,
    tensor_outputs,
)
from autoparallel.planner.capture.trees import mapped

_LONGEST = 2048  # calls of a round. Kind: chosen; a tower of few layers, run once for each image


@dataclass(frozen=True, slots=True)
class Run:
    """`period` calls from `start` on, `rounds` times one after another."""

    start: int
    period: int
    rounds: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.rounds


def runs(keys: Sequence[Hashable]) -> list[Run]:
    """A sequence as runs, each the one that reaches furthest from where the one before it ends."""
    numbers: dict[Hashable, int] = {}
    row = [numbers.setdefault(key, len(numbers)) for key in keys]
    where: dict[int, list[int]] = defaultdict(list)
    for position, number in enumerate(row):
        where[number].append(position)
    found: list[Run] = []
    start = 0
    while start < len(row):
        best = Run(start, 1, 1)
        for position in where[row[start]]:
            period = position - start
            if period <= 0:
                continue
            if period > _LONGEST:
                break
            run = Run(start, period, _rounds(row, start, row[start:position]))
            if run.rounds > 1:
                best = max(best, run, key=lambda r: (r.end, -r.period))
        found.append(best)
        start = best.end
    return found


def _rounds(row: Sequence[Hashable], start: int, body: Sequence[Hashable]) -> int:
    count = 0
    while list(row[start : start + len(body)]) == list(body):
        start += len(body)
        count += 1
    return count


def matched(pattern: Sequence[Run], of: Sequence[Hashable], row: Sequence[Hashable]) -> list[Run] | None:
    """`row` as the same runs, with other rounds, as `pattern` has of the sequence `of`; None where it is another one.

    What follows a run may have the same names: other numbers of rounds are tried until the rest agrees.
    """
    found: list[Run] = []
    # Rounds that are left to try, of each run in `found` and of the next.
    left = [_possible(pattern[0], of, row, 0)] if pattern else []
    in_vain: set[tuple[int, int]] = set()  # (run, where it would start)
    while left:
        run, start = pattern[len(found)], found[-1].end if found else 0
        rounds = next(left[-1], None)
        if rounds is None or (len(found), start) in in_vain:
            in_vain.add((len(found), start))
            left.pop()
            del found[-1:]
            continue
        found.append(Run(start, run.period, rounds))
        if len(found) < len(pattern):
            left.append(_possible(pattern[len(found)], of, row, found[-1].end))
        elif found[-1].end == len(row):
            return found
        else:
            found.pop()
    return None if pattern or row else []


def _possible(run: Run, of: Sequence[Hashable], row: Sequence[Hashable], at: int) -> Iterator[int]:
    """How many rounds of a run `row` may have there: as many as the run has, then the most."""
    body = of[run.start : run.start + run.period]
    if run.rounds == 1:
        return iter([1] if list(row[at : at + 1]) == list(body) else [])
    most = _rounds(row, at, body)
    return iter(sorted(range(1, most + 1), key=lambda rounds: (rounds != run.rounds, -rounds)))


def one_round(graphs: Sequence[fx.Graph]) -> None:
    """Leave one round of every loop over samples, where the graphs of a step differ in how often such loops run."""
    rows = [calls(graph) for graph in graphs]
    if len({tuple(map(_what, row)) for row in rows}) > 1:
        _find_and_leave(graphs, rows)
    _leave_unread(graphs)


def _leave_unread(graphs: Sequence[fx.Graph]) -> None:
    """Of a call that returns more tensors at one micro-batch than at another, one for each round of a loop that was counted in
    the trace, those stay that are read. What was left out of a call at one micro-batch is left out of it at all."""
    rows = [calls(graph) for graph in graphs]
    if len({tuple(map(_what, row)) for row in rows}) > 1:
        return
    for same in zip(*rows, strict=True):
        differ = len({len(tensor_outputs(call)) for call in same}) > 1
        for graph, call in zip(graphs, same, strict=True):
            if differ:
                read = {*outputs(graph), *(node for user in calls(graph) for node in tensor_inputs(user))}
                call.meta["outputs"] = [node for node in tensor_outputs(call) if node in read]
            if differ or any(other.meta.get("without_views") for other in same):
                _without_views(call)


def _find_and_leave(graphs: Sequence[fx.Graph], rows: Sequence[Sequence[fx.Node]]) -> None:
    *short, long = rows
    pattern = runs([_likeness(call) for call in long])
    names = [_what(call) for call in long]
    read = [matched(pattern, names, [_what(call) for call in row]) for row in short]
    if any(found is None for found in read):
        return
    parsed = [*(found for found in read if found is not None), pattern]
    differ = [len({run.rounds for run in same}) > 1 for same in zip(*parsed, strict=True)]
    for graph, row, found in zip(graphs, rows, parsed, strict=True):
        chosen = [run for run, differs in zip(found, differ, strict=True) if differs]
        _leave_one(
            graph,
            [[row[i : i + run.period] for i in range(run.start, run.end, run.period)] for run in chosen],
        )


def _what(call: fx.Node) -> Hashable:
    return (call.meta["torch_name"], call.meta["frame"].path)


def _likeness(call: fx.Node) -> Hashable:
    """What two calls of one graph must have in common to be the same call of two rounds."""

    def described(node: fx.Node) -> Hashable:
        meta, held = tensor(node), role(node) in (Role.PARAM, Role.BUFFER)
        return (meta.shape, meta.dtype, node.meta["requires_grad"], node.meta["name"] if held else "")

    sides = (tuple(map(described, side)) for side in (tensor_inputs(call), tensor_outputs(call)))
    return (_what(call), *sides)


# -- leaving the others out ----------------------------------------------------------------------------------------


def _leave_one(graph: fx.Graph, loops: Sequence[Sequence[Sequence[fx.Node]]]) -> None:
    """The first round of each loop stays a call and stands for the others: what reads their results reads its own."""
    instead: dict[fx.Node, fx.Node] = {}
    alike: dict[Meta, Meta] = {}
    for rounds in loops:
        for group in zip(*rounds, strict=True):
            first, *others = group
            first.meta["rounds"] = sum(
                call.meta.get("rounds", 1) for call in group
            )  # some were counted in the trace
            for call in others:
                _leave_out(call)
                for other, own in zip(tensor_outputs(call), tensor_outputs(first), strict=True):
                    instead[other] = own
                    alike[tensor(other)] = tensor(own)
    if not instead:
        return
    fed = {
        node for rounds in loops for calls_ in rounds[1:] for call in calls_ for node in tensor_inputs(call)
    }
    end = graph.output_node()
    _read_instead(end, instead)
    end.meta["loss"] = instead.get(end.meta["loss"], end.meta["loss"])
    for call in calls(graph):
        if any(node in instead for node in tensor_inputs(call)):
            _join(call, instead, alike)
    read = {*outputs(graph), *(node for call in calls(graph) for node in tensor_inputs(call))}
    for call in calls(graph):
        spare = {tensor(node).shape for node in tensor_outputs(call) if node in fed and node not in read}
        if spare:  # what only rounds that were left out read, or that were counted in the trace
            made = tensor_outputs(call)
            call.meta["outputs"] = [node for node in made if node in read or tensor(node).shape not in spare]
            _without_views(call)


def _leave_out(call: fx.Node) -> None:
    call.meta["role"] = Role.COUNTED
    for node in call.meta["backward"]:
        node.meta.pop("launch")


def _join(call: fx.Node, instead: Mapping[fx.Node, fx.Node], alike: Mapping[Meta, Meta]) -> None:
    """A call that is given results of rounds that were left out is given those of the one that stands for them, once."""
    _read_instead(call, instead)
    given = tensor_inputs(call)
    kept = [node for node in given if node not in instead]
    stand = [instead[node] for node in given if node in instead]
    read = [instead.get(node, node) for node in given]
    call.meta["inputs"] = tuple(dict.fromkeys(read) if {*stand} <= {*kept} else read)
    seen: dict[tuple[object, ...], Launch] = {}
    known, launches = dict(alike), []
    for launch in call.meta["kernels"]:
        launch = replace(launch, inputs=tuple(known.get(meta, meta) for meta in launch.inputs))
        same = seen.setdefault((launch.target, launch.inputs), launch) if launch.is_view else launch
        known |= dict(zip(launch.outputs, same.outputs, strict=True))
        launches += [launch] if same is launch else []
    call.meta["kernels"] = launches
    _without_views(call)


def _read_instead(node: fx.Node, instead: Mapping[fx.Node, fx.Node]) -> None:
    args, kwargs = (
        mapped(lambda leaf: instead.get(leaf, leaf) if isinstance(leaf, fx.Node) else leaf, tree)
        for tree in (tuple(node.args), dict(node.kwargs))
    )
    node.args, node.kwargs = args, kwargs


def _without_views(call: fx.Node) -> None:
    """A view in the backward pass hands the gradient of one round on: nothing runs. What reads nothing are zeros, in the
    place of gradients of rounds that were counted in the trace."""
    call.meta["without_views"] = True
    launches = ((node, node.meta["launch"]) for node in call.meta["backward"])
    call.meta["backward"] = [node for node, launch in launches if not launch.is_view and launch.inputs]
