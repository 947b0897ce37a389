"""The peaks of a block's backward pass: gradients between its kernels and of weights, while what was kept is freed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoparallel.costmodel.fusion import Unit
from autoparallel.planner.expand.local import LocalBlock
from autoparallel.planner.expand.local_memory import (
    attention_temp,
    overwrites,
    own_softmax,
    puts_off,
    rearranged_bytes,
    saved_bytes,
    weight_factors,
)
from autoparallel.planner.sharding.experts import expert_layers

# Gradients of the score matrix that unfused attention holds at once on its way back: of the probabilities and of the
# scores; eager operators make a new one at the mask and one at the scale. Kind: formula.
SCORE_GRADIENTS = {"eager": 4, "fused": 2, "compiled": 2}
OWN_SCORE_GRADIENTS = 2  # in torch's own kernel, which scales its inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One kernel of a backward pass: bytes above what was kept, gradients of weights left out, while it runs and when it is over;
    gradients that it makes, by parameter. `flows`: it makes gradients of activations."""

    module: str
    flows: bool
    running: int
    after: int
    made: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfBytes:
    """Of the first half of a split pass (of FSDP2's modules), which makes no gradients of weights and keeps what the second half needs:
    its peak, the gradients that `arrived` for that, and its moments."""

    peak: int
    arrived: int
    moments: tuple[Moment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardBytes:
    """Of a backward pass, above what was kept."""

    passing: int  # its peak where a weight's gradient is gone when the next one is made
    standing: int  # where they all stand until the pass is over
    left: int  # then: they, and the gradients of the block's inputs
    halves: tuple[
        HalfBytes, ...
    ]  # first halves of a split pass: as by itself, and where no weights of the stage are put off
    puts_off: bool  # whether the weights of this block are, where those of all others are
    moments: tuple[Moment, ...]  # in their order


def backward_bytes(local: LocalBlock, units: Sequence[Unit], kept: Mapping[str, int]) -> BackwardBytes:
    """Peaks of the backward pass above what was kept: gradients between units and of weights, while what was
    kept is freed unit by unit."""
    index, remaining = local.index, dict(kept)
    first = _first_keepers(local, units, kept)
    live = {index.storage[v]: local.value_bytes(v, local.output_placement(v))
            for v in index.block.outputs if v in index.needs_grad}  # fmt: skip
    if returned := _beside_the_loss(local):
        live = {s: b for s, b in live.items() if s not in returned}
    if returned and local.setting.execution.kept_outputs:
        remaining |= {f"returned:{s}": b for s, b in returned.items() if s not in kept}
        first |= {f"returned:{s}": -1 for s in returned}
    standing = peak = sum(live.values()) + sum(remaining.values())
    before, moments = sum(kept.values()), list[Moment]()
    copies = rearranged_bytes(local, units, backward=True)
    put = puts_off(local)
    halves = [_FirstHalf.of(local, units, kept, put=how) for how in (put, False)]
    made, handed_out = dict[str, int](), _handed_out(local, units)  # gradients of weights; see there
    for n in range(len(units) - 1, -1, -1):
        unit, weights = units[n], _weight_gradients(local, units[n])
        for value in unit.inputs:
            if value in index.needs_grad and not index.storage.get(value, value).startswith("param:"):
                storage, placement = index.storage[value], local.placement(_reader(local, unit, value), value)
                live[storage] = max(live.get(storage, 0), local.value_bytes(storage, placement))
        for value in unit.outputs:  # their gradients as the unit gets them, when they have been gathered
            if (storage := index.storage.get(value, value)) in live:
                live[storage] = max(live[storage], local.value_bytes(value, local.output_placement(value)))
        if overwrites(local, unit):
            remaining = {s: b for s, b in remaining.items() if first.get(s, 0) < n}
        waiting = sum(b for s, b in made.items() if s not in weights and handed_out.get(s, n + 1) <= n)
        made |= weights
        beside = sum(live.values()) + sum(remaining.values()) + _inside(local, unit)
        beside = max(beside, beside - _inside(local, unit) + copies.get(n, 0))
        running, held = beside, remaining
        beside += _copied_weight(local, weights)
        peak = max(peak, beside + waiting + sum(weights.values()))
        standing = max(standing, beside + sum(made.values()))
        for op in unit.ops:
            if op in index.aliases:
                continue
            live.pop(index.block.operators[op].name, None)
            live = {s: b for s, b in live.items() if index.producer.get(s) != op}
        remaining = {s: b for s, b in remaining.items() if first.get(s, 0) < n}
        after = sum(live.values()) + sum(remaining.values()) - before
        module = index.block.operators[unit.ops[0]].module
        flows = any(v in index.needs_grad and index.is_activation(v) for v in unit.inputs)
        moments.append(Moment(module=module, flows=flows, running=beside - before, after=after, made=weights))
        moment = Moment(module=module, flows=flows, running=running, after=after + before, made={})
        ran = [index.block.operators[op].name for op in unit.ops if op not in index.aliases]
        for half in halves if local.setting.execution.fsdp2 else ():
            half.see(moment, held, remaining, ran)
    left = sum(live.values()) + sum(remaining.values()) + sum(made.values())
    return BackwardBytes(
        passing=max(peak - before, 0), standing=max(standing - before, 0), left=left - before,
        halves=tuple(half.found(before) for half in halves), puts_off=put, moments=tuple(moments),
    )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class _FirstHalf:
    """The first half of a split pass while it is walked: storages of `kept` that the second half `needs`, too, and the gradients
    that wait for it."""

    kept: Mapping[str, int]
    needs: set[str]
    gradients: Mapping[str, int]  # by operator
    waiting: int = 0
    peak: int = 0
    moments: list[Moment] = field(default_factory=list)

    @classmethod
    def of(
        cls, local: LocalBlock, units: Sequence[Unit], kept: Mapping[str, int], *, put: bool
    ) -> _FirstHalf:
        own = local.setting.execution.fsdp2
        factors, gradients = weight_factors(local, units, put=put or not own)
        return cls(kept=kept, needs=factors if put else {*kept}, gradients=gradients)

    def see(
        self, moment: Moment, held: Mapping[str, int], left: Mapping[str, int], operators: Sequence[str]
    ) -> None:
        """Some operators run, beside which an ordinary pass would hold the `moment`'s bytes: while they run `held` of what was kept,
        and then what is `left`. Gradients of their outputs may wait."""
        before, running = sum(self.kept.values()), moment.running + self._stays(held) + self.waiting
        self.peak = max(self.peak, running)
        self.waiting += sum(self.gradients.get(operator, 0) for operator in operators)
        after = moment.after + self._stays(left) + self.waiting
        self.moments.append(replace(moment, running=running - before, after=after - before))

    def found(self, before: int) -> HalfBytes:
        """What was seen, above so many bytes."""
        return HalfBytes(peak=max(self.peak - before, 0), arrived=self.waiting, moments=tuple(self.moments))

    def _stays(self, remaining: Mapping[str, int]) -> int:
        """Bytes for the second half of what an ordinary pass has freed."""
        return sum(
            n for storage, n in self.kept.items() if storage in self.needs and storage not in remaining
        )


def _weight_gradients(local: LocalBlock, unit: Unit) -> dict[str, int]:
    """Parameter -> bytes of its gradient, which what reads it makes: of a view of it, the view's reader."""
    index, found = local.index, dict[str, int]()
    for value in unit.inputs:
        storage = index.storage.get(value, value)
        reads = value in index.needs_grad and storage.startswith("param:")
        if reads and _reader(local, unit, value) not in index.aliases:
            found[storage] = local.value_bytes(storage, local.output_placement(storage))
    return found


def _handed_out(local: LocalBlock, units: Sequence[Unit]) -> dict[str, int]:
    """Parameters of experts that are shared over ep -> the layer's first unit. A rank hands its layer all of its slices before
    the layer runs (`runtime/experts/parallel.py`), so that autograd gets back to them when it is through with the layer."""
    if local.setting.ep == 1 or not local.setting.execution.fsdp2:
        return {}
    unit_of = {op: n for n, unit in enumerate(units) for op in unit.ops}
    return {
        f"param:{name}": min(unit_of[op] for op in layer.operators if op in unit_of)
        for layer in expert_layers(local.index)
        for name in layer.params
    }


def _inside(local: LocalBlock, unit: Unit) -> int:
    """What the backward of a unit makes for itself: gradients of scores and of a loss's softmax."""
    execution = local.setting.execution
    gradients = OWN_SCORE_GRADIENTS if execution.fsdp2 else SCORE_GRADIENTS[execution.kernels]
    inside = 0 if local.setting.flash else gradients * sum(attention_temp(local, op) for op in unit.ops)
    return inside + sum(_loss_temp(local, op) for op in unit.ops)


def _copied_weight(local: LocalBlock, weights: Mapping[str, int]) -> int:
    """`runtime/context/values.py` multiplies a weight's gradient by the ranks of cp, whose mean is taken: into a copy."""
    setting = local.setting
    return max(weights.values(), default=0) if setting.cp > 1 and setting.execution.dtensor else 0


def _beside_the_loss(local: LocalBlock) -> dict[str, int]:
    """Storages that the model returns beside its loss: no gradient comes to them, but a caller may hold them."""
    index = local.index
    outputs = {v for v in index.block.outputs if v in index.needs_grad}
    losses = {v for v in outputs if index.specs[v].shape == ()}
    if not losses:
        return {}
    return {index.storage[v]: local.value_bytes(v, local.output_placement(v)) for v in outputs - losses}


def _loss_temp(local: LocalBlock, op: int) -> int:
    """torch's eager cross-entropy goes back through the log-softmax: a gradient of it beside that of the logits."""
    softmax = own_softmax(local, op)
    if softmax is None or local.setting.execution.kernels != "eager":
        return 0
    return saved_bytes(local, op, softmax)


def _reader(local: LocalBlock, unit: Unit, value: str) -> int:
    return next(op for op in unit.ops if value in local.index.block.operators[op].inputs)


def _first_keepers(local: LocalBlock, units: Sequence[Unit], kept: Mapping[str, int]) -> dict[str, int]:
    """Storage -> first unit whose backward needs it (after which it is free, walking backwards)."""
    first: dict[str, int] = {}
    for n, unit in enumerate(units):
        for _, saved in unit.saved:
            first.setdefault(local.index.storage.get(saved.value, saved.value), n)
    for storage in kept:
        if "#" in storage:
            maker = local.index.producer[storage.partition("#")[0]]
            first[storage] = next(n for n, unit in enumerate(units) if maker in unit.ops)
    return first
