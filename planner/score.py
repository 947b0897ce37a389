"""What a complete strategy costs: expand, then simulate."""

from __future__ import annotations

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.costmodel.prediction import Prediction
from autoparallel.costmodel.simulate import simulate
from autoparallel.errors import UserError
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.machines import machines
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.hardware import Cluster


def score(
    graph: ModelGraph,
    cluster: Cluster,
    strategy: Strategy,
    expander: Expander | None = None,
) -> Prediction:
    """The prediction for a complete strategy, whether it fits in memory or not.

    An `expander` of the same graph and cluster shares work between calls. Raises UserError, naming every problem, where
    the strategy cannot run.
    """
    problems = strategy_problems(graph, cluster, strategy)
    if problems:
        raise UserError("\n".join(problems))
    expander, strategy = at_home(expander or Expander(graph=graph, cluster=cluster), strategy)
    return simulate(
        expander.program(strategy),
        expander.cluster,
        pricer=expander.pricer,
        prepared=expander.prepared(strategy),
    )


def at_home(expander: Expander, strategy: Strategy) -> tuple[Expander, Strategy]:
    """Where a strategy is priced: the devices that it uses are a cluster of their own."""
    cluster, alone = machines(expander.cluster, strategy)
    if cluster is expander.cluster:
        return expander, alone
    return Expander(graph=expander.graph, cluster=cluster), alone
