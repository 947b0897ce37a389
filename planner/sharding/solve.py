"""Tensor-parallel placements: one legal sharding per operator of each distinct block, by a solve.

`solve_tensor_plan` prepares each distinct block (`problem.py`), prices its choices (`costs.py`), keeps
what the user's `[[tensor]]` entries fix (`rules.py`), and has the best chosen (`solver.py`). Blocks are
solved apart, because the layout between them is fixed: replicated, or sharded along the sequence under
sequence parallelism. Blocks that share a tied parameter are solved together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoparallel.costmodel.block_index import FLOATING, BlockIndex, output_names
from autoparallel.costmodel.graph import ModelGraph, OpKind, TensorSpec
from autoparallel.costmodel.program import Axis
from autoparallel.planner.expand.chain import carried_inputs, first_positions, handed_on, output_specs
from autoparallel.planner.sharding.blocks import BlockAnswer, NoTensorPlan, PricedBlock
from autoparallel.planner.sharding.costs import price_problem
from autoparallel.planner.sharding.experts import expert_shardings, with_experts
from autoparallel.planner.sharding.plan import BlockPlan, PlanCost, Reshard, TensorPlan
from autoparallel.planner.sharding.problem import (
    OUTSIDE,
    PARTIAL_GRADIENT,
    BlockProblem,
    Boundary,
    build_problem,
    layout,
)
from autoparallel.planner.sharding.rules import Fixed, contradiction, fixed_by_rules, rules_of
from autoparallel.planner.sharding.solver import solve_blocks
from autoparallel.planner.strategy.types import Execution, TensorRule
from autoparallel.profiles.hardware import Cluster

# Through which the hidden state stays what it is.
ELEMENT_BY_ELEMENT = (OpKind.ELEMENTWISE, OpKind.NORM, OpKind.DROPOUT, OpKind.VIEW)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRequest:
    """What a tensor plan is asked for: all that it depends on besides model and cluster. For `memory_price` see
    `planner.sharding.solver.solve_blocks`."""

    tp: int
    stride: int
    sequence_parallel: bool
    execution: Execution
    ep: int = 1
    cp: int = 1
    rules: tuple[TensorRule, ...] = ()
    memory_price: float | None = None


def solve_tensor_plan(
    graph: ModelGraph,
    indices: Sequence[BlockIndex],
    cluster: Cluster,
    request: TensorRequest,
    without_experts: TensorPlan | None = None,
) -> TensorPlan:
    """The best placements of every operator of every distinct block.

    `without_experts` is the plan for the same request with ep = 1, where it is known: blocks that have no experts run as they
    do there. Raises UserError, naming the entry, where the user's rules are illegal or contradict each other.
    """
    unhooked = called_again(graph)
    problems = [
        build_problem(index, request.tp, block_boundary(graph, b, request), unhooked[b], ep=request.ep)
        for b, index in enumerate(indices)
    ]
    fixed = fixed_by_rules(graph, problems, request.rules)
    plans: dict[int, BlockPlan] = {}
    costs: dict[int, PlanCost] = {}
    for group, ties in tied_groups(graph):
        if without_experts is not None and not any(expert_shardings(indices[b]) for b in group):
            plans |= {b: without_experts.blocks[b] for b in group}
            costs |= {b: without_experts.costs[b] for b in group}
            continue
        priced = [_priced(graph, cluster, request, b, problems[b], fixed[b]) for b in group]
        answers = _solve(graph, priced, ties, [fixed[b] for b in group], request)
        for b, answer in zip(group, answers, strict=True):
            made = block_plan(problems[b], answer)
            plans[b] = with_experts(indices[b], made) if request.ep > 1 else made
            costs[b] = _cost_of(answer)
    every = range(len(graph.blocks))
    plan = TensorPlan(blocks=tuple(plans[b] for b in every), costs=tuple(costs[b] for b in every))
    said = [_replicas_to_say(problems[b], plan.blocks[b], fixed[b], request) for b in every]
    return replace(plan, rules=rules_of(graph, problems, plan, said))


def _cost_of(answer: BlockAnswer) -> PlanCost:
    return PlanCost(time_ns=answer.cost.time_ns, held_kib=answer.held_kib, kept_kib=answer.kept_kib)


def _replicas_to_say(
    problem: BlockProblem, plan: BlockPlan, given: Fixed, request: TensorRequest
) -> frozenset[str]:
    """Parameters that are whole because an entry says so, or a price of memory, and would not be otherwise."""
    matrices = {p.name for p in problem.index.block.parameters if len(p.shape) > 1}
    chosen = matrices if request.memory_price is not None else set()
    return frozenset(
        name
        for name, placement in plan.params
        if placement == "R" and len(problem.params[name]) > 1 and (name in given.params or name in chosen)
    )


def _priced(
    graph: ModelGraph,
    cluster: Cluster,
    request: TensorRequest,
    block: int,
    problem: BlockProblem,
    given: Fixed,
) -> PricedBlock:
    axis = Axis(name="tp", size=request.tp, stride=request.stride)
    return PricedBlock(
        problem=problem,
        costs=price_problem(
            problem, cluster, axis, request.execution, graph.dtype, ep=request.ep, cp=request.cp
        ),
        fixed_params=given.params,
        fixed_nodes={**_unsharded_sequence(graph, problem, request), **given.nodes},
        hooks=given.hooks,
        sizes=_matrices(graph, block),
        stream=_stream(graph, block, problem, request),
    )


def called_again(graph: ModelGraph) -> list[frozenset[str]]:
    """For each block its modules that run more than once in a forward pass, in it or in other glue too."""
    glue = {link.block for link in graph.chain if not link.repeated}
    everywhere = Counter(call.module for b in glue for call in graph.blocks[b].calls)
    found = []
    for b, block in enumerate(graph.blocks):
        counts = everywhere if b in glue else Counter(call.module for call in block.calls)
        found.append(frozenset(module for module, count in counts.items() if count > 1))
    return found


def _matrices(graph: ModelGraph, block: int) -> dict[str, int]:
    """Matrices of a repeated block: who asks for tensor parallelism wants them sharded, even where replicas
    would take less time. Elsewhere time decides."""
    if not any(link.block == block and link.repeated for link in graph.chain):
        return {}
    return {p.name: p.numel for p in graph.blocks[block].parameters if len(p.shape) > 1}


def _stream(graph: ModelGraph, block: int, problem: BlockProblem, request: TensorRequest) -> dict[int, str]:
    """The hidden state at a repeated block's own level had better be laid out as it is between blocks: sharded along the
    sequence under sequence parallelism, whole without. Queries, keys and values, which may have its shape, are none."""
    position = first_positions(graph)[block]
    hidden = graph.chain[position].sends
    if not graph.chain[position].repeated or not hidden:
        return {}
    wanted, stream = between(hidden[0], request), _hidden_states(problem.index, hidden)
    return {
        n: wanted
        for n, node in enumerate(problem.nodes)
        if node.scope == "" and node.value in stream and wanted in node.states
    }


def _hidden_states(index: BlockIndex, hidden: Sequence[TensorSpec]) -> frozenset[str]:
    """The values of a hidden state's shape that come from the block's inputs, or go to its outputs, through additions, norms and
    the like alone; but for those that several modules read, which are gathered for all of them at once."""
    operators = index.block.operators
    found = {f"input:{i}" for i, spec in enumerate(index.block.inputs) if spec in hidden}
    for op in operators:
        if op.kind in ELEMENT_BY_ELEMENT and any(v in found for v in op.inputs):
            found |= {v for v in output_names(op) if index.specs[v] in hidden}
    ends = {v for v in index.block.outputs if index.specs[v] in hidden}
    for op in reversed(operators):
        if op.kind in ELEMENT_BY_ELEMENT and any(v in ends for v in output_names(op)):
            ends |= {v for v in op.inputs if index.specs[v] in hidden}
    return frozenset(v for v in found if not _is_shared(index, v)) | ends


def _is_shared(index: BlockIndex, value: str) -> bool:
    """Whether a norm's output goes to several modules of the block."""
    operators, maker = index.block.operators, index.producer.get(value)
    readers = {operators[c].module.partition(".")[0] for c in index.consumers.get(value, ())}
    return (
        maker is not None and operators[maker].kind is OpKind.NORM and len(readers) > 1 and "" not in readers
    )


def _unsharded_sequence(
    graph: ModelGraph, problem: BlockProblem, request: TensorRequest
) -> dict[int, tuple[str, ...]]:
    """Without sequence parallelism nothing that has the shape of a hidden state is sharded along the sequence."""
    if request.sequence_parallel:
        return {}
    hidden = {spec for link in graph.chain for spec in link.sends if len(spec.shape) > 2}
    return {
        n: tuple(s for s in node.states if s != "S1")
        for n, node in enumerate(problem.nodes)
        if problem.index.specs[node.value] in hidden and "S1" in node.states
    }


def _solve(
    graph: ModelGraph, blocks: Sequence[PricedBlock], ties: Sequence[Sequence[tuple[int, str]]],
    given: Sequence[Fixed], request: TensorRequest,
) -> list[BlockAnswer]:  # fmt: skip
    try:
        return solve_blocks(blocks, ties, request.memory_price)
    except NoTensorPlan:
        raise contradiction(graph, blocks, ties, given, request.tp, request.sequence_parallel) from None


def tied_groups(graph: ModelGraph) -> list[tuple[list[int], list[list[tuple[int, str]]]]]:
    """Distinct blocks to solve together, and their ties as (position in the group, parameter)."""
    holders: dict[str, list[tuple[int, str]]] = {}
    for b, block in enumerate(graph.blocks):
        for p in block.parameters:
            if p.tied:
                holders.setdefault(p.tied, []).append((b, p.name))
    group_of = list(range(len(graph.blocks)))
    for places in holders.values():
        low = min(group_of[b] for b, _ in places)
        merged = {group_of[b] for b, _ in places}
        group_of = [low if g in merged else g for g in group_of]
    found = []
    for g in sorted(set(group_of)):
        group = [b for b, own in enumerate(group_of) if own == g]
        ties = [
            [(group.index(b), n) for b, n in places] for places in holders.values() if places[0][0] in group
        ]
        found.append((group, ties))
    return found


def block_boundary(graph: ModelGraph, block: int, request: TensorRequest) -> Boundary:
    """What is around a distinct block: the layouts between blocks, and the modules values come from."""
    position = first_positions(graph)[block]
    link, piece = graph.chain[position], graph.blocks[block]
    carried, handed = carried_inputs(graph, position), handed_on(graph, position)
    specs = output_specs(graph, block)
    last = position == len(graph.chain) - 1
    before = _around(graph, position - 1) if position and not link.repeated else OUTSIDE
    after = _around(graph, position + 1) if not last and not link.repeated else OUTSIDE
    if not link.repeated and position == 0:
        before = ""
    if not link.repeated and last:
        after = ""
    outputs: list[str | None] = []
    for value in piece.outputs:
        if value in handed:
            outputs.append(between(specs[value], request))
        else:  # a loss is a number; logits beside it may stay sharded
            free = last and graph.has_loss and len(specs[value].shape) > 0 and specs[value].dtype in FLOATING
            outputs.append(None if free else "R")
    return Boundary(
        inputs=tuple(between(s, request) if i in carried else "R" for i, s in enumerate(piece.inputs)),
        outputs=tuple(outputs),
        input_scopes=tuple(before if i in carried or link.repeated else "" for i in range(len(piece.inputs))),
        output_scopes=(after,) * len(piece.outputs),
    )


def _around(graph: ModelGraph, position: int) -> str:
    """The module around a neighbouring link: where a value between it and glue is seen."""
    return graph.chain[position].path.rpartition(".")[0]


def between(spec: TensorSpec, request: TensorRequest) -> str:
    """Layout of an activation between blocks: sharded along the sequence (dim 1) or replicated."""
    if not request.sequence_parallel or len(spec.shape) < 3:
        return "R"
    length = spec.shape[1]
    return "S1" if length.const and length.const % request.tp == 0 and not length.per_sample else "R"


def block_plan(problem: BlockProblem, answer: BlockAnswer) -> BlockPlan:
    """What an answer means: shardings, parameter placements and layout hooks."""
    chosen = [row[k] for row, k in zip(problem.variants, answer.picks, strict=True)]
    reshards = []
    for edge in problem.edges:
        before, after = answer.states[edge.source], answer.states[edge.target]
        if before != after:
            reshards.append(
                Reshard(
                    value=problem.nodes[edge.source].value, module=edge.module, side=edge.side,
                    before=layout(before), after=layout(after), partial_gradient=after == PARTIAL_GRADIENT,
                    position=edge.position,
                )
            )  # fmt: skip
    partial = {n for variant in chosen for n in variant.partial_params}
    states = {(node.value, node.scope): s for node, s in zip(problem.nodes, answer.states, strict=True)}
    block = problem.index.block
    return BlockPlan(
        shardings=tuple(variant.sharding for variant in chosen),
        params=tuple((p.name, answer.params[p.name]) for p in block.parameters),
        reshards=tuple(sorted(reshards, key=lambda r: (r.position, r.value, r.module))),
        inputs=tuple(
            next((layout(s) for (v, _), s in states.items() if v == f"input:{i}"), "R")
            for i in range(len(block.inputs))
        ),
        partial_params=tuple(p.name for p in block.parameters if p.name in partial),
        layouts=tuple((v, scope, layout(s)) for (v, scope), s in states.items()),
    )
