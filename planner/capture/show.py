"""A traced step as text: fx's own code, with shapes, and with the module that each part comes from."""

from __future__ import annotations

import re

from torch import fx

from autoparallel.planner.capture.nodes import Role

_ASSIGNS = re.compile(r'^\s*(\w+)(?:: "[^"]*")? = ')
_FREED = re.compile(r";  (\w+ = )+None$")
_INDENT = " " * 4


def step_code(traced: fx.GraphModule) -> str:
    """The Python code of a step that `trace` wrote down. A comment says where the code of a module begins, and whose
    backward pass it is; what a call returns stands beside its name as dtype and shape."""
    nodes = {node.name: node for node in traced.graph.nodes}
    lines: list[str] = []
    waiting: list[str] = []  # what belongs to the line after it: a parameter is named where it is first used
    place = ""
    for line in traced.graph.python_code("self", verbose=True).src.strip().splitlines():
        if line.strip().startswith("# No stacktrace"):
            continue
        found = _ASSIGNS.match(line)
        waiting.append(_FREED.sub("", line))
        if found and found[1] in nodes:
            here = _place(nodes[found[1]])
            if here is None:
                continue
            if here != place:
                lines += ["", f"{_INDENT}# {here}"]
                place = here
        lines += waiting
        waiting = []
    return "\n".join(lines) + "\n"


def _place(node: fx.Node) -> str | None:
    """Where a node comes from; None for one that stands where it is first used."""
    kind = node.meta["role"]
    if kind not in {Role.CALL, Role.BACKWARD} or (kind is Role.BACKWARD and node.meta["of"] is None):
        return None
    call = node if kind is Role.CALL else node.meta["of"]
    path = call.meta["frame"].path or "the model itself"
    return path if kind is Role.CALL else f"backward of {path}"
