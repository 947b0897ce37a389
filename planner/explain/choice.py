"""Of the plans that a prediction cannot tell apart, the one that a careful engineer would sign.

A cost model that is off by some percent cannot say which of two plans within two percent of each other is faster. The optimum
is proved all the same; among what is within `within` of it the simplest is chosen, in this order: what fits with room to
spare on devices and hosts, what keeps nothing on the hosts, fewer kinds of parallelism, schedules and recomputation that
are easier to follow, fewer ways to share state; then the faster one.
"""

from __future__ import annotations

from autoparallel.costmodel.confidence import fits
from autoparallel.costmodel.prediction import Held
from autoparallel.planner.strategy.types import AXES, Offload, Strategy

# A plan is called tight where it fits with less than this probability (`costmodel.confidence.fits`), or fills a host to this
# share: pinned host memory is taken in powers of two. Kind: formula: one of twenty; a step of that size.
SURE, TIGHT_HOST = 0.95, 0.8
WITHIN = 0.02  # share of the optimum that a prediction cannot tell apart, unless the user says otherwise
SCHEDULES = ("none", "gpipe", "1f1b", "interleaved-1f1b", "zb1p", "zbv", "dualpipev", "program")
MODES = ("none", "full", "selective", "operators")


def complexity(strategy: Strategy, held: Held | None = None) -> tuple[float, ...]:
    """How much there is to a plan: less is simpler. With `held` also how tight it is."""
    mesh, pipeline, recompute = strategy.mesh, strategy.pipeline, strategy.recompute
    kinds = sum(size > 1 for size in (mesh.pp, mesh.cp, mesh.tp, mesh.ep, mesh.data_parallel))
    lossy = any(method != "none" for method in (*strategy.grad_sync.compression, strategy.grad_sync.weights))
    return (
        float(held is not None and is_tight(held)),
        float((strategy.offload.optimizer > 0) + (strategy.offload.activations > 0)),
        float(lossy),
        float(kinds),
        float(mesh.order != AXES),
        float(SCHEDULES.index(pipeline.schedule)),
        float(MODES.index(recompute.mode)) + float(any(recompute.per_stage)),
        float(mesh.dp_shard > 1 and mesh.dp_replicate > 1),
        float(strategy.shard.zero),
        float(strategy.grad_sync.algorithm != "auto"),
        float(pipeline.virtual_stages),
    )


def is_tight(held: Held) -> bool:
    """Whether a plan fills devices or hosts to where a prediction may be wrong."""
    return fits(held) < SURE or held.host_bytes > TIGHT_HOST * held.host_capacity_bytes > 0


def simpler_because(chosen: Strategy, optimum: Strategy, tight: tuple[bool, bool]) -> str:
    """In words, what the chosen plan does without."""
    said = []
    if tight[1] and not tight[0]:
        said.append("has memory to spare")
    if chosen.offload == Offload() != optimum.offload:
        said.append("keeps nothing on the hosts")
    names = {
        "pp": "pipeline",
        "tp": "tensor parallelism",
        "cp": "context parallelism",
        "ep": "expert parallelism",
    }
    without = [
        name for axis, name in names.items() if getattr(chosen.mesh, axis) == 1 < getattr(optimum.mesh, axis)
    ]
    if without:
        said.append(f"needs no {' and no '.join(without)}")
    if chosen.pipeline.schedule != optimum.pipeline.schedule and chosen.mesh.pp > 1:
        said.append(f"runs {chosen.pipeline.schedule} instead of {optimum.pipeline.schedule}")
    if any(optimum.recompute.per_stage) and not any(chosen.recompute.per_stage):
        said.append("recomputes all blocks alike")
    return ", ".join(said) or "is simpler"
