"""Where `auto_parallelize` gets its strategy: from a file, from an earlier plan, or from the planner."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from autoparallel import __version__
from autoparallel.answer import predicted_table, problem_table, search_table, stamped
from autoparallel.costmodel.graph import ModelGraph
from autoparallel.costmodel.graph_json import graph_hash
from autoparallel.errors import UserError
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.problem import Problem
from autoparallel.planner.score import completed
from autoparallel.planner.strategy.file import (
    missing_keys,
    read_strategy_file,
    strategy_from_constraints,
    strategy_to_constraints,
)
from autoparallel.planner.strategy.legal import constraint_problems
from autoparallel.planner.strategy.stacks import told
from autoparallel.planner.strategy.types import Execution, Strategy
from autoparallel.planner.strategy.write import write_strategy
from autoparallel.profiles import Cluster, cluster_to_dict, device_names
from autoparallel.profiles.record import recorded_cluster
from autoparallel.runtime.limits import refuser


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySource:
    """What the user gave: a whole strategy, or the constraints of a (perhaps partial) file, or nothing."""

    name: str = "strategy"
    strategy: Strategy | None = None
    constraints: Mapping[str, object] = field(default_factory=dict)
    graph_hash: str | None = None
    cluster: Cluster | None = None

    @property
    def global_batch(self) -> int | None:
        """The global batch that the source fixes, if it does."""
        if self.strategy is not None:
            return self.strategy.batch.global_
        batch = self.constraints.get("batch.global")
        return batch if isinstance(batch, int) else None

    @property
    def said(self) -> Mapping[str, object]:
        """What the source decides, by dotted key."""
        return self.constraints if self.strategy is None else strategy_to_constraints(self.strategy)

    def check_graph(self, hash_: str) -> None:
        """Refuse a file that was planned for a graph with another hash."""
        if self.graph_hash is not None and self.graph_hash != hash_:
            raise UserError(
                f"{self.name}: [problem] graph_hash = {self.graph_hash} but this model and its inputs have {hash_}: "
                "the file was planned for another model or sequence length; plan again, or remove [problem] "
                "from the file to use its other keys as constraints"
            )


def read_source(strategy: Strategy | StrategySource | str | os.PathLike[str] | None) -> StrategySource:
    """A `Strategy`, or what a strategy file says. Raises UserError."""
    if strategy is None:
        return StrategySource()
    if isinstance(strategy, StrategySource):
        return strategy
    if isinstance(strategy, Strategy):
        return StrategySource(strategy=strategy)
    file = read_strategy_file(Path(strategy))
    record = file.problem
    cluster = record.cluster if record else None
    return StrategySource(
        name=file.path,
        constraints=file.constraints,
        graph_hash=record.graph_hash if record else None,
        cluster=recorded_cluster(cluster, f"{file.path}: [problem] cluster") if cluster else None,
    )


def find_strategy(
    graph: ModelGraph,
    cluster: Cluster | None,
    source: StrategySource,
    *,
    global_batch: int,
    execution: Execution,
    cache: Path | None,
    allow_lossy: bool | Sequence[str],
    time_limit_s: float | None,
    limits: Mapping[str, object] | None = None,
    kernels: Mapping[str, Mapping[str, object]] | None = None,
    steps: int | None = None,
) -> Strategy:
    """The strategy as given, or planned where it leaves something open; plans are kept in `cache`.

    `limits` are constraints of who runs the plan, where the source does not say otherwise; `kernels` and `steps` as in a
    `Problem`.
    """
    if source.strategy is not None:
        return _complete(graph, cluster, source.strategy)
    constraints = {"batch.global": global_batch, **source.constraints}
    lossy = () if isinstance(allow_lossy, bool) else tuple(allow_lossy)
    if cluster is not None and (problems := constraint_problems(graph, cluster, constraints, lossy)):
        raise UserError("\n".join(problems))
    if not missing_keys(constraints):
        return _complete(graph, cluster, strategy_from_constraints(constraints, name=source.name))
    constraints = {**(limits or {}), **constraints}
    if cluster is None:
        raise UserError(
            'auto_parallelize has to plan but does not know the cluster: pass cluster="DEVICE:NODESxPER_NODE" '
            f"(devices: {', '.join(device_names())}), a cluster file, or a complete strategy"
        )
    problem = Problem(
        graph=graph,
        cluster=cluster,
        global_batch=global_batch,
        constraints=constraints,
        execution=_told(execution, constraints),
        allow_lossy=bool(allow_lossy),
        lossy=lossy,
        all_devices=True,
        refuses=refuser(graph, cluster),
        kernels=kernels or {},
        steps=steps,
    )
    if cache is None:
        return _plan(problem, None, time_limit_s)
    path = cache / f"{plan_key(problem)}.toml"
    if path.exists():
        kept = read_strategy_file(path)
        return strategy_from_constraints(kept.constraints, name=str(path))
    _make_folder(cache)  # before the search: nobody waits for a plan that cannot be kept
    return _plan(problem, path, time_limit_s)


def _complete(graph: ModelGraph, cluster: Cluster | None, strategy: Strategy) -> Strategy:
    """What a strategy leaves open is what `score` prices it with; nothing where the cluster is not known."""
    if cluster is not None:
        return completed(Expander(graph=graph, cluster=cluster), strategy)
    if strategy.mesh.tp > 1 and not strategy.tensor:
        raise UserError(
            "the strategy has mesh.tp > 1 and does not say what is sharded: pass cluster= to auto_parallelize, by which "
            "that is chosen, or give it [[tensor]] entries"
        )
    return strategy


def _make_folder(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise UserError(
            f'auto_parallelize cannot keep its plan in cache="{cache}" ({error.strerror}): pass a folder that can be '
            "written, or cache=None to plan at every start"
        ) from None


def _told(execution: Execution, constraints: Mapping[str, object]) -> Execution:
    """`execution` with what the strategy file says; dtypes stay the module's."""
    return replace(
        told(execution, constraints),
        dtype=execution.dtype, param_dtype=execution.param_dtype, grad_dtype=execution.grad_dtype,
    )  # fmt: skip


def plan_key(problem: Problem) -> str:
    """Twenty hex digits of graph, cluster, inputs and version: equal exactly where a kept plan serves."""
    inputs = {
        "graph": graph_hash(problem.graph),
        "cluster": cluster_to_dict(problem.cluster),
        "global_batch": problem.global_batch,
        "objective": str(problem.objective),
        "constraints": sorted((key, repr(value)) for key, value in problem.constraints.items()),
        "execution": asdict(problem.execution),
        "allow_lossy": problem.allow_lossy,
        "lossy": problem.lossy,
        "kernels": sorted(problem.kernels),
        "steps": problem.steps,
        "all_devices": problem.all_devices,
        "version": __version__,
    }
    text = json.dumps(inputs, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _plan(problem: Problem, path: Path | None, time_limit_s: float | None) -> Strategy:
    from autoparallel.planner.explain.choice import WITHIN
    from autoparallel.planner.plan import plan

    expander = Expander(graph=problem.graph, cluster=problem.cluster)
    result = plan(problem, time_limit_s=time_limit_s, progress=None, expander=expander, within=WITHIN)
    if path is not None:
        table = problem_table(
            problem,
            model=problem.graph.name,
            model_args={},
            hash_=graph_hash(problem.graph),
        )
        predicted = predicted_table(expander, result.strategy, result.prediction)
        search = search_table(result, problem)
        _make_folder(path.parent)  # which somebody may have removed meanwhile
        write_strategy(
            path, result.strategy, table, stamped(predicted, result.strategy, table, search), search
        )
    return result.strategy
