"""Recurrent layers as the loops over time that they are, of torch's own cells: `flop_counter` sees these, and not a library's
kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autoparallel.planner.capture.recurrent import shape_of

CELLS: dict[str, Callable[..., Any]] = {
    "lstm": torch.lstm_cell,
    "gru": torch.gru_cell,
    "rnn_tanh": torch.rnn_tanh_cell,
    "rnn_relu": torch.rnn_relu_cell,
}


def stepwise(name: str, args: tuple[Any, ...]) -> Callable[[], Any] | None:
    """What runs instead of the recurrent layer `name`; None for other functions, and for packed sequences, whose lengths are
    values."""
    return None if shape_of(name, args) is None else lambda: _layers(name, *args)


def _layers(
    name: str,
    rows: Tensor,
    state: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Same arguments as torch.lstm: (steps, samples, width) in, the same with (directions x hidden) out, then the last
    states of all layers."""
    cell, directions = CELLS[name], 2 if bidirectional else 1
    begin = state if name == "lstm" else (state,)
    each = len(weights) // (layers * directions)  # weights of one direction of one layer
    projected = each > (4 if has_biases else 2)  # of an LSTM: the hidden state is multiplied once more
    rows = rows.transpose(0, 1) if batch_first else rows
    ends: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        found = []
        for direction in range(directions):
            row = layer * directions + direction
            own = list(weights[row * each : (row + 1) * each])
            projection = own.pop() if projected else None
            first = tuple(part[row] for part in begin)
            out, last = _over_time(cell, rows, first, own, projection, backwards=direction == 1)
            found.append(out)
            ends.append(last)
        rows = found[0] if directions == 1 else torch.cat(found, dim=-1)
        if dropout and train and layer < layers - 1:
            rows = F.dropout(rows, dropout, train)
    out = rows.transpose(0, 1) if batch_first else rows
    return (out, *(torch.stack(parts) for parts in zip(*ends, strict=True)))


def _over_time(
    cell: Callable[..., Any],
    rows: Tensor,
    state: tuple[Tensor, ...],
    weights: Sequence[Tensor],
    projection: Tensor | None,
    *,
    backwards: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The hidden states of all steps, in the order of the steps, and the last state."""
    steps = range(len(rows))
    found: list[Tensor] = []
    for step in steps[::-1] if backwards else steps:
        if projection is None:
            new = cell(rows[step], state if len(state) > 1 else state[0], *weights)
            state = new if isinstance(new, tuple) else (new,)
        else:
            state = _projected(rows[step], state, weights, projection)
        found.append(state[0])
    return torch.stack(found[::-1] if backwards else found), state


def _projected(
    row: Tensor, state: tuple[Tensor, ...], weights: Sequence[Tensor], projection: Tensor
) -> tuple[Tensor, Tensor]:
    """A step of an LSTM whose hidden state is projected, which `torch.lstm_cell` does not know."""
    hidden, cell = state
    of_row, of_hidden, *biases = weights
    gates = F.linear(row, of_row, *biases[:1]) + F.linear(hidden, of_hidden, *biases[1:])
    entry, forget, new, exit_ = gates.chunk(4, 1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(entry) * torch.tanh(new)
    return F.linear(torch.sigmoid(exit_) * torch.tanh(cell), projection), cell
