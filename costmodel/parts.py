"""Parts of a machine and its software on which a step's time rests: each one factor on a family of constants.

What is not known of a machine is a vector x of logarithms, one a part (> 0: faster than the profile says), with the prior

    x ~ N(0, diag(spread^2) + COMMON^2)        (COMMON: what all parts share)

and a step whose predicted time has the slopes s (d log time / d x = -s) was measured at log measured = log predicted - s.x + noise.
Spreads are how far parts lie apart between publishers of whom no constant knew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from autoparallel.profiles.hardware import Device, Posterior, Provenance, ValueKind

Vector = NDArray[np.float64]
STEP = 0.05  # finite difference, log scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One factor on every constant whose key starts with one of `prefixes`; > 1 is faster."""

    name: str
    says: str
    prefixes: tuple[str, ...]
    inverse: bool  # the constants are times, not rates
    spread: float  # of log(factor), prior


# Spreads, COMMON and NOISE. Kind: fitted. Source: the likelihood of left-out publishers' rows (`python -m benchmarks.scatter`), which
# leaves those of links and overlap nearly open: a quarter to a half stand there.
PARTS = (
    Part(
        name="products", says="matrix products", prefixes=("gemm.efficiency.", "gemm.memory_efficiency"),
        inverse=False, spread=0.1,
    ),
    Part(
        name="attention", says="flash attention", prefixes=("attention.forward", "attention.backward"),
        inverse=False, spread=0.15,
    ),
    Part(
        name="passes", says="memory-bound kernels", prefixes=("memory.efficiency.",), inverse=False, spread=0.2
    ),
    Part(
        name="host", says="the host's launches",
        prefixes=("launch_s.", "kernel.start_s", "gemm.grouped_expert_s", "collective.host_s", "optimizer.tensor_s"),
        inverse=True, spread=0.1,
    ),
    Part(
        name="inner-links", says="links inside a node",
        prefixes=("collective.efficiency_inner", "collective.nvls_efficiency"), inverse=False, spread=0.25,
    ),
    Part(
        name="outer-links", says="links between nodes", prefixes=("collective.efficiency_outer",),
        inverse=False, spread=0.25,
    ),
    Part(
        name="latency", says="starts and hops of collectives",
        prefixes=("collective.start_s", "collective.latency", "collective.peer_s", "collective.nvls_rank_s"),
        inverse=True, spread=0.4,
    ),
    Part(
        name="overlap", says="what streams take from each other", prefixes=("overlap.",), inverse=True, spread=0.5
    ),
)  # fmt: skip
COMMON = 0.1
NOISE = 0.05  # what the best factors of a source leave of a row
LINKS = ("inner-links", "outer-links", "latency")


def prior_covariance() -> Vector:
    """Of all parts before anything was measured."""
    return np.diag([part.spread**2 for part in PARTS]) + COMMON**2


def correct(device: Device, factors: dict[str, float], source: str) -> Device:
    """`device` with each named part so many times as fast; every changed figure says so in its provenance."""
    constants, provenance = dict(device.constants), dict(device.provenance)
    for part in PARTS:
        factor = factors.get(part.name, 1.0)
        if factor == 1.0:
            continue
        for key in constants:
            if key.startswith(part.prefixes):
                constants[key] *= 1 / factor if part.inverse else factor
                before = provenance.get(f"constants.{key}")
                was = f"; was {before.kind} ({before.source})" if before else ""
                provenance[f"constants.{key}"] = Provenance(
                    kind=ValueKind.FITTED, source=f"{part.name} x {factor:.4f}: {source}{was}"
                )
    return replace(device, constants=constants, provenance=provenance)


def factors_of(x: Sequence[float] | Vector) -> dict[str, float]:
    """The factors of logarithms, by part."""
    return {part.name: exp(value) for part, value in zip(PARTS, x, strict=True)}


def slopes(step_s: Callable[[Device], Sequence[float]], device: Device, now_s: Sequence[float]) -> Vector:
    """s by step and part: by how much each step's logarithm falls as a part gets faster."""
    columns = []
    for part in PARTS:
        faster = step_s(correct(device, {part.name: exp(STEP)}, "probe"))
        columns.append([-log(after / before) / STEP for after, before in zip(faster, now_s, strict=True)])
    return np.array(columns, dtype=np.float64).T


def covariance_of(posterior: Posterior | None) -> Vector:
    """What is left unknown of all parts; the prior where nothing was measured."""
    if posterior is None or posterior.parts != tuple(part.name for part in PARTS):  # or of another version
        return prior_covariance()
    return np.array(posterior.covariance, dtype=np.float64)
