"""Which backward kernels serve only the gradients of parameters: the W half of a zero-bubble schedule."""

from __future__ import annotations

from collections import defaultdict

from autoparallel.planner.capture.records import Launch, Trace


def weight_only_launches(trace: Trace) -> frozenset[int]:
    """Identities (`id`) of the backward launches that compute only the gradients of their own call's parameters.

    Walks the backward pass from its end: a launch is weight-only if all its outputs are parameter gradients, or
    are read by weight-only launches of the same call alone. What another call reads is a gradient of its input.
    """
    owner = {id(launch): index for index, call in enumerate(trace.calls) for launch in call.backward}
    readers: dict[int, list[tuple[int, bool]]] = defaultdict(list)  # storage -> (call, weight-only)
    result: set[int] = set()
    for launch in reversed(trace.backward):
        if launch.is_view:
            continue
        call = owner[id(launch)]
        useful = [
            all(same == call and only for same, only in readers[m.storage])
            for m in launch.outputs
            if readers[m.storage] or m.storage in trace.parameter_gradients
        ]
        weight_only = bool(useful) and all(useful)
        if weight_only:
            result.add(id(launch))
        for meta in launch.inputs:
            readers[meta.storage].append((call, weight_only))
    return frozenset(result)


def gradient_of(launch: Launch, weight_only: frozenset[int]) -> str:
    """ "weight" or "input", as `KernelSpec.gradient_of` has it."""
    return "weight" if id(launch) in weight_only else "input"
