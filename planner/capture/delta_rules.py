"""Delta rules, which go over a sequence in chunks, as the kernels of the library for them; how these are said, see `scans.py`.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464; "Kimi Linear", arXiv:2510.26692; flash-linear-attention 0.5,
ops/gated_delta_rule/chunk.py, ops/kda/chunk.py and what they call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoparallel.planner.capture.one_call import FLOAT, Inside, Work, floats, kernels_of

_DELTA_CHUNK = 64  # tokens of a chunk


def chunk_gated_delta_rule(
    q: Any, k: Any, v: Any, g: Any, beta: Any, *, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    initial_state: Any = None, **rest: Any,  # noqa: ARG001  as there
) -> Work:  # fmt: skip
    """`q`, `k` (samples, steps, heads, keys), `v` (samples, steps, value heads, values), `beta` (samples, steps, value heads), `g` likewise,
    or with a gate for each number of a key."""
    return _delta_rule(
        (q, k, v, g, beta), initial_state, per_key=len(g.shape) == 4, last=output_final_state, normed=use_qk_l2norm_in_kernel,
    )  # fmt: skip


chunk_kda = chunk_gated_delta_rule


def _delta_rule(given: Sequence[Any], initial_state: Any, *, per_key: bool, last: bool, normed: bool) -> Work:
    q, _, v, g, _ = given
    samples, steps, queries, keys = q.shape
    heads, values = v.shape[-2:]
    chunk, tokens = _DELTA_CHUNK, samples * -(-steps // _DELTA_CHUNK) * _DELTA_CHUNK
    wide = floats(q)
    pairs = Inside(shape=(samples, steps, heads, chunk))
    kept = [Inside(shape=tuple(g.shape), dtype=FLOAT), pairs, *([pairs] if per_key else [])]
    if normed:
        kept += [
            *[Inside(shape=tuple(q.shape))] * 2,
            *[Inside(shape=(samples, steps, queries), dtype=FLOAT)] * 2,
        ]
    delta = _Delta(
        tokens=tokens, queries=queries * keys, keys=heads * keys, values=heads * values, heads=heads, chunk=chunk,
        states=tokens // chunk * heads * keys * values,
        gates=round(tokens * heads * (keys if per_key else 1) * wide), per_key=per_key,
    )  # fmt: skip
    norms = [(0, 4 * tokens * queries * keys)] if normed else []
    again = [(0, 6 * tokens * queries * keys)] if normed else []
    final = [Inside(shape=(samples, heads, keys, values), dtype=FLOAT)] if last else []
    count = 5 + (initial_state is not None)
    return Work(
        returns=(Inside(shape=tuple(v.shape)), *final),
        kept=tuple(kept),
        given=(*(range(2, count) if normed else range(count)),),
        forward=kernels_of("", *norms, *delta.forward()),
        backward=kernels_of("input", *delta.backward(), *again),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delta:
    """The sizes of a delta rule, `queries`, `keys` and `values` of all heads of one token."""

    tokens: int
    queries: int
    keys: int
    values: int
    heads: int
    chunk: int
    states: int
    gates: int  # numbers of the activations' dtype that the gates are as long as
    per_key: bool

    def within(self, *widths: int) -> int:
        """FLOPs of products within chunks, of so many numbers of a token each."""
        return 2 * self.tokens * self.chunk * sum(widths)

    def moved(self, *widths: float, states: int = 0) -> float:
        return self.tokens * sum(widths) + states * self.states + self.gates

    @property
    def with_states(self) -> int:
        """FLOPs of a product with the state."""
        return 2 * self.states * self.chunk

    @property
    def pairs(self) -> int:
        return self.heads * self.chunk

    def rewritten(self) -> tuple[tuple[float, float], ...]:
        """What both passes need: keys and values that a chunk adds (the WY representation), and the states between chunks."""
        k, v = self.keys, self.values
        return (
            (self.within(k, v), self.moved(self.queries, v, self.pairs, k, v)),
            (2 * self.with_states, self.moved(self.queries, k, v, v, states=1)),
        )

    def forward(self) -> tuple[tuple[float, float], ...]:
        q, k, v = self.queries, self.keys, self.values
        scores = [(self.within(k), self.moved(q, q, self.pairs))] if self.per_key else []
        return (
            (0, 2 * self.gates),
            (self.within(k), self.moved(q, 2 * self.pairs)),
            *scores,
            *self.rewritten(),
            (self.with_states + self.within(v, *([] if scores else [k])), self.moved(2 * q, v, v, states=1)),
        )

    def backward(self) -> tuple[tuple[float, float], ...]:
        q, k, v = self.queries, self.keys, self.values
        summed = [(0, self.tokens * (2 * k + 2 * q))] if q != k else []
        return (
            *self.rewritten(),
            (self.within(k, v), self.moved(2 * q, 2 * v)),  # of values, within chunks
            (3 * self.with_states, self.moved(2 * q, k, 3 * v, states=1)),  # of states
            (3 * self.with_states + self.within(v, 3 * k), self.moved(2 * q, 3 * v, 3 * k, states=2)),
            *summed,
            (self.within(5 * k, 2 * v, 2 * self.pairs), self.moved(q, self.pairs, 2 * k, 3 * v)),
            (0, 3 * self.tokens * q + 2 * self.gates),
        )
