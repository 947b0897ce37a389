"""What gradients and parameters take to be exchanged where a mesh places its groups: rates that no strategy there goes below."""

from __future__ import annotations

from autoparallel.costmodel.program import Axis
from autoparallel.planner.expand import state
from autoparallel.planner.expand.expander import MIB, mesh_axes
from autoparallel.planner.expand.one_by_one import fetches
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.prices import PriceBook
from autoparallel.planner.search.space.syncs import widest_bucket_mib
from autoparallel.planner.strategy.types import Strategy

Axes = tuple[Axis, ...]
NUMBERED = ("all_experts", "group_parameters", "most_trainable")  # columns that a price depends on
DENSE = ("reduce_s", "gather_s", "gather_each_s")
EXPERT = ("reduce_expert_s", "gather_expert_s")
EXCHANGED = (*DENSE, *EXPERT)


def dense_exchange_s(
    problem: Problem,
    book: PriceBook,
    strategy: Strategy,
    *,
    all_experts: int,
    group_parameters: int,
    most_trainable: int,
) -> tuple[float, ...]:
    """DENSE of one placement; NUMBERED as the price table has them."""
    if not reduces(strategy):  # or priced with the passes of the blocks, to which nothing is done as a whole
        return (0.0,) * len(DENSE)
    most = max(most_trainable, 1) + all_experts  # at once, see `_dense_s`
    return _dense_s(problem, book, strategy, mesh_axes(strategy), most, group_parameters)


def expert_exchange_s(
    problem: Problem, book: PriceBook, strategy: Strategy, experts: int
) -> tuple[float, ...]:
    """EXPERT of one placement, of so many parameters."""
    if fetches(strategy):
        return (0.0,) * len(EXPERT)
    axes = mesh_axes(strategy)
    gather_s = _gather_s(book, strategy, axes, experts, experts) / experts
    return _reduce_expert_s(problem, book, strategy, axes, experts), gather_s


def reduces(strategy: Strategy) -> bool:
    """Whether several ranks share the gradients of a parameter, and exchange them as a whole."""
    if fetches(strategy):
        return False
    return strategy.mesh.data_parallel * strategy.mesh.cp > 1


def update_s(book: PriceBook, strategy: Strategy, axes: Axes, parameters: int, experts: int) -> float:
    """To update so many parameters at once and to gather them again: experts and others are updated by one kernel, so
    that the rate of either is that of all."""
    mode = strategy.execution.kernels
    updates = state.optimizer_kernel(parameters, strategy, experts)
    gathers = () if strategy.execution.late_gathers else state.updated_gather(parameters, strategy, experts)
    step_s = sum(book.pricer.kernel_s(kernel, book.device, mode) for kernel in updates)
    return step_s + sum(book.pricer.collective_s(c, axes) for c in gathers)


def _dense_s(
    problem: Problem, book: PriceBook, strategy: Strategy, axes: Axes, most: int, group: int
) -> tuple[float, float, float]:
    """reduce_s, of so many parameters at once, gather_s of a layer group, and gather_each_s."""
    if state.zero_level(strategy) < 3:
        return _bucket_s(problem, book, strategy, axes), 0.0, 0.0
    # Shards of experts and of the rest are summed over replicas by one collective.
    reduce_s = at_once_s(book, strategy, axes, most)
    whole = max(problem.graph.parameter_count, 1)
    return (
        reduce_s,
        _gather_s(book, strategy, axes, group, 0),
        _gather_s(book, strategy, axes, whole, 0) / whole,
    )


def at_once_s(book: PriceBook, strategy: Strategy, axes: Axes, parameters: int, experts: int = 0) -> float:
    """To reduce the gradient of one of so many parameters, all of them at once."""
    return book.reduction_s(parameters, strategy, axes, experts) / parameters


def _bucket_s(
    problem: Problem, book: PriceBook, strategy: Strategy, axes: Axes, *, experts: bool = False
) -> float:
    """To reduce the gradient of one parameter in the widest bucket."""
    item = state.dtype_bytes(strategy.execution.grad_dtype)
    bucket = round(widest_bucket_mib(problem) * MIB)
    return book.reduce_rate(strategy, axes, bucket, experts=experts) * item


def _gather_s(book: PriceBook, strategy: Strategy, axes: Axes, parameters: int, experts: int) -> float:
    """To gather so many parameters at once, all or none of them experts', ZeRO-3."""
    gathers = state.gathers_of(parameters, experts, strategy)
    return sum(book.pricer.collective_s(c, axes) for c in gathers if c is not None)


def _reduce_expert_s(
    problem: Problem, book: PriceBook, strategy: Strategy, axes: Axes, experts: int
) -> float:
    """To reduce the gradient of one of so many parameters."""
    if state.zero_level(strategy) < 3:
        return _bucket_s(problem, book, strategy, axes, experts=True)
    return at_once_s(book, strategy, axes, experts, experts)
