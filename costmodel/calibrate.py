"""Corrects a device's constants from measured step times.

A few *corrections*, each one factor on a family of constants (how fast kernels run, how fast the network is,
what a launch costs), are fitted to the logarithms of measured over predicted times:

    minimise  sum_i h((log measured_i - log predicted_i(x)) / NOISE)  +  sum_j (x_j / spread_j)^2

where h(r) is r^2 up to 1 and 2 |r| - 1 beyond (Huber: a row that nothing explains must not bend the rest), x_j is
the logarithm of factor j and `spread_j` how far a factor of its kind may stray from one (a prior: three rows cannot
overthrow a datasheet). Always fewer corrections than rows. Gauss-Newton with derivatives by finite differences: the
prediction is a program simulated, with no formula to differentiate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp

import numpy as np
from numpy.typing import NDArray

from autoparallel.profiles.hardware import Device, Provenance, Residual, ValueKind

# What the best constants of a source leave of its rows (log scale): repeated runs differ by 0.02, the forms of the
# model leave the rest. Kind: measured, on the sources of benchmarks/published/training_rows.csv.
NOISE = 0.05
STEP = 0.02  # finite difference, log scale
ITERATIONS = 6

Predict = Callable[[Device], Sequence[float]]
Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """One factor on every constant whose key starts with one of `prefixes`; > 1 is faster."""

    name: str
    prefixes: tuple[str, ...]
    inverse: bool  # the constants are times, not rates
    spread: float  # of log(factor), prior


# In the order they are taken as rows allow. Spread of kernels: the one with which the other rows of a source are met best after
# three random ones, of sources that constants were fitted to (where less is better) and of others (more). Of network and
# launch: how far their factors lie apart when each source is fitted on all of its rows. Kind: measured.
CORRECTIONS = (
    Correction(
        name="kernels",
        prefixes=("gemm.efficiency.", "gemm.memory_efficiency", "attention.forward", "attention.backward", "memory.efficiency."),
        inverse=False,
        spread=0.07,
    ),
    Correction(
        name="network",
        prefixes=("collective.efficiency_", "collective.nvls_efficiency"),
        inverse=False,
        spread=0.25,
    ),
    Correction(name="launch", prefixes=("launch_s.", "kernel.start_s"), inverse=True, spread=0.25),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The corrected device, the factors, and what they did to the errors (relative, one a row)."""

    device: Device
    factors: tuple[tuple[str, float], ...]
    errors_before: tuple[float, ...]
    errors_after: tuple[float, ...]
    errors_held_out: tuple[float, ...]  # each row predicted from a fit to the others; () where not asked for


def correct(device: Device, factors: dict[str, float], source: str) -> Device:
    """`device` with the named corrections applied; every changed figure says so in its provenance."""
    constants, provenance = dict(device.constants), dict(device.provenance)
    for correction in CORRECTIONS:
        factor = factors.get(correction.name, 1.0)
        if factor == 1.0:
            continue
        for key in constants:
            if key.startswith(correction.prefixes):
                constants[key] *= 1 / factor if correction.inverse else factor
                before = provenance.get(f"constants.{key}")
                was = f"; was {before.kind} ({before.source})" if before else ""
                provenance[f"constants.{key}"] = Provenance(
                    kind=ValueKind.FITTED, source=f"{correction.name} x {factor:.4f}: {source}{was}"
                )
    return replace(device, constants=constants, provenance=provenance)


def calibrate(
    device: Device, predict: Predict, measured_s: Sequence[float], *, source: str, held_out: bool = True
) -> Calibration:
    """Fit the corrections to measured step times.

    `predict(device)` gives one step time (seconds) per measured row. With n rows at most the first min(3, n - 1)
    corrections are fitted, with one row none. With `held_out`, each row is also predicted from a fit to the others,
    and of 0, 1, 2, … corrections that number is kept which does best on rows held out.
    """
    measured = np.asarray(measured_s, dtype=np.float64)
    assert (measured > 0).all()
    most = max(0, min(len(CORRECTIONS), len(measured) - 1))
    before = _errors(predict(device), measured)
    outside: tuple[float, ...] = ()
    if held_out and len(measured) > 2:
        most, outside = _best_count(device, predict, measured, before, most)
    chosen = CORRECTIONS[:most]
    fitted = _fit(device, predict, measured, chosen, np.arange(len(measured)))
    corrected = correct(device, _factors(chosen, fitted), source)
    after = _errors(predict(corrected), measured)
    if outside:
        corrected = replace(corrected, residuals={**corrected.residuals, "step": _step_residual(outside)})
    return Calibration(
        device=corrected,
        factors=tuple(_factors(chosen, fitted).items()),
        errors_before=before,
        errors_after=after,
        errors_held_out=outside,
    )


def _best_count(
    device: Device, predict: Predict, measured: Vector, before: tuple[float, ...], most: int
) -> tuple[int, tuple[float, ...]]:
    """How many corrections do best on rows held out, and the errors of those rows; one more must earn its place."""
    count, errors = 0, before
    for more in range(1, min(most, len(measured) - 2) + 1):
        found = tuple(
            _held_out_error(device, predict, measured, row, CORRECTIONS[:more])
            for row in range(len(measured))
        )
        if _size(found) < _size(errors):
            count, errors = more, found
    return count, errors


def _size(errors: Sequence[float]) -> float:
    """Mean absolute error."""
    return sum(abs(e) for e in errors) / len(errors)


def _step_residual(errors: Sequence[float]) -> Residual:
    """What calibration leaves of whole steps, on rows held out: the width of later predictions' intervals."""
    sizes = sorted(abs(e) for e in errors)
    return Residual(
        samples=len(sizes),
        mean_absolute_error=_size(errors),
        p90_absolute_error=sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        bias=sum(errors) / len(errors),
    )


def _fit(
    device: Device, predict: Predict, measured: Vector, chosen: Sequence[Correction], rows: NDArray[np.int64]
) -> Vector:
    """Log factors by damped Gauss-Newton on the given rows."""
    x = np.zeros(len(chosen))
    if not chosen:
        return x
    prior = np.array([1 / c.spread**2 for c in chosen])
    target = np.log(measured[rows])

    def logs(at: Vector) -> Vector:
        predicted = predict(correct(device, _factors(chosen, at), "fit"))
        return np.log(np.asarray(predicted, dtype=np.float64)[rows])

    for _ in range(ITERATIONS):
        now = logs(x)
        jacobian = np.stack([(logs(x + STEP * unit) - now) / STEP for unit in np.eye(len(x))], axis=1)
        missed = (target - now) / NOISE
        weighted = jacobian.T / np.maximum(np.abs(missed), 1.0)
        normal = weighted @ jacobian / NOISE**2 + np.diag(prior)
        gradient = weighted @ missed / NOISE - prior * x
        move = np.linalg.solve(normal, gradient)
        x = x + np.clip(move, -0.5, 0.5)
        if np.abs(move).max() < 1e-3:
            break
    return x


def _factors(chosen: Sequence[Correction], x: Vector) -> dict[str, float]:
    return {c.name: exp(float(value)) for c, value in zip(chosen, x, strict=True)}


def _held_out_error(
    device: Device, predict: Predict, measured: Vector, row: int, chosen: Sequence[Correction]
) -> float:
    """Error of one row under the fit to all others."""
    others = np.array([i for i in range(len(measured)) if i != row])
    x = _fit(device, predict, measured, chosen, others)
    predicted = predict(correct(device, _factors(chosen, x), "held out"))[row]
    return float(predicted / measured[row] - 1)


def _errors(predicted_s: Sequence[float], measured: Vector) -> tuple[float, ...]:
    return tuple(float(p / m - 1) for p, m in zip(predicted_s, measured, strict=True))
