"""`auto_parallelize`: a module and its inputs in, the same module running in parallel out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache as call_once
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.costmodel.graph_json import graph_from_json, graph_hash, graph_to_json
from autoparallel.costmodel.program import Program
from autoparallel.errors import UserError
from autoparallel.plan_cache import StrategySource, find_strategy, read_source
from autoparallel.planner.capture.dropout import largest_dropout
from autoparallel.planner.capture.trees import know_dataclasses
from autoparallel.planner.expand.local import TENSOR_DTYPE
from autoparallel.planner.expand.units import own_units
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.lengths import graph_at, phase_lengths, phases_of, with_length
from autoparallel.planner.strategy.stacks import OWN_STACK
from autoparallel.planner.strategy.types import Execution, Strategy
from autoparallel.planner.strategy.write import write_text
from autoparallel.profiles import Cluster, load_cluster
from autoparallel.profiles.likest import device_of_hardware
from autoparallel.runtime.capabilities.models import check_devices, check_model, model_limits
from autoparallel.runtime.capabilities.table import limits
from autoparallel.runtime.experts.modules import expert_modules
from autoparallel.runtime.experts.parallel import can_share
from autoparallel.runtime.limits import entered_blocks, kernels_to_choose, on_devices
from autoparallel.runtime.lowering.compiled import can_compile
from autoparallel.runtime.lowering.lower import Dtypes, dtype_name, module_dtypes
from autoparallel.runtime.ranks.accelerator import device_name
from autoparallel.runtime.ranks.mesh import start_ranks, world_size
from autoparallel.runtime.ranks.progress import Progress, silent
from autoparallel.runtime.start import parallelize


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """What rank 0 found out and every rank needs."""

    graph: ModelGraph
    strategy: Strategy
    cluster: Cluster | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """The arguments of `auto_parallelize` that decide on a strategy."""

    strategy: Strategy | StrategySource | str | os.PathLike[str] | None
    phase_inputs: Mapping[int, Any]
    cluster: Cluster | str | None
    cache: Path | None
    graph: Path | None
    global_batch: int | None
    allow_lossy: bool | Sequence[str]
    time_limit_s: float | None
    steps: int | None


def auto_parallelize(
    module: nn.Module,
    example_inputs: Any,
    *,
    strategy: Strategy | StrategySource | str | os.PathLike[str] | None = None,
    phase_inputs: Mapping[int, Any] | None = None,
    cluster: Cluster | str | None = None,
    cache: str | os.PathLike[str] | None = ".autoparallel",
    graph: str | os.PathLike[str] | None = None,
    global_batch: int | None = None,
    dtype: str | None = None,
    param_dtype: str | None = None,
    grad_dtype: str | None = None,
    allow_lossy: bool | Sequence[str] = False,
    time_limit_s: float | None = None,
    steps: int | None = None,
    weights: str | os.PathLike[str] | None = None,
    progress: Progress = silent,
) -> nn.Module:
    """Run `module` by a strategy on the processes of this run (torchrun's, or this one alone).

    `example_inputs` — a tensor, a tuple, or a dict of keyword arguments — has this rank's share of the batch.
    `phase_inputs` has inputs of each other length that phases of the strategy have (`batch.seq_len`), by tokens per sequence.
    `strategy` is a `Strategy` or the path of a strategy file; without one, and for keys that a file leaves
    out, rank 0 plans for `cluster` (a `Cluster`, a cluster file, a shipped cluster's name, or
    DEVICE:NODESxPER_NODE; by default this run's processes on `cpu-gloo`, or on the shipped device that the
    name of the accelerator says) and keeps the plan in the folder `cache` (None: nowhere) under a key of
    graph, cluster, inputs and version. `graph` is a file that keeps the captured graph for the next start, which then
    captures nothing: the caller answers for the module being the same. `global_batch` defaults to the file's, else to the samples of
    `example_inputs` times the number of processes. `dtype`, `param_dtype` and `grad_dtype` (names as in
    strategy files) default to the module's own; `allow_lossy` lets gradients be compressed (by the methods that
    it lists, if it is a list); with the `steps` of the whole run blocks are compiled where that pays back what compiling takes
    (else they run as they are, unless the file says so); `dtype="tf32"` lets torch multiply float32 in TF32, in this process.

    Without a pipeline the module itself is returned, changed in place: called, trained and saved as before, with the same
    parameter names. It gains `step`, `optimizer`, `synchronise_by`, `data_parallel_rank`, `data_parallel_size`,
    `clip_grad_norm_`, `full_state_dict`, `full_gradients`, `strategy` and `program`. With a pipeline, `step` runs the schedule. Every rank ends
    up with rank 0's values; parameters on the meta device are made and initialised share by share, or read share by share
    from `weights` (a safetensors file, or a folder of them as Hugging Face writes it). `progress(action, stage)` hears of
    every action as it begins ("F0", "SEND_F0", "REDUCE_GRAD"). Collective. Raises UserError, on every rank and before
    anything is changed, for a strategy that does not fit the module, the processes, or the graph that it was planned for.
    """
    know_dataclasses(example_inputs)
    rank, device = start_ranks()
    dtypes = module_dtypes(module, dtype, param_dtype, grad_dtype)
    plan = _Inputs(
        strategy=strategy, phase_inputs=phase_inputs or {}, cluster=cluster, cache=Path(cache) if cache is not None else None, time_limit_s=time_limit_s,
        graph=Path(graph) if graph is not None else None, global_batch=global_batch, allow_lossy=allow_lossy,
        steps=steps,
    )  # fmt: skip
    decision = _on_first_rank(lambda: _decide(module, example_inputs, dtypes, plan, device), rank)
    execution = _with_dtypes(decision.strategy.execution, dtypes)
    found, known = graph_at(decision.graph, decision.strategy.batch.seq_len), decision.cluster
    return parallelize(
        module, example_inputs, replace(decision.strategy, execution=execution), dtypes=dtypes,
        blocks=[link.path for link in found.chain if link.repeated], program=_program(decision, execution),
        level_sizes=tuple(level.size for level in known.levels) if known else (), weights=weights,
        experts=expert_modules(found), entered=entered_blocks(found), alone=own_units(found), progress=progress,
    )  # fmt: skip


def _decide(
    module: nn.Module, example_inputs: Any, dtypes: Dtypes, given: _Inputs, device: torch.device
) -> _Decision:
    """Capture the module; take the strategy as given, as kept, or plan it."""
    source, computed = read_source(given.strategy), dtype_name(dtypes.compute)
    graph = _captured(module, example_inputs, given.graph, computed)
    graph = _with_other_lengths(graph, module, source, given, computed)
    _check_graph(source, graph, module, example_inputs, computed)
    check_devices(graph, world_size())
    cluster = _cluster(given.cluster, source, device)
    shared = {} if can_share(module, expert_modules(graph), device) else {"mesh.ep": 1, "mesh.cp": 1}
    strategy = find_strategy(
        graph,
        cluster,
        source,
        global_batch=given.global_batch or source.global_batch or _samples(example_inputs) * world_size(),
        # What runs here: eager kernels, DTensor, and no float32 copy but the one the user's optimizer may keep.
        execution=_with_dtypes(
            Execution(
                stack=OWN_STACK,
                dtensor=True,
                fsdp2=True,
                master_weights=False,
                kernels="eager",
                dropout=largest_dropout(module),
            ),
            dtypes,
        ),
        cache=given.cache,
        allow_lossy=given.allow_lossy,
        time_limit_s=given.time_limit_s,
        kernels=kernels_to_choose(source.constraints) if given.steps and can_compile(device) else {},
        steps=given.steps,
        # A caller's own optimizer keeps its state where the parameters are, so that no plan relies on another place.
        limits={
            "offload.optimizer": 0.0,
            **on_devices(source.constraints),
            **limits(source.constraints),
            **shared,
            **model_limits(graph),
        },
    )
    check_model(graph, strategy)
    if phase_lengths(strategy.phases) and not strategy.batch.seq_len:  # which later phases may go back to
        strategy = with_length(strategy, graph.tokens_per_sample)
    if strategy.phases and cluster is not None and (wrong := strategy_problems(graph, cluster, strategy)):
        raise UserError("\n".join(f"[[phase]] {problem}" for problem in wrong))
    return _Decision(graph=graph, strategy=strategy, cluster=cluster)


def _check_graph(
    source: StrategySource, graph: ModelGraph, module: nn.Module, example_inputs: Any, computed: str
) -> None:
    """Refuse a file that was planned for another model; that it was to compute in another dtype is no other model."""
    planned = str(source.constraints.get("execution.dtype", Execution().dtype))
    if source.graph_hash not in (None, graph_hash(graph)) and TENSOR_DTYPE[planned] != TENSOR_DTYPE[computed]:
        graph = _captured(module, example_inputs, None, planned)
    source.check_graph(graph_hash(graph))


def _captured(module: nn.Module, example_inputs: Any, kept: Path | None, computed: str) -> ModelGraph:
    if kept is not None and kept.exists():
        try:
            return graph_from_json(kept.read_text(encoding="utf-8"))
        except (UserError, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{kept}: {error}; remove it, and the model is captured anew") from None
    from autoparallel.planner.capture import capture
    from autoparallel.planner.capture.load import keyword_inputs

    inputs, name = keyword_inputs(module, example_inputs), type(module).__name__
    graph = capture(module, inputs, name=name, dtype=TENSOR_DTYPE[computed])
    if kept is not None:
        _keep_graph(graph, kept)
    return graph


def _with_other_lengths(
    graph: ModelGraph, module: nn.Module, source: StrategySource, given: _Inputs, computed: str
) -> ModelGraph:
    """The graph with one for each length that phases change to, captured of `phase_inputs` where it was not kept."""
    others = list(graph.other_lengths)
    for tokens, where in phase_lengths(phases_of(source.said)).items():
        if graph.of_length(tokens) is not None:
            continue
        if tokens not in given.phase_inputs:
            raise UserError(
                f"{where}: the example inputs have sequences of {graph.tokens_per_sample}: give inputs of that length, too, as "
                f"phase_inputs={{{tokens}: …}}"
            )
        try:
            own = _captured(module, given.phase_inputs[tokens], None, computed)
        except UserError as error:
            raise UserError(f"{where}: the model does not take such sequences: {error}") from error
        if own.tokens_per_sample != tokens:
            raise UserError(f"{where}: phase_inputs[{tokens}] has sequences of {own.tokens_per_sample}")
        others.append(own)
    if len(others) == len(graph.other_lengths):
        return graph
    graph = replace(graph, other_lengths=tuple(others))
    if given.graph is not None:
        _keep_graph(graph, given.graph)
    return graph


def _keep_graph(graph: ModelGraph, path: Path) -> None:
    """Write it aside, then rename. Raises UserError, which other ranks hear of."""
    remedy = "make room there, or give another folder"
    with suppress(OSError):  # which is told of the file, too
        path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, graph_to_json(graph), remedy=remedy)


def _on_first_rank(decide: Callable[[], _Decision], rank: int) -> _Decision:
    """`decide()` on rank 0, its result or its UserError on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return decide()
    answer: list[Any] = [None]
    if rank == 0:
        try:
            answer = [decide()]
        except (ValueError, TimeoutError) as error:  # UserError, InfeasiblePlan, SearchTimeout
            answer = [error]
        except BaseException as error:
            dist.broadcast_object_list([UserError(f"rank 0 failed: {error}")], src=0)
            raise
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    assert isinstance(answer[0], _Decision)
    return answer[0]


def _cluster(given: Cluster | str | None, source: StrategySource, device: torch.device) -> Cluster | None:
    """The cluster to plan for and to price the program on; None where nothing says which."""
    if isinstance(given, Cluster):
        return given
    if given is not None:
        return load_cluster(given)
    if source.cluster is not None:
        return source.cluster
    name = "cpu-gloo" if device.type == "cpu" else device_of_hardware(device_name(device))
    if name is None:
        return None
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size())))
    return load_cluster(f"{name}:{max(world_size() // per_node, 1)}x{per_node}")


def _samples(example_inputs: Any) -> int:
    for leaf in tree_leaves(example_inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf.shape[0]
    raise UserError("example_inputs hold no tensor with a batch dimension")


def _with_dtypes(execution: Execution, dtypes: Dtypes) -> Execution:
    return replace(
        execution,
        dtype="tf32" if dtypes.tf32 else dtype_name(dtypes.compute),
        param_dtype=dtype_name(dtypes.param),
        grad_dtype=dtype_name(dtypes.grad),
    )


def _program(decision: _Decision, execution: Execution) -> Callable[[], Program]:
    strategy = replace(decision.strategy, execution=execution)

    @call_once
    def program() -> Program:
        from autoparallel.planner.expand.expander import Expander
        from autoparallel.planner.score import program_of

        if decision.cluster is None:
            raise UserError("the program depends on the cluster: pass cluster= to auto_parallelize")
        return program_of(Expander(decision.graph, decision.cluster), strategy)

    return program
