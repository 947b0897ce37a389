"""What the gradient benchmarks reach on published runs; no change may lose it."""

from __future__ import annotations

from collections import defaultdict
from statistics import mean

from benchmarks import compression, gradients
from benchmarks.gradients import Result

# Of the speed-up over the baseline. The methods of the second line schedule by priorities across steps, of which only
# the best case is modelled.
FUSION_ERROR = {"WFBP-A2A": 0.10, "MG-WFBP": 0.07, "BSP-PS": 0.12, "WFBP-PS": 0.10}
FUSION_TAU = 0.8
COMPRESSION_ERROR = 0.11
COMPRESSION_TAU = 0.9


def test_fusion_methods_speed_up_as_published_and_in_that_order() -> None:
    results = [r for r in gradients.fusion_results() if not gradients.not_scored(r)]
    errors: dict[str, list[float]] = defaultdict(list)
    taus = []
    for group in gradients.groups_of(results):
        for method, error in gradients.speedup_errors(group).items():
            errors[method].append(abs(error))
        if (tau := gradients.kendall_tau(group)) is not None:
            taus.append(tau)
    for method, most in FUSION_ERROR.items():
        assert mean(errors[method]) <= most, (method, errors[method])
    assert mean(taus) >= FUSION_TAU


def test_compression_methods_speed_up_as_published_and_in_that_order() -> None:
    scored, reasons = compression.results()
    base = {r.devices: r for run, r in scored if run.family == "none"}
    by_devices: dict[int, list[Result]] = defaultdict(list)
    errors = []
    for run, r in scored:
        by_devices[r.devices].append(r)
        if run.family != "none":
            none = base[r.devices]
            errors.append(abs(none.predicted_s / r.predicted_s / (none.measured_s / r.measured_s) - 1))
    taus = [tau for group in by_devices.values() if (tau := gradients.kendall_tau(group)) is not None]
    assert mean(errors) <= COMPRESSION_ERROR, mean(errors)
    assert mean(taus) >= COMPRESSION_TAU
    assert all(reasons)
