"""Modules whose forward is a loop in Python: as many small operators as it has rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autoparallel.costmodel.graph import ModelGraph, OpKind
from autoparallel.planner.capture.library_kernels import PACKAGES

# Calls of one operator by one module in one forward pass: what is no loop over tokens or time has far fewer (two
# additions in a block of a transformer, a dozen in an attention written out). Kind: formula.
MANY_CALLS = 64


def loop_warnings(graph: ModelGraph) -> tuple[str, ...]:
    """One warning for each place that calls an operator so often, the same place in every layer counted once."""
    found: dict[str, tuple[int, str]] = {}
    called = [op.target.rpartition(".")[2] for block in graph.blocks for op in block.operators]
    kernels = [name for name in PACKAGES if name in called]
    for link in graph.chain:
        block = graph.blocks[link.block]
        calls: Counter[tuple[str, str]] = Counter()
        for op in block.operators:
            if op.kind is OpKind.RECURRENT:
                continue  # a library's loop
            calls[op.module, op.target] += max((kernel.count.at(1) for kernel in op.forward), default=1)
        for (module, target), count in calls.items():
            if count < MANY_CALLS:
                continue
            whole = ".".join(filter(None, (link.path, module)))
            place = ".".join("*" if part.isdigit() else part for part in whole.split(".")) or "the model"
            found[place] = max(found.get(place, (0, "")), (count, target))
    packages = sorted({PACKAGES[name] for name in kernels})
    priced = (
        (
            f"its {_listed(kernels)} {'are' if len(kernels) > 1 else 'is'} priced as in {_listed(packages)}; where "
            f"{'these are' if len(packages) > 1 else 'that is'} not installed the model's own code runs, many times slower",
        )
        if kernels
        else ()
    )
    return priced + tuple(
        f"{place} calls {target} {count:,} times in one forward pass: a loop in Python, priced call by call. Where a "
        "fused kernel runs instead (of a state-space model, say), steps are shorter than predicted; a shorter --seq-len "
        "is captured and planned sooner"
        for place, (count, target) in found.items()
    )


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
