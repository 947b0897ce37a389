"""Lengths of a run's sequences: which its phases have, and the graph of the model that goes with a strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.errors import UserError
from autoparallel.planner.strategy.types import Phase, Strategy

SEQ_LEN = "batch.seq_len"


def phase_lengths(phases: Sequence[Phase]) -> dict[int, str]:
    """Tokens per sequence that phases ask for, in their order, each with the words that ask first."""
    found: dict[int, str] = {}
    for phase in phases:
        tokens = dict(phase.keys).get(SEQ_LEN)
        if isinstance(tokens, int):
            found.setdefault(tokens, f"[[phase]] from step {phase.from_step}: {SEQ_LEN} = {tokens}")
    return found


def phases_of(said: Mapping[str, object]) -> tuple[Phase, ...]:
    """The `[[phase]]` entries of constraints."""
    phases = said.get("phase", ())
    assert isinstance(phases, tuple)
    return phases


def length_problem(graph: ModelGraph, tokens: int) -> str | None:
    """Why a strategy with sequences of so many tokens has no graph that it could be priced by; None where it has."""
    if graph.of_length(tokens) is not None:
        return None
    if graph.tokens_per_sample == 1:
        return f"{SEQ_LEN} = {tokens}: a sample of {graph.name} is no sequence of tokens; leave it out"
    known = [one.tokens_per_sample for one in (graph, *graph.other_lengths)]
    return (
        f"{SEQ_LEN} = {tokens}: {graph.name} was captured with sequences of {' and '.join(map(str, known))}; give --seq-len "
        f"{tokens}, or example inputs of that length"
    )


def graph_at(graph: ModelGraph, tokens: int) -> ModelGraph:
    """The model's graph with sequences of so many tokens. Raises UserError where there is none."""
    found = graph.of_length(tokens)
    if found is None:
        raise UserError(str(length_problem(graph, tokens)))
    return found


def with_length(strategy: Strategy, tokens: int) -> Strategy:
    """The strategy for sequences of so many tokens."""
    return replace(strategy, batch=replace(strategy.batch, seq_len=tokens))
