"""The table of capabilities, asked for a model and a cluster: what a search for plans that run leaves out. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.errors import UserError
from autoparallel.planner.strategy.lengths import phases_of
from autoparallel.planner.strategy.stacks import OWN_STACK, STACK
from autoparallel.planner.strategy.types import EmbeddingRule, Strategy
from autoparallel.profiles.hardware import Cluster
from autoparallel.profiles.stacks import PLAIN
from autoparallel.runtime.capabilities.models import model_limits, model_refusals
from autoparallel.runtime.capabilities.rows import GLOO, Case
from autoparallel.runtime.capabilities.table import UNSHARABLE, limits, refusals
from autoparallel.runtime.experts.modules import expert_modules

KERNELS = "execution.kernels"
ON_DEVICES = (EmbeddingRule(module="*", tier="device"),)  # of embedding tables


def on_devices(constraints: Mapping[str, object]) -> dict[str, object]:
    """The constraint that leaves embedding tables on the devices, unless `constraints` say where they are: other tiers need an
    optimizer that the model makes."""
    return {} if constraints.get("embedding") else {"embedding": ON_DEVICES}


def graph_limits(graph: ModelGraph) -> dict[str, object]:
    """The constraints that the model makes: where tokens cannot be sent to its experts they are whole on every rank, and by what its
    own code does."""
    sharable = expert_modules(graph) is not None
    return {**({} if sharable else dict.fromkeys(UNSHARABLE, 1)), **model_limits(graph)}


def kernels_to_choose(constraints: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """The kernels that run here beside what the constraints ask for, in every phase, each with the constraints that it needs; none
    where the user said which, or the only ones."""
    if KERNELS in constraints or constraints.get(STACK, OWN_STACK) not in (OWN_STACK, PLAIN):
        return {}
    found = {}
    for kind in ("eager", "compiled"):
        with suppress(UserError):  # beside what is asked for, a schedule say, these do not run
            begun = {**constraints, KERNELS: kind}
            limits(begun)
            for phase in phases_of(constraints):
                begun |= dict(phase.keys)
                limits(begun)
            found[kind] = limits({KERNELS: kind})
    return found


def entered_blocks(graph: ModelGraph) -> frozenset[str]:
    """Paths of the repeated blocks of which code outside of them uses parameters: they are gathered with that code."""
    blocks = [link.path for link in graph.chain if link.repeated]
    glue = {link.block for link in graph.chain if not link.repeated}
    read = [p.name for block in sorted(glue) for p in graph.blocks[block].parameters if p.tied]
    return frozenset(path for path in blocks if any(name.startswith(f"{path}.") for name in read))


def backend_of(cluster: Cluster) -> str:
    """What runs the collectives of its devices."""
    on_hosts = all(group.device.name.startswith("cpu") for group in cluster.groups)
    return GLOO if on_hosts else "nccl"


def refuser(
    graph: ModelGraph, cluster: Cluster | None, *, said: bool = False
) -> Callable[[Strategy], str | None]:
    """Says what of a complete strategy the runtime does not run on the cluster (None: on one like that of the tests), in words;
    None where it runs all of it. With `said` also what runs at another price."""
    backend = GLOO if cluster is None else backend_of(cluster)
    sizes = None if cluster is None else tuple(level.size for level in cluster.levels)
    shares = expert_modules(graph) is not None

    def refused(strategy: Strategy) -> str | None:
        case = Case(
            strategy=strategy,
            level_sizes=sizes,
            backend=backend,
            shares_experts=shares,
            numbers=graph.parameter_count,
        )
        return next(chain(model_refusals(graph, strategy), refusals(case, said=said)), None)

    return refused
