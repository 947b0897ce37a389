"""The second half of a split backward pass (W) under FSDP2: the gradients of weights, made one after the other from the outputs back.

Where each micro-batch is reduced, or its gradients are cast, a unit is when it has them all: they stand until they have been copied
into what is reduced, and the last of them until that is over (`runtime/gradients/fsdp.py`, `run_weights`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoparallel.costmodel.program import BlockWork, Undivided
from autoparallel.planner.expand import state
from autoparallel.planner.expand.backward_memory import BackwardBytes, HalfBytes
from autoparallel.planner.expand.beside import Beside
from autoparallel.planner.expand.glue import Coming, Glue, GlueUnit, glue_peak
from autoparallel.planner.expand.schedules import SPLIT_BACKWARD
from autoparallel.planner.strategy.types import Strategy

ZERO_3 = 3  # the level at which parameters are freed when a pass is over


def is_split(strategy: Strategy) -> bool:
    """Whether backward passes are two, of FSDP2's modules."""
    return strategy.execution.fsdp2 and strategy.pipeline.schedule in SPLIT_BACKWARD


def with_halves(
    work: BlockWork, backward: BackwardBytes, units: Sequence[GlueUnit], strategy: Strategy, beside: Beside, *, repeated: bool
) -> BlockWork:  # fmt: skip
    """The memory of a block's two halves; `units` are what is gathered and reduced at once of it, in the order of the model."""
    whole = HalfBytes(  # of a pass that keeps nothing for another one
        peak=max((moment.running for moment in backward.moments), default=0), arrived=0,
        moments=tuple(replace(moment, made={}) for moment in backward.moments),
    )  # fmt: skip
    own, undivided, again = (
        _first_half(work, half, units, strategy, beside, repeated=repeated)
        for half in (*backward.halves, whole)
    )
    copies = strategy.mesh.cp > 1 and strategy.execution.dtensor
    autograds = Undivided(
        puts_off=backward.puts_off, saved_bytes=work.saved_bytes + backward.halves[-1].arrived, half_temp_bytes=undivided,
        again_temp_bytes=again, weight_temp_bytes=_copied_bytes(backward) if copies else 0,
    )  # fmt: skip
    work = replace(work, undivided=autograds, half_temp_bytes=own)
    # torch holds the last one in a loop that it has over several ranks: foreach_reduce, _fully_shard/_fsdp_collectives.py.
    largest = max((size for moment in backward.moments for size in moment.made.values()), default=0)
    if not (state.gradient_level(strategy) >= 2 or state.casts_parameters(strategy)):
        return replace(work, weight_temp_bytes=largest)
    made = reduced = before = 0
    for unit in (unit for unit in reversed(units) if unit.reduced):
        share = 0 if state.makes_gradients(strategy) else unit.share
        last = unit.last if state.shard_ranks(strategy) > 1 else 0
        made = max(made, unit.gradients + before)
        reduced = max(reduced, unit.reduced + max(unit.gradients, share + last))
        before = unit.reduced
    return replace(work, weight_temp_bytes=max(made, largest), weight_reduced_bytes=reduced)


def _copied_bytes(backward: BackwardBytes) -> int:
    """Gradients of weights when the largest of them is made, and copied (`runtime/context/values.py`)."""
    sizes = [size for moment in backward.moments for size in moment.made.values()]
    if not sizes:
        return 0
    at = sizes.index(max(sizes))
    return sum(sizes[: at + 1]) + sizes[at]


def _first_half(
    work: BlockWork, half: HalfBytes, units: Sequence[GlueUnit], strategy: Strategy, beside: Beside, *, repeated: bool
) -> int:  # fmt: skip
    """The peak of a block's first half above what it saved, and above what the walk counts of gathers: all parameters of the block and of
    the one ahead. Nothing is reduced. A unit that is gathered stands beside what it came in for a moment."""
    temp = half.peak + 2 * work.host_bytes  # as in whole passes, of activations that come back from the host
    if state.zero_level(strategy) < ZERO_3:
        return temp
    counted = sum(gather.size_bytes for gather in work.gathers) - work.rooted_bytes
    bare = [replace(unit, gradients=0, reduced=0, share=0, last=0) for unit in units]
    *inside, root = bare
    glue = Glue(units=tuple(inside), root=root, ending=None, coming=Coming.GATHERED, makes=False)
    running = max(temp, glue_peak(glue, half.moments, before=0)) if inside else temp
    ahead = beside.gathered + beside.apart
    if not repeated:
        return running - counted - ahead
    following = beside.gathered if beside.coming else 0
    comes = root.whole + root.gathering - work.recomputed_bytes
    return max(root.whole + following + running, comes) - counted - ahead


def with_whole_second_halves(
    works: Sequence[BlockWork], strategy: Strategy, stage: int, recomputed: int
) -> list[BlockWork]:
    """Of a stage whose blocks run again, `recomputed` of them whole, and whose layers cannot put off the gradients of their weights, the
    second half is a backward pass of its own (`runtime/gradients/split_backward.py`). The first stage, which received nothing that wants
    a gradient, has no first half: all that was kept stays."""
    if not all(work.undivided is None or work.undivided.puts_off for work in works):
        works = [_undivided(work, strategy, recomputed, first=not stage) for work in works]
        if state.zero_level(strategy) == ZERO_3:
            works = _gathered_again(works, first=not stage)
    again = recomputed or strategy.recompute.mode in ("full", "operators")
    shared = strategy.mesh.tp > 1 or any(w.recompute and w.weight_saved_bytes is None for w in works)
    if not (is_split(strategy) and again and shared and stage):
        return list(works)
    return [replace(work, weight_again=(*work.recompute, *work.backward_input)) for work in works]


def _gathered_again(works: Sequence[BlockWork], *, first: bool) -> list[BlockWork]:
    """Blocks whose parameters are gathered for second halves too, the next one's beside each; in a first stage, whose first halves do
    nothing, instead of for these."""
    sizes = [sum(gather.size_bytes for gather in work.regathers) - work.rooted_bytes for work in works]
    made, found = dict[tuple[int, int], BlockWork](), list[BlockWork]()
    for work, own, following in zip(works, sizes, [0, *sizes[:-1]], strict=True):
        key = (id(work), following)
        if key not in made:
            reduced = work.weight_reduced_bytes and work.weight_reduced_bytes + following
            temp = work.weight_temp_bytes + own + following
            made[key] = replace(
                work, weight_gathers=not first, weight_temp_bytes=temp, weight_reduced_bytes=reduced
            )
        found.append(made[key])
    return found


def _undivided(work: BlockWork, strategy: Strategy, recomputed: int, *, first: bool) -> BlockWork:
    """A block in a stage whose weights are not put off."""
    whole = work.undivided
    if whole is None:
        return work
    if first:
        return replace(work, weight_saved_bytes=work.saved_bytes, half_temp_bytes=0, half_idle=True)
    work = replace(work, weight_temp_bytes=max(work.weight_temp_bytes, whole.weight_temp_bytes))
    again = bool(work.recompute) and (recomputed > 0 or strategy.recompute.mode in ("full", "operators"))
    half = whole.again_temp_bytes if again else whole.half_temp_bytes
    return replace(
        work, weight_saved_bytes=None if again else whole.saved_bytes, half_temp_bytes=half,
    )  # fmt: skip
