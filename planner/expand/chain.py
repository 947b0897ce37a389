"""Questions about a model's chain: what flows from link to link, how it is cut, which tensors are tied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoparallel.costmodel.graph import Block, ModelGraph, OpKind, TensorSpec

_PRODUCTS = frozenset({OpKind.GEMM, OpKind.CONV})


def carried_inputs(graph: ModelGraph, position: int) -> tuple[int, ...]:
    """Positions of the inputs of the link at `position` that a gradient flows back through.

    Those are the activations that the link before hands on; an input takes the first of them with its shape
    and dtype that no input before it took. What a product reads that makes no gradient of its input is none of them.
    """
    if position == 0:
        return ()
    waiting, block = list(graph.chain[position - 1].sends), graph.blocks[graph.chain[position].block]
    found = []
    for i, spec in enumerate(block.inputs):
        if spec in waiting:
            waiting.remove(spec)
            if not _stops_at(block, f"input:{i}"):
                found.append(i)
    return tuple(found)


def _stops_at(block: Block, value: str) -> bool:
    """Whether a product that reads `value` shows that no gradient goes back to it: what is given to a model, or made without
    gradients."""
    return any(
        op.kind in _PRODUCTS and value in op.inputs and all(k.gradient_of != "input" for k in op.backward)
        for op in block.operators
    )


def handed_on(graph: ModelGraph, position: int) -> tuple[str, ...]:
    """Outputs of the link at `position` that a gradient comes back through, by the same rule."""
    link = graph.chain[position]
    block, waiting = graph.blocks[link.block], list(link.sends)
    specs = output_specs(graph, link.block)
    found = []
    for value in block.outputs:
        if specs[value] in waiting:
            waiting.remove(specs[value])
            found.append(value)
    return tuple(found)


def output_specs(graph: ModelGraph, block: int) -> dict[str, TensorSpec]:
    """Shape and dtype of each value a block hands on."""
    made = {f"input:{i}": spec for i, spec in enumerate(graph.blocks[block].inputs)}
    for op in graph.blocks[block].operators:
        for i, spec in enumerate(op.outputs):
            made[op.name if i == 0 else f"{op.name}.{i}"] = spec
    return {value: made[value] for value in graph.blocks[block].outputs if value in made}


def first_positions(graph: ModelGraph) -> dict[int, int]:
    """Distinct block -> the first link that is one."""
    found: dict[int, int] = {}
    for position, link in enumerate(graph.chain):
        found.setdefault(link.block, position)
    return found


def even_stages(blocks: int, chunks: int) -> tuple[int, ...]:
    """Blocks per chunk, as even as can be; the first chunks take one more."""
    each, more = divmod(blocks, chunks)
    return tuple(each + (i < more) for i in range(chunks))


def stage_ranges(graph: ModelGraph, stage_blocks: Sequence[int]) -> tuple[range, ...]:
    """Chain positions of each stage: a stage begins at its first repeated link, glue follows what it follows;
    glue at the ends goes to the first and the last stage, which may be glue alone."""
    repeated = graph.repeated_positions
    starts, taken = [0], 0
    for count in stage_blocks[:-1]:
        taken += count
        starts.append(repeated[taken] if taken < len(repeated) else repeated[-1] + 1)
    ends = [*starts[1:], len(graph.chain)]
    return tuple(range(a, b) for a, b in zip(starts, ends, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ties:
    """Tied parameters of a pipelined model.

    `dropped[position]`: names at that link that stand on the same rank already. `crossing`: (stage, tie) of
    tensors that live on several ranks, whose gradients must be summed. `again[position]`: names at that link of tensors that an
    earlier link of the same stage has; `later[position]`: that a later one has.
    """

    dropped: dict[int, frozenset[str]]
    crossing: tuple[tuple[int, str], ...]
    again: dict[int, frozenset[str]]
    later: dict[int, frozenset[str]]


def find_ties(
    graph: ModelGraph, stages: Sequence[range], rank_of: Sequence[int], *, copies: bool = False
) -> Ties:
    """Where tied parameters are held once, and where their gradients cross ranks; `copies`: each stage of a rank has its own,
    as `auto_parallelize` does it."""
    holders: dict[str, dict[int, int]] = {}  # tie -> rank -> stage that holds it there
    dropped: dict[int, set[str]] = {}
    again: dict[int, set[str]] = {}
    for stage, positions in enumerate(stages):
        for position in positions:
            for parameter in graph.blocks[graph.chain[position].block].parameters:
                if not parameter.tied:
                    continue
                on_ranks = holders.setdefault(parameter.tied, {})
                holder = on_ranks.get(rank_of[stage])
                if holder is not None and (holder == stage or not copies):
                    dropped.setdefault(position, set()).add(parameter.name)
                if holder == stage:
                    again.setdefault(position, set()).add(parameter.name)
                on_ranks.setdefault(rank_of[stage], stage)
    crossing = [(s, tie) for tie, ranks in holders.items() if len(ranks) > 1 for s in ranks.values()]
    return Ties(
        dropped={p: frozenset(n) for p, n in dropped.items()}, crossing=tuple(sorted(crossing)),
        again={p: frozenset(n) for p, n in again.items()},
        later={p: names for positions in stages for p, names in _used_later(graph, positions).items()},
    )  # fmt: skip


def _used_later(graph: ModelGraph, positions: Sequence[int]) -> dict[int, frozenset[str]]:
    """Names at each link of tensors that a later one of these links has."""
    found, seen = dict[int, frozenset[str]](), set[str]()
    for position in reversed(positions):
        tied = [p for p in graph.blocks[graph.chain[position].block].parameters if p.tied]
        found[position] = frozenset(p.name for p in tied if p.tied in seen)
        seen |= {p.tied for p in tied if p.tied}
    return found
