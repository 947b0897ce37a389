"""Recurrent layers as accelerators run them: the inputs of all steps multiplied at once, and step by step what depends on the
step before.

Per layer and direction, of S steps, B samples, G gates, H hidden states and I inputs:

    forward     (S B, I) x (I, G H);  S times (B, H) x (H, G H) and one kernel over the gates
    backward    S times one kernel over the gates and (B, G H) x (G H, H);  (S B, G H) x (G H, I);  the weights' gradients of all
                steps at once, (G H, S B) x (S B, I) and (G H, S B) x (S B, H)

Source: Appleyard, Kocisky, Blunsom, "Optimizing Performance of Recurrent Neural Networks on GPUs" (2016), which is how cuDNN runs
them; an LSTM that projects its hidden states multiplies those once more in every step. What the kernel over the gates reads, writes
and keeps is what torch's own fused cells do (RNN.cu: _thnn_fused_lstm_cell, _thnn_fused_gru_cell and their backward).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autoparallel.costmodel.graph import OpKind
from autoparallel.planner.capture.one_call import Inside, OneCall, Step, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A step's kernel over the gates: numbers for each sample and hidden state that it moves, forward and backward, and that
    are kept of it."""

    gates: int
    forward: int
    backward: int
    kept: int


CELLS = {
    # Gates of inputs and of states, the old cell; the new cell, the new state, and the gates as they came out.
    "lstm": Cell(gates=4, forward=4 + 4 + 1 + 1 + 1 + 4, backward=1 + 1 + 1 + 1 + 4 + 4 + 1, kept=4 + 1),
    # Likewise, the old state instead of the cell; of the third gate both parts are kept, and the old state.
    "gru": Cell(gates=3, forward=3 + 3 + 1 + 1 + 5, backward=1 + 5 + 3 + 3 + 1, kept=5),
    "rnn_tanh": Cell(gates=1, forward=1 + 1 + 1, backward=1 + 1 + 1, kept=0),
    "rnn_relu": Cell(gates=1, forward=1 + 1 + 1, backward=1 + 1 + 1, kept=0),
}
FUSED_CELLS = {"lstm_cell": CELLS["lstm"], "gru_cell": CELLS["gru"]}  # called by themselves: by name
FIRST, OTHERS = "i", "j"  # letters of the inputs of the first layer, and of those behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of one call, which are those of its parameters and inputs. `widths` are inputs of each layer; `states` is what a
    step hands to the next, `hidden` or, of an LSTM that projects, less."""

    cell: Cell
    steps: int
    samples: int
    directions: int
    widths: tuple[int, ...]
    hidden: int
    states: int
    dropped: bool  # between layers

    @property
    def projects(self) -> bool:
        return self.states != self.hidden

    @property
    def kept(self) -> int:
        """Numbers that are kept for the backward pass, beside inputs, weights and the last layer's states."""
        inside = (self.cell.kept + self.projects) * self.hidden * self.directions * len(self.widths)
        return self.steps * self.samples * inside + (len(self.widths) - 1) * self.between

    @property
    def between(self) -> int:
        """Numbers that a layer hands to the next."""
        return self.steps * self.samples * self.directions * self.states

    @property
    def sizes(self) -> dict[str, int]:
        """By letter: rows of all steps, samples, gates, hidden states, what a step hands on; inputs of the first layer and of others."""
        wide = self.cell.gates * self.hidden
        own = {
            "r": self.steps * self.samples,
            "s": self.samples,
            "g": wide,
            "h": self.hidden,
            "p": self.states,
        }
        return own | dict(zip((FIRST, OTHERS), self.widths, strict=False))

    @property
    def read(self) -> tuple[tuple[str, int], ...]:
        """The letters of what layers read, and how many read that."""
        others = (len(self.widths) - 1) * self.directions
        return ((FIRST, self.directions), *(((OTHERS, others),) if others else ()))


def shape_of(name: str, args: Sequence[Any]) -> Shape | None:
    """The sizes of a call of the recurrent layer `name`; None for other functions, and for packed sequences, whose lengths are
    values."""
    if name not in CELLS or len(args) != 9 or not isinstance(args[2], list | tuple):
        return None
    rows, _, weights, has_biases, layers, dropout, train, both, batch_first = args
    samples, steps = rows.shape[:2] if batch_first else rows.shape[1::-1]
    directions = 2 if both else 1
    each = len(weights) // (layers * directions)  # weights of one direction of one layer
    projects = each > (4 if has_biases else 2)
    cell, first = CELLS[name], weights[: each * directions * layers : each * directions]
    hidden = int(first[0].shape[0]) // cell.gates
    return Shape(
        cell=cell, steps=int(steps), samples=int(samples), directions=directions,
        widths=tuple(int(weight.shape[1]) for weight in first), hidden=hidden,
        states=int(weights[each - 1].shape[0]) if projects else hidden,
        dropped=bool(dropout and train and layers > 1),
    )  # fmt: skip


def recurrent_work(name: str, args: Sequence[Any], needs: Sequence[bool] = ()) -> Work | None:
    """What one call of the recurrent layer `name` does; None for what is none (see `shape_of`). `needs`: which of its tensors have
    gradients, in their order, all where nothing is said."""
    shape = shape_of(name, args)
    if shape is None:
        return None
    rows, state, weights = args[:3]
    begin = list(state) if name == "lstm" else [state]
    rows_need, states_need = needs[:2] if needs else (True, True)
    count = 1 + len(begin) + len(weights)
    masks = [Inside(shape=((len(shape.widths) - 1) * shape.between,), dtype="bool")] if shape.dropped else []
    return Work(
        returns=(
            Inside(shape=(*tuple(rows.shape[:2]), shape.directions * shape.states)),
            *(Inside(like=1 + i) for i in range(len(begin))),
        ),
        kept=(*([Inside(shape=(shape.kept,))] if shape.kept else []), *masks),
        given=tuple(range(count)),
        made=(0,),
        forward=tuple(_forward(shape)),
        backward=tuple(
            _backward(
                shape,
                rows_need=rows_need,
                states_need=states_need,
                biased=any(len(weight.shape) == 1 for weight in weights),
            )
        ),
        sizes=shape.sizes,
    )


def recurrent(name: str, args: Sequence[Any]) -> Callable[[], tuple[Tensor, ...]] | None:
    """What runs instead of the recurrent layer `name`; None for what is none (see `shape_of`)."""
    work = recurrent_work(name, args)
    if work is None:
        return None
    rows, state, weights = args[:3]
    begin = state if name == "lstm" else (state,)
    return lambda: OneCall.apply(work, rows, *begin, *weights)


def _forward(shape: Shape) -> Iterator[Step]:
    """The kernels of the forward pass."""
    layers = shape.directions * len(shape.widths)
    each, gates = shape.steps * layers, shape.cell.forward * shape.samples * shape.hidden
    for letter, count in shape.read:
        yield Step(count=count, product=f"rg{letter}")
    yield Step(count=each, product="sgp")
    yield Step(count=each, numbers=gates, kind=OpKind.ELEMENTWISE)
    if shape.projects:
        yield Step(count=each, product="sph")
    if shape.dropped:
        yield Step(count=len(shape.widths) - 1, numbers=2 * shape.between, kind=OpKind.DROPOUT)


def _backward(shape: Shape, *, rows_need: bool, states_need: bool, biased: bool) -> Iterator[Step]:
    """The kernels of the backward pass; `rows_need`, `states_need`: whether what came in has gradients."""
    layers = shape.directions * len(shape.widths)
    each, gates = shape.steps * layers, shape.cell.backward * shape.samples * shape.hidden
    yield Step(count=each, numbers=gates, kind=OpKind.ELEMENTWISE, of="input")
    # The first step hands its gradient on to none.
    yield Step(count=each if states_need else each - layers, product="spg", of="input")
    if shape.projects:
        yield Step(count=each, product="shp", of="input")
        yield Step(count=layers, product="phr", of="weight")
    for letter, count in shape.read:
        if rows_need or letter != FIRST:
            yield Step(count=count, product=f"r{letter}g", of="input")
        yield Step(count=count, product=f"g{letter}r", of="weight")
    yield Step(count=layers, product="gpr", of="weight")
    if biased:
        sums = shape.sizes["r"] * shape.sizes["g"] + 2 * shape.sizes["g"]
        yield Step(count=layers, numbers=sums, kind=OpKind.REDUCTION, of="weight")
    if shape.dropped:
        yield Step(count=len(shape.widths) - 1, numbers=2 * shape.between, kind=OpKind.DROPOUT, of="input")
