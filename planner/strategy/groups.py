"""Whether the device groups that a strategy names for its pipeline ranks are there and large enough."""

from __future__ import annotations

from collections.abc import Iterator

from autoparallel.planner.strategy.runs import runs
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.hardware import Cluster


def group_problems(cluster: Cluster, strategy: Strategy) -> Iterator[str]:
    """What is wrong with `mesh.groups`; nothing where it is empty."""
    mesh, have = strategy.mesh, len(cluster.groups)
    named = mesh.groups
    if not named:
        return
    if len(named) != mesh.pp:
        yield (
            f"mesh.groups = {runs(named)}: one device group for each of the mesh.pp = {mesh.pp} pipeline ranks is "
            f"needed, not {len(named)}"
        )
        return
    if any(not 0 <= g < have for g in named):
        yield f"mesh.groups = {runs(named)}: {cluster.name} has the device groups 0 to {have - 1}"
        return
    if len(set(named)) > 1 and next((axis for axis in mesh.order if getattr(mesh, axis) > 1), "pp") != "pp":
        yield (
            "mesh.groups: pipeline ranks on groups of their own need pp outermost in mesh.order, not "
            f"{list(mesh.order)}"
        )
    each = mesh.devices // mesh.pp
    for g in sorted(set(named)):
        ranks, devices = named.count(g), cluster.groups[g].devices
        if ranks * each > devices:
            yield (
                f"mesh.groups = {runs(named)}: {ranks} pipeline ranks of {each} devices each do not fit in group "
                f"{g}, which has {devices} devices"
            )
