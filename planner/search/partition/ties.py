"""Where in a chain the tensors stand that several blocks hold, and which blocks bounds count them at.

A stage holds such a tensor once, and reduces and updates its gradient there: every stage that has one of its blocks does, or,
where ranks hold it once for all of their stages, the first of these. Of an embedding that head and tail of a model share either end
has it. Where a single layer group between them holds one, too (the decoder's embedding of an encoder-decoder model), the chunk
that has this layer group may be the one that has an end: bounds then count it at the ends, or at the layer group, whichever is more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.planner.expand.schedules import V_SHAPED

Names = frozenset[str]  # of tensors that several parameters are


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The tied tensors that count at the head, at the tail and at layer groups."""

    head: Names
    tail: Names
    groups: Names


@dataclass(frozen=True, slots=True, kw_only=True)
class Ties:
    """The tied tensors of each block of a graph (`of`), and of the parts of its chain; `between`: those of one layer group alone,
    with its kind. `numbers` in each."""

    of: tuple[Names, ...] = ()
    head: Names = frozenset()
    tail: Names = frozenset()
    groups: Names = frozenset()
    between: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def find(
        graph: ModelGraph,
        head: Sequence[int],
        kinds: Sequence[int],
        groups: Sequence[Sequence[int]],
        tail: Sequence[int],
    ) -> Ties:
        """Of a graph and the parts of its chain: `forms.Chain`."""
        of = tuple(frozenset(p.tied for p in block.parameters if p.tied) for block in graph.blocks)

        def inside(blocks: Sequence[int]) -> Names:
            return Names().union(*(of[b] for b in blocks))

        each = [inside(blocks) for blocks in groups]
        between = {
            name: kind for kind, names in enumerate(each) for name in sorted(names)
            if sum(name in each[k] for k in kinds) == 1
        }  # fmt: skip
        return Ties(
            of=of, head=inside(head), tail=inside(tail), groups=Names().union(*each), between=between,
            numbers={p.tied: p.numel for block in graph.blocks for p in block.parameters if p.tied},
        )  # fmt: skip

    @property
    def first(self) -> Names:
        """Those of `between` that no block before that layer group holds: it has them wherever it stands."""
        return Names(self.between) - self.head

    @property
    def ends(self) -> Names:
        """Those that the head and the tail hold."""
        return self.head & self.tail

    def held(self, pp: int, schedule: str, stages: int, *, own_copies: bool) -> tuple[Held, ...]:
        """Where they may count, of which the largest sum is a bound, over `pp` ranks with so many `stages` each; `own_copies`: of
        two stages of a rank either has its own."""
        if pp == 1:
            return (Held(head=self.head, tail=Names(), groups=self.first),)
        if not own_copies and stages > 1:
            ends = self.head - self.groups if schedule not in V_SHAPED else Names()
            return (Held(head=self.head, tail=ends, groups=self.first),)
        inner = Names(self.between)
        at_ends = Held(head=self.head, tail=self.head | inner, groups=Names())
        if not inner:
            return (at_ends,)
        return at_ends, Held(head=self.head - inner, tail=self.head - inner, groups=inner)

    def at(self, blocks: Sequence[int], held: Names) -> list[bool]:
        """Of which of these blocks, one after another, the tied tensors count if those of `held` do: a tensor of two once, and all
        of a block's or none."""
        found, seen = [], Names()
        for block in blocks:
            found.append(self.of[block] <= held - seen)
            seen |= self.of[block]
        return found
