"""Live bytes of every pipeline rank, walked over its actions: no schedule has a formula of its own.

Held all through the step: parameters, gradients (allocated once, as DDP and Megatron do, but for those that a step's only
micro-batch makes), optimizer state, static buffers. A forward adds the saved activations of its blocks, and what it hands on, until the backward of its
micro-batch frees them block by block; of a split backward, I frees all but what W needs. While a block runs, its temporaries, what its
recomputation makes, gathered ZeRO-3 parameters (its own and those fetched ahead) and whole gradients on their way
to a reduction of every micro-batch live too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np

from autoparallel.costmodel.compression import wire_bytes
from autoparallel.costmodel.prediction import StageMemory
from autoparallel.costmodel.program import Action, ActionKind, BlockWork, CollectiveOp, StageWork, UnderWay

K = ActionKind
_HOLDS = frozenset({K.FORWARD, K.BACKWARD, K.BACKWARD_INPUT, K.BACKWARD_WEIGHT})  # or lets go of
_AT_ONCE = 1 << 20  # numbers of states that are compared at once. Kind: choice


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes above what was live before an action, at the action's largest moment; of the stage's gradients and parameters, how
    many are not there then (negative)."""

    activations: int = 0
    buffers: int = 0
    gradients: int = 0
    parameters: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationProfile:
    """A stage's activations for one micro-batch: what it holds between its actions, and the peak of each.

    The peaks of backwards are above what is live without this micro-batch's own activations.
    """

    saved: int  # from F to B or I
    weight_saved: int  # from I to W
    unmade: int = 0  # of its gradients, until its backward is over
    forward: Peak
    backward: Peak
    weight: Peak
    first_half: Peak | None = None  # of a split backward, which keeps what W needs; None: not looked at
    # The last backward of a step, or its second half, beside which gradients are reduced.
    last_backward: Peak = Peak()
    last_weight: Peak = Peak()


@dataclass(frozen=True, slots=True)
class LiveState:
    """An action, and how many micro-batches each stage of the rank holds when it starts, its own left out.

    `held`: (stage, saved by F, kept from I to W).
    """

    stage: int
    kind: ActionKind
    held: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class EndingState:
    """A state at the end of a step, when the last backward of some stage runs, or of the stages that are `over` has run."""

    state: LiveState
    last: bool  # of its stage
    over: tuple[int, ...]


def _held_in(
    actions: Sequence[Action], stages: Sequence[int]
) -> Iterator[tuple[Action, list[int], list[int]]]:
    """Each action of one rank that keeps something or lets go of it, and what each of its stages holds while it runs, beside what is
    its own: micro-batches in full, and from I to W. The lists change with the next one."""
    at = {stage: place for place, stage in enumerate(stages)}
    full, weight = [0] * len(stages), [0] * len(stages)
    for action in actions:
        kind = action.kind
        if kind not in _HOLDS:
            continue
        place = at[action.stage]
        if kind is not K.FORWARD:
            (weight if kind is K.BACKWARD_WEIGHT else full)[place] -= 1
        yield action, full, weight
        if kind is K.FORWARD:
            full[place] += 1
        elif kind is K.BACKWARD_INPUT:
            weight[place] += 1


def ending_states(actions: Sequence[Action]) -> tuple[EndingState, ...]:
    """The states in which the actions of one rank run from the first that is the last backward of its stage."""
    stages = sorted({action.stage for action in actions})
    left = Counter(action.stage for action in actions if action.kind in _HOLDS)
    seen: dict[EndingState, None] = {}
    over: list[int] = []
    for action, full, weight in _held_in(actions, stages):
        left[action.stage] -= 1
        last = not left[action.stage]
        if last or over:
            held = tuple(zip(stages, full, weight, strict=True))
            seen[EndingState(LiveState(action.stage, action.kind, held), last, tuple(over))] = None
        if last:
            over.append(action.stage)
    return tuple(seen)


def live_states(actions: Sequence[Action]) -> tuple[LiveState, ...]:
    """The states in which the actions of one rank run, those left out that hold no more than another of the same stage
    and kind in any part: they are never a peak. Few, because a steady state repeats."""
    stages = sorted({action.stage for action in actions})
    seen: dict[tuple[Any, ...], None] = {}  # stage, kind, what each stage holds: full, then weight
    for action, full, weight in _held_in(actions, stages):
        seen[action.stage, action.kind, *full, *weight] = None
    groups: dict[tuple[int, ActionKind], list[tuple[int, ...]]] = {}
    for running, kind, *held in seen:
        groups.setdefault((running, kind), []).append(tuple(held))
    return tuple(
        LiveState(running, kind, tuple(zip(stages, held[: len(stages)], held[len(stages) :], strict=True)))
        for (running, kind), states in groups.items()
        for held in _heaviest(states)
    )


def _heaviest(states: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those that no other outweighs in every part."""
    held = np.array(states)  # all unlike, so that each is outweighed by itself alone at least
    parts = np.array_split(held, max(held.size * len(held) // _AT_ONCE, 1))
    outweighed = np.concatenate([(held[:, None] >= part).all(axis=2).sum(axis=0) for part in parts])
    return [state for state, count in zip(states, outweighed, strict=True) if count == 1]


def activation_profile(
    stage: StageWork, *, reduce_every_micro: bool, flat: bool = False, shards: Sequence[int] = (), halves: bool = False
) -> ActivationProfile:  # fmt: skip
    """Walk the blocks of a stage forward and backward once.

    The gather of the next block and the reduction of the last one run beside a block, as FSDP2 has them, and all of a
    block's gradients are counted beside the whole of its backward: plans are on the safe side. `flat` is FSDP1 to the
    byte: gradients stand where they are made until the pass is over, and are then copied into one tensor, the
    parameters still there; no reduction is under way beside the next block. `shards`: bytes of each block's share of
    gradients where it appears only when it is reduced, as in a step of one micro-batch. `halves`: some backwards are split.

    Source: torch/distributed/fsdp/_flat_param.py, whose parameters are views of one, so that their gradients are joined.
    """
    links = stage.links
    saved = stage.input_bytes + stage.output_bytes + sum(block.saved_bytes for block in links)
    weight_saved = stage.input_bytes + sum(_weight_saved(block) for block in links)
    reductions = [_reduce_bytes(block) if reduce_every_micro else 0 for block in links]
    made = [block.made_bytes for block in links]
    weight = _weight_peak(links[::-1], weight_saved, reductions[::-1])
    unmade = list(shards) or made
    backward = _backward_peak(links[::-1], saved, reductions[::-1], unmade[::-1], flat)
    kept = [_weight_saved(block) for block in links]
    half = _half_peak(links[::-1], saved, sum(unmade), kept[::-1]) if halves else None
    if halves and any(block.half_temp_bytes is None for block in links):  # as reductions beside a whole pass
        known = _backward_peak(links[::-1], saved, reductions[::-1], unmade[::-1], flat, kept=kept[::-1])
        half = max(known, backward, key=_total)
    last_weight, last = weight, backward
    if stage.under_way is not None:
        under_way = _in_backward_order(stage.under_way)
        last = _backward_peak(links[::-1], saved, reductions[::-1], unmade[::-1], flat, under_way)
        last_weight = _weight_peak(links[::-1], weight_saved, reductions[::-1], under_way)
    if any(block.weight_again or block.half_idle for block in links):  # W is a whole pass
        least = Peak(weight_saved, max(reductions, default=0))  # as `_weight_peak`
        weight, last_weight = (max(least, whole, key=_total) for whole in (backward, last))
    return ActivationProfile(
        saved=saved,
        weight_saved=weight_saved,
        unmade=sum(made),
        forward=_forward_peak(links, sum(unmade), stage.input_bytes),
        backward=backward,
        weight=weight,
        first_half=half,
        last_backward=last,
        last_weight=last_weight,
    )


def _in_backward_order(found: UnderWay) -> list[tuple[int, int]]:
    """Bytes that reductions hold beside each link and when it is over, less what has gone by then."""
    gone, pairs = 0, []
    for beside, after, own in reversed([*zip(found.beside, found.after, found.gone, strict=True)]):
        pairs.append((beside - gone, after - gone - own))
        gone += own
    return pairs


def _weight_saved(block: BlockWork) -> int:
    return block.saved_bytes if block.weight_saved_bytes is None else block.weight_saved_bytes


def _gather_bytes(block: BlockWork) -> int:
    return sum(gather.size_bytes for gather in block.gathers) - block.rooted_bytes


def _message_bytes(block: BlockWork) -> int:
    """Of encoded parameters, which stand beside those that they are decoded to until the gather is over."""
    return sum(
        ceil(wire_bytes(gather.compression[-1], gather.size_bytes, gather.item_bytes))
        for gather in block.gathers
        if any(gather.compression)
    )


def _reduce_bytes(block: BlockWork) -> int:
    """Whole gradients of a block: what its reduce-scatters take in."""
    return sum(c.size_bytes for c in block.reduce if c.op is CollectiveOp.REDUCE_SCATTER)


def _forward_peak(links: Sequence[BlockWork], unmade: int, handed: int) -> Peak:
    """Largest moment of a forward: a block runs on top of what the blocks before it saved and of what the stage was `handed`, which
    the first block counts itself, and before there are gradients, of which `unmade` bytes are counted elsewhere, and parameters that
    come with later blocks."""
    gathers, messages = [*map(_gather_bytes, links), 0], [*map(_message_bytes, links), 0]
    passing = [*(block.passing_bytes for block in links), 0]
    held, coming = 0, sum(passing[1:])  # but for those of the next block, which come beside this one
    peaks = [Peak(0, 0, -unmade, -sum(passing))]
    for number, block in enumerate(links):
        held += block.saved_bytes
        coming -= passing[number + 1]
        beside = gathers[number + 1] + messages[number + 1]
        peaks.append(Peak(held + block.forward_temp_bytes, gathers[number] + beside, -unmade, -coming))
        held += 0 if number else handed
    return max(peaks, key=_total)


def _backward_peak(
    links: Sequence[BlockWork], saved: int, reductions: Sequence[int], unmade: Sequence[int], flat: bool,
    under_way: Sequence[tuple[int, int]] = (), kept: Sequence[int] = (),
) -> Peak:  # fmt: skip
    """Largest moment of a backward: `links` in backward order, each freeing what it saved when it is done, but for what is `kept`.
    `under_way`: beside each, and when it is done."""
    gathers, messages = [*map(_gather_bytes, links), 0], [*map(_message_bytes, links), 0]
    held, reducing, left, gone = saved, 0, sum(unmade), 0
    peaks = [Peak(0, 0, 0, -sum(block.passing_bytes for block in links))]  # when it is over
    for number, block in enumerate(links):
        temp = block.backward_temp_bytes
        if flat and block.standing_temp_bytes is not None:
            temp = max(block.standing_temp_bytes - reductions[number], block.left_bytes)
        beside = gathers[number + 1] + messages[number + 1] + (0 if flat else reducing)
        beside += under_way[number][0] if under_way else 0
        whole = gathers[number] + reductions[number] + beside + min(temp, 0)  # not all of it at one moment
        peaks.append(Peak(held + block.recomputed_bytes + max(temp, 0), whole, -left, -gone))
        held += block.waiting_bytes - block.saved_bytes + (kept[number] if kept else 0)
        left -= unmade[number]
        gone += block.passing_bytes
        reducing = reductions[number]
        if under_way:
            peaks.append(Peak(held, under_way[number][1], -left, -gone))
    return max(peaks, key=_total)


def _half_peak(links: Sequence[BlockWork], saved: int, unmade: int, kept: Sequence[int]) -> Peak:
    """Largest moment of the first half of a split backward, `links` in backward order: a block runs beside what is gathered for it and
    for the next one, and frees what it saved but for what is `kept`. No gradients of weights are made, and none is reduced."""
    gathers, messages = [*map(_gather_bytes, links), 0], [*map(_message_bytes, links), 0]
    held, peaks = saved, [Peak(saved, 0, -unmade)]
    for number, block in enumerate(links):
        if not block.half_idle:
            temp = block.half_temp_bytes or 0
            beside = gathers[number] + gathers[number + 1] + messages[number + 1]
            running = held + block.recomputed_bytes + max(temp, 0)
            peaks.append(Peak(running, beside + min(temp, 0), -unmade))
        held += kept[number] - block.saved_bytes
    return max(peaks, key=_total)


def _weight_peak(
    links: Sequence[BlockWork],
    saved: int,
    reductions: Sequence[int],
    under_way: Sequence[tuple[int, int]] = (),
) -> Peak:
    """Largest moment of the second half of a split backward, `links` in backward order: the gradients of a block's weights are made,
    beside the last reduction, and are reduced when what was kept for them has gone."""
    sums = under_way or [(0, 0)] * len(links)
    if not any(block.weight_temp_bytes for block in links):
        return Peak(
            saved, max(map(sum, pairwise([*reductions, 0])), default=0) + max(map(max, sums), default=0)
        )
    held, reducing, peaks = (
        saved,
        0,
        [Peak(saved, max(reductions, default=0))],
    )  # and not less: it is what bounds say
    for block, reduction, (beside, after) in zip(links, reductions, sums, strict=True):
        peaks.append(Peak(held + block.weight_temp_bytes, reducing + beside))
        held -= _weight_saved(block)
        if block.weight_reduced_bytes:
            peaks.append(Peak(held, block.weight_reduced_bytes + after))
            reducing = reduction
    return max(peaks, key=_total)


def _total(peak: Peak) -> int:
    return peak.activations + peak.buffers + peak.gradients + peak.parameters


def rank_memory(
    rank: int, states: Sequence[LiveState], stages: Sequence[StageWork], profiles: Sequence[ActivationProfile],
    ends: Sequence[EndingState] = (),
) -> StageMemory:  # fmt: skip
    """Bytes of one rank by component at its peak; they sum to `peak`. `ends`: where reductions hold more than gradients before all is over."""
    own = sorted({stage for state in states for stage, _, _ in state.held})
    parameters = sum(stages[stage].parameter_bytes for stage in own)
    gradients = sum(stages[stage].gradient_bytes for stage in own)
    optimizer = sum(stages[stage].optimizer_bytes for stage in own)
    static_buffers = sum(stages[stage].buffer_bytes for stage in own)
    peaks = [_peak_in(state, profiles) for state in states]
    peaks += [_ending_peak(end, stages, profiles) for end in ends]
    if any(stages[stage].under_way is not None for stage in own):
        peaks.append(Peak(0, _waiting_bytes([stages[stage] for stage in own])))
    best = max(peaks, key=_total, default=Peak())
    buffers, parameters = static_buffers + best.buffers, parameters + best.parameters
    gradients += best.gradients
    return StageMemory(
        stage=rank, parameters=parameters, gradients=gradients, optimizer=optimizer,
        activations=best.activations, buffers=buffers,
        peak=parameters + gradients + optimizer + best.activations + buffers,
    )  # fmt: skip


def _peak_in(state: LiveState, profiles: Sequence[ActivationProfile], *, last: bool = False) -> Peak:
    """An action's peak, and what is held beside it."""
    held = sum(
        full * profiles[stage].saved + weight * profiles[stage].weight_saved
        for stage, full, weight in state.held
    )
    unmade = sum((full + weight) * profiles[stage].unmade for stage, full, weight in state.held)
    own = profiles[state.stage]
    backward, weight = (own.last_backward, own.last_weight) if last else (own.backward, own.weight)
    peak = {K.FORWARD: own.forward, K.BACKWARD_WEIGHT: weight}.get(state.kind, backward)
    if state.kind is K.BACKWARD_INPUT and own.first_half is not None:
        peak = own.first_half
    return Peak(held + peak.activations, peak.buffers, peak.gradients - unmade, peak.parameters)


def _ending_peak(
    end: EndingState, stages: Sequence[StageWork], profiles: Sequence[ActivationProfile]
) -> Peak:
    """As `_peak_in`, beside what reductions of other stages hold."""
    found = _peak_in(end.state, profiles, last=end.last)
    ended = (stages[stage].under_way for stage in end.over)
    left = sum(one.left - sum(one.gone) for one in ended if one is not None)
    return replace(found, buffers=found.buffers + left)


def _waiting_bytes(stages: Sequence[StageWork]) -> int:
    """The most that reductions hold when all backwards are over: they are waited for one stage after the other."""
    found = [stage.under_way for stage in stages if stage.under_way is not None]
    left = sum(one.left for one in found)
    return max((left - one.left + one.ending for one in found), default=0) - sum(
        sum(one.gone) for one in found
    )


def memory_by_rank(
    states: Sequence[Sequence[LiveState]], stages: Sequence[StageWork], *, reduce_every_micro: bool,
    ranks: Sequence[Sequence[Action]] = (),
) -> tuple[StageMemory, ...]:  # fmt: skip
    """Peak memory of every pipeline rank, from `live_states` of each; and from its actions where reductions hold more than gradients."""
    known: dict[int, ActivationProfile] = {}
    halves = any(state.kind is K.BACKWARD_INPUT for own in states for state in own)
    for stage in stages:
        if id(stage) not in known:
            known[id(stage)] = activation_profile(stage, reduce_every_micro=reduce_every_micro, halves=halves)
    profiles = [known[id(stage)] for stage in stages]
    copies = any(
        one is not None and any((*one.beside, *one.after, one.left)) for one in (s.under_way for s in stages)
    )
    ends = [ending_states(actions) for actions in ranks] if copies else [()] * len(states)
    return tuple(rank_memory(rank, own, stages, profiles, ends[rank]) for rank, own in enumerate(states))
