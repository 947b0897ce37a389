"""Whether a complete strategy can run at all: messages that name key, value and what to try."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import TypeVar

from autoparallel.costmodel.block_index import index_block
from autoparallel.costmodel.graph import ModelGraph, OpKind
from autoparallel.planner.expand.schedules import SPLIT_BACKWARD, schedule_problem
from autoparallel.planner.expand.state import STATES
from autoparallel.planner.sharding.experts import expert_layers
from autoparallel.planner.strategy.embedding import embedding_problems
from autoparallel.planner.strategy.file import strategy_to_constraints
from autoparallel.planner.strategy.groups import group_problems
from autoparallel.planner.strategy.ignored import ignored_values, rank_problem, weights_problems
from autoparallel.planner.strategy.islands import outer_problems
from autoparallel.planner.strategy.lengths import SEQ_LEN, length_problem
from autoparallel.planner.strategy.machines import placement_problems, unknown_nodes
from autoparallel.planner.strategy.phases import starts, strategy_at
from autoparallel.planner.strategy.recovery import recovery_problems
from autoparallel.planner.strategy.runs import runs
from autoparallel.planner.strategy.types import AXES, Strategy
from autoparallel.profiles.hardware import Cluster

_Found = TypeVar("_Found")

# What must hold beside `shard.secondary`, by dotted key.
_COPY_NEEDS = {
    "shard.zero": 3,
    "mesh.pp": 1,
    "mesh.cp": 1,
    "mesh.tp": 1,
    "execution.parameter_gathers": False,
}


def strategy_problems(graph: ModelGraph, cluster: Cluster, strategy: Strategy) -> list[str]:
    """Every reason why the strategy cannot run, in any of its phases; empty when it can."""
    if strategy.phases:
        every = {
            step: strategy_problems(graph, cluster, strategy_at(strategy, step)) for step in starts(strategy)
        }
        return [
            f"from step {step}: {one}" if step > 1 else one for step, found in every.items() for one in found
        ]
    tokens = strategy.batch.seq_len
    if unknown := length_problem(graph, tokens):
        return [unknown]
    graph = graph.of_length(tokens) or graph
    found = [*_mesh(cluster, strategy), *_batch(strategy)]
    if not found:  # what follows divides by these
        found = [
            *group_problems(cluster, strategy),
            *placement_problems(cluster, strategy),
            *_tensor(graph, strategy),
            *_pipeline(graph, strategy),
            *_shard(graph, strategy),
            *_rates(strategy),
            *embedding_problems(graph, cluster, strategy),
            *recovery_problems(cluster, strategy),
            *outer_problems(cluster, strategy),
        ]
    return found


def constraint_problems(
    graph: ModelGraph, cluster: Cluster, constraints: Mapping[str, object], lossy: Sequence[str] = ()
) -> list[str]:
    """Why no strategy of the model can meet the constraints, where a glance says so and no search could find out; and which of
    the `lossy` methods that are allowed no strategy of it can have."""
    found = [*_recompute_constraints(graph, constraints), *ignored_values(graph, cluster, constraints)]
    for method in dict.fromkeys(lossy):
        if wrong := rank_problem(method, graph.parameter_count):
            found.append(f"lossy methods {list(lossy)}: {wrong}")
    found += _secondary(constraints)
    tokens = constraints.get(SEQ_LEN)
    if isinstance(tokens, int) and (unknown := length_problem(graph, tokens)):
        found.append(unknown)
    if constraints.get("pipeline.stage_blocks") == () and graph.repeated_positions:
        repeated = len(graph.repeated_positions)
        found.append(f"pipeline.stage_blocks = []: {graph.name} has {repeated} repeated blocks; leave it out, or name how many "
                     "stand in each chunk")  # fmt: skip
    tp, pp = constraints.get("mesh.tp"), constraints.get("mesh.pp")
    found += _tensor_degree(graph, tp) if isinstance(tp, int) and tp > 1 else ()
    found += _uncuttable(graph, pp) if isinstance(pp, int) else ()
    nodes, per_node = constraints.get("mesh.placement"), constraints.get("mesh.per_node")
    if strange := unknown_nodes(
        cluster, nodes if isinstance(nodes, tuple) else (), per_node if isinstance(per_node, int) else 0
    ):
        found.append(strange)
    return found


def _uncuttable(graph: ModelGraph, pp: int) -> Iterator[str]:
    if pp > 1 and not graph.pipeline_cuts:
        repeated = "that each run once" if graph.repeated_positions else "at all"
        yield (
            f"mesh.pp = {pp}: {graph.name} cannot be cut into pipeline stages: it has no repeated blocks {repeated}, or takes "
            "derivatives in its forward pass; use mesh.pp = 1"
        )


def _recompute_constraints(graph: ModelGraph, constraints: Mapping[str, object]) -> list[str]:
    full, blocks = constraints.get("recompute.per_stage"), constraints.get("pipeline.stage_blocks")
    if not isinstance(full, tuple) or not full:
        return []
    if isinstance(blocks, tuple) and len(blocks) == len(full):
        return list(_more_than_stand_there(full, blocks))
    repeated = len(graph.repeated_positions)
    if sum(full) > repeated:
        return [
            f"recompute.per_stage = {runs(full)} recomputes {sum(full)} blocks, but {graph.name} has {repeated} "
            "repeated blocks; lower an entry"
        ]
    return []


def _mesh(cluster: Cluster, strategy: Strategy) -> Iterator[str]:
    mesh = strategy.mesh
    for name in (*AXES, "ep"):
        size = getattr(mesh, name)
        if size < 1:
            yield f"mesh.{name} = {size}: an axis has at least one rank"
    if sorted(mesh.order) != sorted(AXES):
        yield f"mesh.order = {list(mesh.order)}: name each of {', '.join(AXES)} once"
    if mesh.devices > cluster.devices:
        yield (
            f"mesh: pp {mesh.pp} x dp_replicate {mesh.dp_replicate} x dp_shard {mesh.dp_shard} x cp {mesh.cp} "
            f"x tp {mesh.tp} = {mesh.devices} devices, but {cluster.name} has {cluster.devices}; lower an axis"
        )


def _batch(strategy: Strategy) -> Iterator[str]:
    batch, ranks = strategy.batch, strategy.mesh.data_parallel
    if batch.micro < 1 or batch.global_ < 1:
        yield f"batch.micro = {batch.micro}, batch.global = {batch.global_}: at least one sequence each"
        return
    if ranks >= 1 and batch.global_ % (batch.micro * ranks):
        yield (
            f"batch.global = {batch.global_} is not a multiple of batch.micro {batch.micro} x {ranks} "
            f"data-parallel ranks (mesh.dp_replicate x mesh.dp_shard); try batch.global = "
            f"{max(batch.global_ // (batch.micro * ranks), 1) * batch.micro * ranks} or a micro-batch that divides"
        )


def _tensor(graph: ModelGraph, strategy: Strategy) -> Iterator[str]:
    tp = strategy.mesh.tp
    if tp == 1:
        if strategy.shard.sequence_parallel:
            yield "shard.sequence_parallel = true needs mesh.tp > 1; set it to false or raise mesh.tp"
        return
    yield from _tensor_degree(graph, tp)
    if strategy.shard.sequence_parallel and graph.tokens_per_sample % tp:
        yield (
            f"shard.sequence_parallel = true: mesh.tp = {tp} does not divide the sequence length "
            f"{graph.tokens_per_sample}; set it to false"
        )


def _tensor_degree(graph: ModelGraph, tp: int) -> Iterator[str]:
    sizes = tensor_sizes(graph)
    if not sizes:
        yield f"mesh.tp = {tp}: no operator of {graph.name} that holds parameters can be sharded; use mesh.tp = 1"
    elif not any(all(s % tp == 0 for s in group) for group in sizes):
        most = max(s for group in sizes for s in group)
        fits = [d for d in range(2, most + 1) if any(all(s % d == 0 for s in group) for group in sizes)]
        yield (
            f"mesh.tp = {tp} divides none of the sizes that {graph.name}'s parameters can be sharded by; "
            f"try one of {', '.join(map(str, fits[:8]))}"
        )
    heads = sorted(head_counts(graph))
    odd = [h for h in heads if h % tp]
    if heads and odd:
        good = [d for d in range(1, odd[0] + 1) if all(h % d == 0 for h in heads)]
        near = min(good, key=lambda d: (abs(d - tp), -d))
        yield (
            f"mesh.tp = {tp} does not divide the attention heads of {graph.name} "
            f"({', '.join(map(str, heads))}, key-value heads included); try mesh.tp = {near}"
        )


def _once(find: Callable[[ModelGraph], _Found]) -> Callable[[ModelGraph], _Found]:
    """What follows from a graph alone, kept with it: a search asks for it with every strategy."""

    @wraps(find)
    def found(graph: ModelGraph) -> _Found:
        kept = vars(graph)
        if find.__name__ not in kept:
            kept[find.__name__] = find(graph)
        answer: _Found = kept[find.__name__]
        return answer

    return found


@_once
def tensor_sizes(graph: ModelGraph) -> set[tuple[int, ...]]:
    """Sizes that the tensor-parallel degree must divide, for each way to shard an operator with parameters."""
    return {
        tuple(size.at(1) for size in sharding.divides)
        for block in graph.blocks
        for op in block.operators
        for sharding in op.shardings
        if any(
            name.startswith("param:") and place.startswith("S")
            for name, place in zip(op.inputs, sharding.inputs, strict=False)
        )
    }


@_once
def head_counts(graph: ModelGraph) -> set[int]:
    """Numbers of query and key-value heads of the attention operators in repeated blocks."""
    repeated = {graph.chain[i].block for i in graph.repeated_positions}
    return {
        size.at(1)
        for b in repeated
        for op in graph.blocks[b].operators
        if op.kind is OpKind.ATTENTION
        for letter, size in op.sizes
        if letter in ("h", "g")
    }


def _pipeline(graph: ModelGraph, strategy: Strategy) -> Iterator[str]:
    pipeline, pp = strategy.pipeline, strategy.mesh.pp
    repeated, chunks = len(graph.repeated_positions), pp * pipeline.virtual_stages
    if pipeline.schedule == "program":
        yield 'pipeline.schedule = "program": the program is given elsewhere; name a schedule'
        return
    problem = schedule_problem(pipeline.schedule, pp, pipeline.virtual_stages, strategy.micro_batches)
    if problem is not None:
        yield f"pipeline.schedule: {problem}"
    yield from _uncuttable(graph, pp)
    if chunks > max(repeated, 1) and not pipeline.stage_blocks:
        yield (
            f"mesh.pp x pipeline.virtual_stages = {chunks} chunks, but {graph.name} has {repeated} repeated "
            "blocks; lower one of them"
        )
    blocks = pipeline.stage_blocks
    if blocks and len(blocks) != chunks:
        yield f"pipeline.stage_blocks has {len(blocks)} entries for {chunks} chunks (mesh.pp x virtual_stages)"
    elif blocks and sum(blocks) != repeated:
        yield (
            f"pipeline.stage_blocks sums to {sum(blocks)}, but {graph.name} has {repeated} repeated blocks"
        )
    elif (
        blocks
        and repeated
        and any(count < least for count, least in zip(blocks, least_blocks(graph, chunks), strict=True))
    ):
        yield (
            f"pipeline.stage_blocks = {runs(blocks)}: every chunk needs a block, but for a first or last chunk that "
            "holds what stands before or after the blocks"
        )
    yield from _recompute(graph, strategy, chunks, blocks)


def least_blocks(graph: ModelGraph, chunks: int) -> tuple[int, ...]:
    """Blocks that each chunk must have at least: an end with glue of its own may do without."""
    least = [1] * chunks
    for end in (0, -1):
        if chunks > 1 and not graph.chain[end].repeated:
            least[end] = 0
    return tuple(least)


def _recompute(graph: ModelGraph, strategy: Strategy, chunks: int, blocks: tuple[int, ...]) -> Iterator[str]:
    full = strategy.recompute.per_stage
    if strategy.recompute.mode == "operators" and strategy.pipeline.schedule in SPLIT_BACKWARD:
        yield (
            'recompute.mode = "operators": the results that it keeps serve one pass backwards, and '
            f"{strategy.pipeline.schedule} makes two of it; use full, or another schedule"
        )
    if strategy.recompute.mode == "operators" and strategy.offload.activations:
        yield (
            f'offload.activations = {strategy.offload.activations}: what recompute.mode = "operators" keeps stays on the '
            "device; use another mode, or 0"
        )
    attention = any(op.kind is OpKind.ATTENTION for block in graph.blocks for op in block.operators)
    if attention and strategy.recompute.mode == "operators" and strategy.execution.attention == "unfused":
        yield (
            'recompute.mode = "operators" keeps what attention returns, and execution.attention = "unfused" is not one '
            "operator; use selective or full"
        )
    if full and len(full) != chunks:
        yield f"recompute.per_stage has {len(full)} entries for {chunks} chunks; give one each, or none"
    elif full and len(blocks) == chunks:
        yield from _more_than_stand_there(full, blocks)


def _more_than_stand_there(full: tuple[int, ...], blocks: tuple[int, ...]) -> Iterator[str]:
    if any(f < 0 or f > b for f, b in zip(full, blocks, strict=True)):
        yield (
            f"recompute.per_stage = {runs(full)}: a chunk cannot recompute more blocks than it has "
            f"(pipeline.stage_blocks = {runs(blocks)})"
        )


def _shard(graph: ModelGraph, strategy: Strategy) -> Iterator[str]:
    mesh, zero = strategy.mesh, strategy.shard.zero
    if zero not in (0, 1, 2, 3):
        yield f"shard.zero = {zero}: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters"
    if zero == 0 and mesh.dp_shard > 1:
        yield (
            f"shard.zero = 0 needs mesh.dp_shard = 1, not {mesh.dp_shard}; move the ranks to mesh.dp_replicate "
            "or set shard.zero to 1, 2 or 3"
        )
    yield from weights_problems({"grad_sync.weights": strategy.grad_sync.weights, "shard.zero": zero})
    if strategy.shard.secondary:
        yield from _secondary(strategy_to_constraints(strategy))
    if mesh.ep > 1:
        yield from _experts(graph, strategy)
    lengths = sequence_lengths(graph)
    if mesh.cp > 1 and not lengths:
        yield f"mesh.cp = {mesh.cp}: {graph.name} has no attention over a sequence; use mesh.cp = 1"
    elif odd := [n for n in sorted(lengths) if n % mesh.cp]:
        yield f"mesh.cp = {mesh.cp} does not divide the sequence length {odd[0]}"


def _secondary(said: Mapping[str, object]) -> Iterator[str]:
    """Where a second copy of the parameters says nothing, or they are not gathered unit by unit in one pass forwards and one
    backwards. `said`: of a complete strategy, or what is fixed of one, by dotted key."""
    ranks, shards = said.get("shard.secondary"), said.get("mesh.dp_shard")
    if not isinstance(ranks, int) or ranks == 0:
        return
    where = f"shard.secondary = {ranks}"
    for key, needed in _COPY_NEEDS.items():
        if said.get(key) not in (None, needed):
            values = (str(value).lower() for value in (needed, said[key]))
            yield f"{where} needs {key} = {', not '.join(values)}; leave out one of them"
    if ranks == 1 or (isinstance(shards, int) and (ranks >= shards or shards % ranks)):
        known = shards if isinstance(shards, int) else 0
        good = [n for n in range(2, known) if known % n == 0]
        tried = f"one of {', '.join(map(str, good[:8]))}" if good else "another, or 0"
        yield f"{where}: a divisor of mesh.dp_shard{f' = {known}' if known else ''} between 1 and it; use {tried}"


@_once
def sequence_lengths(graph: ModelGraph) -> frozenset[int]:
    """Lengths that mesh.cp must divide: of a sample, and of what its attention compares; empty where a sample is
    not a sequence."""
    if graph.tokens_per_sample == 1:
        return frozenset()
    compared = {
        size.at(1)
        for block in graph.blocks
        for op in block.operators
        if op.kind is OpKind.ATTENTION
        for letter, size in op.sizes
        if letter in ("s", "t")
    }
    return frozenset({graph.tokens_per_sample, *compared}) if compared else frozenset()


def _experts(graph: ModelGraph, strategy: Strategy) -> Iterator[str]:
    mesh, counts = strategy.mesh, expert_counts(graph)
    ranks = mesh.dp_shard * mesh.cp * mesh.tp
    if ranks % mesh.ep:
        yield f"mesh.ep = {mesh.ep} does not divide dp_shard x cp x tp = {ranks}"
    if not counts:
        yield f"mesh.ep = {mesh.ep}: {graph.name} has no layer of experts; use mesh.ep = 1"
    elif odd := [n for n in sorted(counts) if n % mesh.ep]:
        good = [d for d in range(1, mesh.ep) if all(n % d == 0 for n in counts)]
        yield f"mesh.ep = {mesh.ep} does not divide the {odd[0]} experts of {graph.name}; try mesh.ep = {good[-1]}"


def expert_counts(graph: ModelGraph) -> frozenset[int]:
    """Numbers of experts of the model's layers: what mesh.ep must divide; empty where it has none."""
    return frozenset(
        layer.experts
        for block in graph.blocks
        if any(op.kind is OpKind.GROUPED_GEMM for op in block.operators)
        for layer in expert_layers(index_block(block, carried=(), dropout=True))
    )


def _rates(strategy: Strategy) -> Iterator[str]:
    execution, offload = strategy.execution, strategy.offload
    for name in ("optimizer", "activations"):
        if not 0.0 <= getattr(offload, name) <= 1.0:
            yield f"offload.{name} = {getattr(offload, name)}: a share, from 0 to 1"
    if execution.optimizer not in STATES:
        yield f'execution.optimizer = "{execution.optimizer}": one of {", ".join(STATES)}'
