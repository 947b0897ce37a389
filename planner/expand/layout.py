"""Where the values of a block lie under a tensor plan: what of its local work depends on no size at all."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoparallel.costmodel.block_index import BlockIndex
from autoparallel.costmodel.graph import sharded_dim
from autoparallel.planner.sharding.plan import BlockPlan, Exchange, Reshard


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A block and its tensor plan, looked up once for all micro-batches and degrees: it keeps what it has found."""

    index: BlockIndex
    plan: BlockPlan
    _placements: dict[tuple[int, str], str] = field(default_factory=dict, repr=False, compare=False)
    _left: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    _letters: dict[int, tuple[str, ...]] = field(default_factory=dict, repr=False, compare=False)
    _split: dict[int, bool] = field(default_factory=dict, repr=False, compare=False)
    _operands: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)
    _moves: list[Reshard | Exchange] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        moves: list[Reshard | Exchange] = [*self.plan.reshards, *self.plan.exchanges]
        self._moves.extend(sorted(moves, key=lambda move: move.position))

    @property
    def moves(self) -> tuple[Reshard | Exchange, ...]:
        """What is communicated between operators, in the order of the forward pass."""
        return tuple(self._moves)

    @property
    def barriers(self) -> frozenset[str]:
        """Values that are communicated between producer and consumer."""
        return frozenset(move.value for move in self._moves)

    def placement(self, op: int, value: str) -> str:
        """How `value` (an input, an output, or the storage of one) is laid out where operator `op` sees it."""
        key = (op, value)
        if key not in self._placements:
            self._placements[key] = self._seen(op, value)
        return self._placements[key]

    def _seen(self, op: int, value: str) -> str:
        sharding, operator = self.plan.shardings[op], self.index.block.operators[op]
        if sharding is None:
            return "R"
        if value in ("", operator.name):
            return sharding.outputs[0] if sharding.outputs else "R"
        storage = self.index.storage.get(value, value)
        for name, placement in zip(operator.inputs, sharding.inputs, strict=True):
            if name == value or self.index.storage.get(name, name) == storage:
                return placement
        for i, placement in enumerate(sharding.outputs):
            if value == f"{operator.name}.{i}":
                return placement
        return sharding.outputs[0] if sharding.outputs else "R"

    def operand_readers(self, storage: str) -> tuple[int, ...]:
        """Of the products with a weight gradient, which keep what they read, the first that reads a storage whole and the
        first that reads a share."""
        if storage not in self._operands:
            found: dict[str, int] = {}
            for i, operator in enumerate(self.index.block.operators):
                if any(kernel.gradient_of == "weight" for kernel in operator.backward):
                    for value in operator.inputs:
                        if self.index.storage.get(value) == storage:
                            found.setdefault(self.placement(i, value)[:1], i)
            self._operands[storage] = tuple(found.values())
        return self._operands[storage]

    def output_placement(self, value: str) -> str:
        """Layout in which the producer of `value` leaves it; a block input's layout at the boundary."""
        if value not in self._left:
            self._left[value] = self._as_left(value)
        return self._left[value]

    def _as_left(self, value: str) -> str:
        if value in self.index.producer:
            return self.placement(self.index.producer[value], value)
        if value.startswith("input:") and self.plan.inputs:
            return self.plan.inputs[int(value.removeprefix("input:"))]
        return dict(self.plan.params).get(value.removeprefix("param:"), "R")

    def split_letters(self, op: int) -> tuple[str, ...]:
        """Letters of an operator's labels that tensor parallelism splits."""
        if op not in self._letters:
            sharding, operator = self.plan.shardings[op], self.index.block.operators[op]
            placements = (*sharding.inputs, *sharding.outputs) if sharding else ()
            self._letters[op] = tuple(
                letters[sharded_dim(placement)]
                for letters, placement in zip(operator.labels, placements, strict=False)
                if placement.startswith("S") and sharded_dim(placement) < len(letters)
            )
        return self._letters[op]

    def is_split(self, op: int) -> bool:
        """Whether an operator without letters is split: tensor parallelism shards its largest activation."""
        if op not in self._split:
            self._split[op] = self._largest(op).startswith("S")
        return self._split[op]

    def _largest(self, op: int) -> str:
        sharding, operator = self.plan.shardings[op], self.index.block.operators[op]
        if sharding is None:
            return "R"
        best, largest = "R", -1
        pairs = [(self.index.specs[v], p) for v, p in zip(operator.inputs, sharding.inputs, strict=True)
                 if self.index.is_activation(v)]  # fmt: skip
        pairs += list(zip(operator.outputs, sharding.outputs, strict=False))
        for spec, placement in pairs:
            size = spec.numel(1)
            if size > largest or (size == largest and placement.startswith("S")):
                best, largest = placement, size
        return best
