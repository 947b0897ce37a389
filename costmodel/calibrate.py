"""Corrects a device's constants from measured step times: a posterior over the parts of `parts.py`.

    minimise  sum_i h((log measured_i - log predicted_i(x)) / NOISE)  +  x' P^-1 x

where P is the prior's covariance and h(r) is r^2 up to 1 and 2 |r| - 1 beyond (Huber: a row that nothing explains must not bend the
rest). Gauss-Newton with derivatives by finite differences: the prediction is a program simulated, with no formula to differentiate.
What is left unknown is the covariance (P^-1 + sum_i w_i s_i s_i' / NOISE^2)^-1, s_i the slopes of row i. It stays with the device,
and intervals of later predictions are made of it (`confidence.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, sqrt

import numpy as np

from autoparallel.costmodel.parts import (
    NOISE,
    PARTS,
    Vector,
    correct,
    covariance_of,
    factors_of,
    prior_covariance,
    slopes,
)
from autoparallel.profiles.hardware import Device, Posterior, Residual

LINEARISATIONS = 2
REWEIGHTINGS = 20
# A part of whose variance less than this is left was told by the rows; more than the second was not. Kind: formula.
TOLD, UNTOLD = 0.5, 0.9

Predict = Callable[[Device], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What rows said of one part: its factor, and one standard deviation of its logarithm before and after."""

    name: str
    says: str
    factor: float
    before: float
    after: float

    @property
    def left(self) -> float:
        """The share of its variance that is left."""
        return (self.after / self.before) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The corrected device, what was learnt of each part, and the errors (relative, one a row)."""

    device: Device
    learnt: tuple[Learnt, ...]
    errors_before: tuple[float, ...]
    errors_after: tuple[float, ...]
    errors_held_out: tuple[float, ...]  # each row predicted from a fit to the others

    @property
    def factors(self) -> tuple[tuple[str, float], ...]:
        """The parts' factors."""
        return tuple((one.name, one.factor) for one in self.learnt)


def calibrate(device: Device, predict: Predict, measured_s: Sequence[float], *, source: str) -> Calibration:
    """Fit the parts to measured step times. `predict(device)` gives one step time (seconds) per measured row.

    Starts at the prior whatever was learnt before: the rows are all there is to know.
    """
    measured = np.asarray(measured_s, dtype=np.float64)
    assert (measured > 0).all()
    base = replace(device, posterior=None)
    before = np.asarray(predict(base), dtype=np.float64)
    now = before
    x: Vector = np.zeros(len(PARTS))
    for _ in range(LINEARISATIONS):
        at = correct(base, factors_of(x), "fit")
        s = slopes(predict, at, now.tolist())
        missed = np.log(now / measured) + s @ x  # of a machine exactly as the base says
        x, weight = solved(s, missed)
        now = np.asarray(predict(correct(base, factors_of(x), "fit")), dtype=np.float64)
    covariance = posterior_covariance(s, weight)
    corrected = correct(base, factors_of(x), source)
    posterior = Posterior(
        parts=tuple(part.name for part in PARTS),
        covariance=tuple(map(tuple, covariance.tolist())),
        rows=len(measured),
        noise=NOISE,
    )
    outside = _held_out(s, missed)
    residuals = {**corrected.residuals, "step": _step_residual(outside)}
    return Calibration(
        device=replace(corrected, posterior=posterior, residuals=residuals),
        learnt=_learnt(x, covariance),
        errors_before=tuple((before / measured - 1).tolist()),
        errors_after=tuple((now / measured - 1).tolist()),
        errors_held_out=outside,
    )


def solved(s: Vector, missed: Vector) -> tuple[Vector, Vector]:
    """The minimum of the linear problem, and what each row counts at it."""
    prior = np.linalg.inv(prior_covariance())
    x: Vector = np.zeros(s.shape[1])
    weight: Vector = np.ones(len(missed))
    for _ in range(REWEIGHTINGS):
        scaled = s.T * weight / NOISE**2
        x = np.asarray(np.linalg.solve(scaled @ s + prior, scaled @ missed), dtype=np.float64)
        weight = np.asarray(1 / np.maximum(np.abs(missed - s @ x) / NOISE, 1.0), dtype=np.float64)
    return x, weight


def posterior_covariance(s: Vector, weight: Vector) -> Vector:
    """What rows with these slopes and weights leave unknown of the parts."""
    return np.asarray(np.linalg.inv(np.linalg.inv(prior_covariance()) + (s.T * weight / NOISE**2) @ s))


def _learnt(x: Vector, covariance: Vector) -> tuple[Learnt, ...]:
    before = np.sqrt(np.diag(prior_covariance()))
    after = np.sqrt(np.diag(covariance))
    return tuple(
        Learnt(name=p.name, says=p.says, factor=exp(v), before=float(b), after=float(a))
        for p, v, b, a in zip(PARTS, x.tolist(), before, after, strict=True)
    )


def _held_out(s: Vector, missed: Vector) -> tuple[float, ...]:
    """Each row's error under the fit to all others, linearised."""
    found = []
    for row in range(len(missed)):
        others = np.arange(len(missed)) != row
        x, _ = solved(s[others], missed[others])
        found.append(exp(float(missed[row] - s[row] @ x)) - 1)
    return tuple(found)


def _step_residual(errors: Sequence[float]) -> Residual:
    """What calibration leaves of whole steps, on rows held out."""
    sizes = sorted(abs(e) for e in errors)
    return Residual(
        samples=len(sizes),
        mean_absolute_error=sum(sizes) / len(sizes),
        p90_absolute_error=sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        bias=sum(errors) / len(errors),
    )


def spread_of(posterior: Posterior | None, s: Vector) -> float:
    """One standard deviation of the logarithm of a step with these slopes."""
    return sqrt(float(s @ covariance_of(posterior) @ s) + NOISE**2)


def most_telling(posterior: Posterior | None, candidates: Vector, wanted: Vector) -> tuple[int, float]:
    """Which of the candidate steps (their slopes, a row each) to measure next: the one after which the mean variance of the
    `wanted` steps is least; and by which share it falls."""
    covariance = covariance_of(posterior)
    before = float(np.einsum("ij,jk,ik->i", wanted, covariance, wanted).mean())
    falls = []
    for s in candidates:
        gain = wanted @ covariance @ s
        falls.append(float((gain**2).mean() / (s @ covariance @ s + NOISE**2)))
    best = int(np.argmax(falls))
    return best, falls[best] / before if before else 0.0
