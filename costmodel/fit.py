"""Fits a device's constants to measured times: robustly, family by family, each constant with its residuals.

For one family of samples and the constants c_j that decide their times:

    minimise  sum_i huber(log measured_i - log predicted_i(c))  +  sum_j (log c_j - log c_j(base))^2 / SPREAD^2

by damped Gauss-Newton on log c with finite differences (the forms have maxima and ceilings, so that no formula
is differentiated), reweighted so that a sample further off than HUBER counts by its distance, not its square:
one disturbed measurement cannot pull a constant. The weak prior decides only what the samples leave open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from autoparallel.costmodel.kernels import kernel_s
from autoparallel.costmodel.program import Kernel
from autoparallel.profiles.hardware import Device, Provenance, Residual, ValueKind

HUBER = 0.1  # log scale: beyond, a sample is taken for disturbed
SPREAD = 1.5  # of log(constant) around the base's: a factor of four either way
STEP = 0.02  # finite difference, log scale
ITERATIONS = 25
LARGEST_MOVE = 0.5
MOST = {
    "gemm.exposed": 1.0,
    "gemm.efficiency.full": 1.0,
    "gemm.efficiency.half": 1.0,
    "attention.tail_forward": 1.0,
    "attention.tail_backward": 1.0,
}  # shares of a whole
NOISE = 0.05  # of one measurement, log scale

Vector = NDArray[np.float64]
Price = Callable[[Device], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A measured call: the kernels that the cost model prices it as, and its seconds."""

    family: str
    label: str
    kernels: tuple[Kernel, ...]
    seconds: float


def fit_constants(
    device: Device, keys: Sequence[str], price: Price, measured_s: Sequence[float], *, source: str
) -> tuple[Device, Residual]:
    """`device` with its constants `keys` fitted, so that `price(device)` comes close to `measured_s`.

    Keys are those of `Device.constants`; one whose value is 0 stays (its logarithm has none).
    """
    chosen = [key for key in keys if device.constants[key] > 0]
    base = np.array([log(device.constants[key]) for key in chosen])
    most = np.log([MOST.get(key, np.inf) for key in chosen])

    def at(x: Vector) -> Sequence[float]:
        return price(with_constants(device, dict(zip(chosen, np.exp(x), strict=True))))

    x = least_logs(base, at, measured_s, most=most)
    fitted = with_constants(device, {key: exp(v) for key, v in zip(chosen, x, strict=True)}, source=source)
    return fitted, residual(price(fitted), measured_s)


def least_logs(
    base: Vector,
    predict: Callable[[Vector], Sequence[float]],
    measured_s: Sequence[float],
    *,
    most: Vector | float = np.inf,
) -> Vector:
    """The logarithms of constants, starting at `base` and at most `most`, that predict the measurements best."""
    target = np.log(np.asarray(measured_s, dtype=np.float64))
    x = base.copy()

    def logs(at: Vector) -> Vector:
        return np.log(np.asarray(predict(at), dtype=np.float64))

    for _ in range(ITERATIONS if len(base) else 0):
        now = logs(x)
        error = target - now
        jacobian = np.stack([(logs(x + STEP * unit) - now) / STEP for unit in np.eye(len(x))], axis=1)
        weights = np.minimum(1.0, HUBER / np.maximum(np.abs(error), 1e-12)) / NOISE**2
        normal = jacobian.T @ (jacobian * weights[:, None]) + np.eye(len(x)) / SPREAD**2
        move = np.linalg.solve(normal, jacobian.T @ (weights * error) - (x - base) / SPREAD**2)
        x = np.minimum(x + np.clip(move, -LARGEST_MOVE, LARGEST_MOVE), most)
        if np.abs(move).max() < 1e-4:
            break
    return x


def with_constants(
    device: Device, values: dict[str, float], *, source: str = "", kind: ValueKind = ValueKind.FITTED
) -> Device:
    """`device` with other constants; with a `source`, their provenance says that they were fitted to it, or measured."""
    provenance = dict(device.provenance)
    if source:
        known = Provenance(kind=kind, source=source)
        provenance |= {f"constants.{key}": known for key in values}
    return replace(device, constants={**device.constants, **values}, provenance=provenance)


def residual(predicted_s: Sequence[float], measured_s: Sequence[float]) -> Residual:
    """Errors of predictions."""
    errors = [p / m - 1 for p, m in zip(predicted_s, measured_s, strict=True)]
    sizes = sorted(abs(e) for e in errors)
    return Residual(
        samples=len(errors),
        mean_absolute_error=sum(sizes) / len(sizes),
        p90_absolute_error=sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        bias=sum(errors) / len(errors),
    )


def kernel_price(samples: Sequence[Sample], kernels: str) -> Price:
    """Seconds of each sample on a device; `kernels` is how it ran (eager)."""
    return lambda device: [sum(kernel_s(k, device, kernels) for k in s.kernels) for s in samples]
