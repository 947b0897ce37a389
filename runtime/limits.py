"""What of the planner's space the runtime does not run, as constraints for a search. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

# Axes that can be planned, but not run yet.
_AXES: Mapping[str, object] = {"mesh.cp": 1, "mesh.ep": 1}
_SPLIT_BACKWARD = ("zb1p", "zbv", "dualpipev")


def limits(constraints: Mapping[str, object]) -> dict[str, object]:
    """The constraints, by dotted key, that leave a search with strategies that the runtime runs.

    `constraints` are those that there are already: some of them can be run with some meshes only.
    """
    found = dict(_AXES)
    if constraints.get("pipeline.schedule") in _SPLIT_BACKWARD:  # see runtime.pipeline_module
        found["mesh.dp_shard"] = 1
    if constraints.get("grad_sync.algorithm") == "hierarchical":  # see runtime.replicas
        found["mesh.dp_shard"] = 1
    if constraints.get("execution.kernels") == "compiled":  # see runtime.compiled
        found["mesh.tp"] = 1
    return found
