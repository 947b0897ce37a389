"""What of the planner's space the runtime does not run, as constraints for a search. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.errors import UserError
from autoparallel.planner.expand.schedules import SPLIT_BACKWARD
from autoparallel.planner.strategy.file import strategy_to_constraints
from autoparallel.planner.strategy.types import EmbeddingRule, Execution, Mesh, Strategy
from autoparallel.profiles.hardware import Cluster
from autoparallel.profiles.stacks import PLAIN
from autoparallel.runtime.experts.modules import expert_modules
from autoparallel.runtime.gradients.refusals import CHOOSES_NOTHING, sync_problems

# Flags of other software (`execution.stack`), and what the runtime does instead.
OTHER_SOFTWARE = {
    "async_tp": "does not run asynchronous tensor parallelism yet",
    "async_gradients": "does not run asynchronous tensor parallelism yet",
    "blocking_sends": "has stages that do not wait",
    "kept_outputs": "frees what a stage has sent",
    "blocking_launches": "does not wait for each kernel",
    "parameter_gathers": "gathers whole blocks",
    "late_gathers": "gathers at the end of a step",
    "hidden_dispatch": "computes one micro-batch at a time",
    "merged_dispatch": "sends a token to each expert",
}
ON_DEVICES = (EmbeddingRule(module="*", tier="device"),)  # of embedding tables
ONE_RANK = ("pp", "tp", "cp", "ep")  # axes along which tables in tiers are not run


def check_software(execution: Execution) -> None:
    """Refuse what other software does of its own accord. Raises UserError."""
    for key, instead in OTHER_SOFTWARE.items():
        if getattr(execution, key):
            stack = f' (stack = "{execution.stack}")' if execution.stack != PLAIN else ""
            raise UserError(f"execution.{key}{stack}: the runtime {instead}; set it to false")


def check_tables(rules: Iterable[EmbeddingRule], mesh: Mesh) -> None:
    """Refuse tables in tiers beside axes along which ranks have the same samples, or parts of the model. Raises UserError."""
    for rule in rules:
        for axis in ONE_RANK if rule.tier not in ("device", None) else ():
            if getattr(mesh, axis) > 1:
                raise UserError(
                    f'[[embedding]] module = "{rule.module}", tier = "{rule.tier}" with mesh.{axis} = {getattr(mesh, axis)}: '
                    'the runtime asks for rows from data-parallel ranks alone; set it to 1, or tier = "device"'
                )


def on_devices(constraints: Mapping[str, object]) -> dict[str, object]:
    """The constraint that leaves embedding tables on the devices, unless `constraints` say where they are: other tiers need an
    optimizer that the model makes."""
    return {} if constraints.get("embedding") else {"embedding": ON_DEVICES}


def graph_limits(graph: ModelGraph) -> dict[str, object]:
    """Likewise, the constraints that the model makes: where tokens cannot be sent to its experts mesh.ep = 1, and
    mesh.cp = 1, because experts then run on the gathered sequence (see runtime.context)."""
    return {} if expert_modules(graph) is not None else {"mesh.ep": 1, "mesh.cp": 1}


def entered_blocks(graph: ModelGraph) -> frozenset[str]:
    """Paths of the repeated blocks of which code outside of them uses parameters: they are gathered with that code."""
    blocks = [link.path for link in graph.chain if link.repeated]
    glue = {link.block for link in graph.chain if not link.repeated}
    read = [p.name for block in sorted(glue) for p in graph.blocks[block].parameters if p.tied]
    return frozenset(path for path in blocks if any(name.startswith(f"{path}.") for name in read))


def backend_of(cluster: Cluster) -> str:
    """What runs the collectives of its devices."""
    on_hosts = all(group.device.name.startswith("cpu") for group in cluster.groups)
    return CHOOSES_NOTHING if on_hosts else "nccl"


def refused(graph: ModelGraph, cluster: Cluster | None, strategy: Strategy) -> str | None:
    """What of a complete strategy the runtime does not run on the cluster (None: on one like that of the tests), in words;
    None where it runs all of it."""
    decisions = strategy_to_constraints(strategy)
    backend = CHOOSES_NOTHING if cluster is None else backend_of(cluster)
    if problem := next(sync_problems(strategy, None, backend), None):
        return problem
    try:
        check_software(strategy.execution)
        needed = {**graph_limits(graph), **limits(decisions)}
    except UserError as error:
        return str(error)
    for key, value in needed.items():
        if decisions.get(key) != value:
            return f"{key} = {decisions.get(key)}: the runtime runs this strategy with {value} only"
    return None


def limits(constraints: Mapping[str, object]) -> dict[str, object]:
    """The constraints, by dotted key, that leave a search with strategies that the runtime runs.

    `constraints` are those that there are already: some of them can be run with some meshes only.
    """
    found: dict[str, object] = {}
    rules = constraints.get("embedding") or ()
    assert isinstance(rules, tuple)
    if any(rule.tier not in ("device", None) for rule in rules):
        found |= {f"mesh.{axis}": 1 for axis in ONE_RANK}
    if constraints.get("pipeline.schedule") in SPLIT_BACKWARD:  # see runtime.pipeline_module
        found["mesh.cp"] = 1
        zero = constraints.get("shard.zero")
        if zero is None and constraints.get("mesh.dp_shard") != 1:
            found["shard.zero"] = 1  # 2 runs, too; a search that leaves the level open could choose 3
        elif zero == 3:
            found["mesh.dp_shard"] = 1
    if constraints.get("execution.kernels") == "compiled":  # see runtime.compiled
        found |= {"mesh.tp": 1, "mesh.cp": 1}
    return found
