"""What a complete strategy costs: expand, then simulate."""

from __future__ import annotations

from dataclasses import replace

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.costmodel.prediction import Prediction
from autoparallel.costmodel.program import Program
from autoparallel.costmodel.simulate import simulate
from autoparallel.errors import UserError
from autoparallel.planner.expand.chain import even_stages
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.expand.local_updates import exchange, with_exchange
from autoparallel.planner.strategy.islands import is_local, island
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.lengths import graph_at
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
    whole = strategy
    expander, strategy = at_home(
        expander or Expander(graph_at(graph, strategy.batch.seq_len), cluster), strategy
    )
    program = expander.program(strategy)
    found = simulate(
        program,
        expander.cluster,
        pricer=expander.pricer,
        prepared=expander.prepared(strategy),
    )
    if is_local(whole):
        return with_exchange(found, exchange(whole, cluster, program), whole)
    return found


def completed(expander: Expander, strategy: Strategy) -> Strategy:
    """The strategy with all said that pricing chooses where it says nothing: how tensors are sharded over tp, and how many
    blocks each stage has. What is priced is then what runs. Raises UserError where its own `[[tensor]]` entries cannot be kept.
    """
    home, alone = at_home(expander, strategy)
    strategy = replace(strategy, tensor=home.tensor_plan(alone).rules if strategy.mesh.tp > 1 else ())
    if not strategy.pipeline.stage_blocks:
        chunks = strategy.mesh.pp * strategy.pipeline.virtual_stages
        even = even_stages(len(expander.graph.repeated_positions), chunks)
        strategy = replace(strategy, pipeline=replace(strategy.pipeline, stage_blocks=even))
    return strategy


def program_of(expander: Expander, strategy: Strategy) -> Program:
    """The program that is priced."""
    home, alone = at_home(expander, strategy)
    return home.program(alone)


def at_home(expander: Expander, strategy: Strategy) -> tuple[Expander, Strategy]:
    """Where a strategy is priced: with sequences of its length; the devices that it uses are a cluster of their own; of replicas
    that train by themselves, those of one. Raises UserError for a length that the model was not captured with."""
    graph = graph_at(expander.graph, strategy.batch.seq_len)
    cluster, alone = machines(expander.cluster, strategy)
    if is_local(strategy):
        cluster, alone = island(cluster, alone)
    if cluster is expander.cluster and graph is expander.graph:
        return expander, alone
    return Expander(graph=graph, cluster=cluster), alone
