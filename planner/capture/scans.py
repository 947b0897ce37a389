"""Layers that go over a sequence in chunks or step by step, as the kernels of the libraries that are made for them.

Each function has the signature of the library's, reads shapes alone and says what one call is (`Work`). Letters: `T` tokens, `H` heads
of values, `K` and `V` numbers of a key and of a value (of states, and of a head, in state-space models), `L` tokens of a chunk. Products
within a chunk are of `L` tokens with each other, those with the state once in a chunk; kernels that pass over states read and write
`T / L` of them. What bounds them is neither the matrix units nor, on most devices, the memory: see docs/cost-model.md#kernels.

- `selective_scan_fn`: Gu, Dao, "Mamba", arXiv:2312.00752. Source: mamba_ssm 2.3, ops/selective_scan_interface.py (SelectiveScanFn).
- `causal_conv1d_fn`: causal_conv1d 1.5: one kernel each way, which computes its activation again.
- `mamba_chunk_scan_combined`, `mamba_split_conv1d_scan_combined`: Dao, Gu, "Transformers are SSMs", arXiv:2405.21060. Source: mamba_ssm
  2.3, ops/triton/ssd_combined.py (MambaChunkScanCombinedFn, MambaSplitConv1dScanCombinedFn).
- `chunk_gated_delta_rule`, `chunk_kda`: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464; "Kimi Linear",
  arXiv:2510.26692. Source: flash-linear-attention 0.5, ops/gated_delta_rule/chunk.py, ops/kda/chunk.py and what they call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoparallel.costmodel.graph import ITEM_BYTES, OpKind
from autoparallel.planner.capture.one_call import Inside, Step, Work

_SCAN_CHUNK = 2048  # steps between states that the selective scan keeps
_DELTA_CHUNK = 64  # tokens of a chunk of a delta rule
_FLOAT = "float32"


def _present(*given: Any) -> list[Any]:
    return [one for one in given if one is not None]


def _floats(rows: Any) -> float:
    """Numbers of the dtype of `rows` that one in 32 bits is as long as."""
    return ITEM_BYTES[_FLOAT] / ITEM_BYTES[str(rows.dtype).removeprefix("torch.")]


def _steps(of: str, *kernels: tuple[float, float]) -> tuple[Step, ...]:
    """Kernels of so many FLOPs and numbers moved."""
    return tuple(
        Step(kind=OpKind.RECURRENT, flops=round(flops), numbers=moved, of=of) for flops, moved in kernels
    )


def selective_scan_fn(
    u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, delta_bias: Any = None,  # noqa: N803  as there
    **rest: Any,
) -> Work:  # fmt: skip
    """`u`, `delta`, `z` (samples, width, steps), `A` (width, states), `B`, `C` (samples, states, steps). One kernel each way, which reads
    what it is given and writes what it returns; a product of states and what is read out of them."""
    given = _present(u, delta, A, B, C, D, z, delta_bias)
    states = A.shape[-1]
    kept = (
        Inside(shape=(*u.shape[:2], -(-u.shape[-1] // _SCAN_CHUNK), 2 * states), dtype=_FLOAT),
        *([Inside(like=0)] if z is not None else []),  # before the gate
    )
    last = (
        [Inside(shape=(u.shape[0], u.shape[1], A.shape[1]), dtype=_FLOAT)]
        if rest.get("return_last_state")
        else []
    )
    moved = sum(math.prod(t.shape) * _wider(t, u) for t in (*given, u))
    flops = 2 * math.prod(u.shape) * states
    return Work(
        returns=(Inside(like=0), *last),
        kept=kept,
        given=tuple(range(len(given))),
        forward=(Step(kind=OpKind.ELEMENTWISE, flops=flops, numbers=moved),),
        backward=(Step(kind=OpKind.ELEMENTWISE, flops=2 * flops, numbers=2 * moved, of="input"),),
    )


def _wider(given: Any, rows: Any) -> float:
    item = ITEM_BYTES[str(given.dtype).removeprefix("torch.")]
    return item / ITEM_BYTES[str(rows.dtype).removeprefix("torch.")]


def causal_conv1d_fn(x: Any, weight: Any, bias: Any = None, **rest: Any) -> Work:  # noqa: ARG001  as there
    """`x` (samples, channels, steps), `weight` (channels, taps)."""
    given = _present(x, weight, bias)
    forward, backward = _convolution(math.prod(x.shape), weight.shape[-1])
    return Work(
        returns=(Inside(like=0),), given=tuple(range(len(given))), forward=_steps("", forward),
        backward=_steps("input", backward),
    )  # fmt: skip


def _convolution(numbers: int, taps: int) -> tuple[tuple[float, float], tuple[float, float]]:
    return (2 * taps * numbers, 2 * numbers), (4 * taps * numbers, 3 * numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dual:
    """The sizes of a state-space model's scan. `wide`: numbers of the activations' dtype in one of 32 bits."""

    tokens: int  # of whole chunks
    heads: int
    head: int
    groups: int
    states: int
    chunk: int
    wide: float

    @property
    def rows(self) -> int:
        return self.tokens * self.heads * self.head

    @property
    def inputs(self) -> int:
        """Numbers of B, or of C."""
        return self.tokens * self.groups * self.states

    @property
    def between(self) -> int:
        """Numbers of the states between chunks."""
        return self.tokens // self.chunk * self.heads * self.head * self.states

    @property
    def pairs(self) -> int:
        """Numbers of the products of C and B within chunks."""
        return self.tokens * self.groups * self.chunk

    @property
    def step_sizes(self) -> float:
        """Numbers of a step size in 32 bits and its sum along the chunk."""
        return 2 * self.tokens * self.heads * self.wide

    @property
    def with_states(self) -> int:
        """FLOPs of a product of rows and states."""
        return 2 * self.rows * self.states

    @property
    def with_pairs(self) -> int:
        """FLOPs of one of rows and pairs, of which half come before."""
        return self.rows * self.chunk

    def states_of_chunks(self) -> tuple[tuple[float, float], ...]:
        """What both passes begin with: step sizes, the state that each chunk adds, states handed on, products of C and B."""
        return (
            (0, 2 * self.step_sizes),
            (self.with_states, self.rows + self.inputs + self.step_sizes + self.wide * self.between),
            (0, (self.wide + 1) * self.between),
            (2 * self.inputs * self.chunk, 2 * self.inputs + self.wide * self.pairs),
        )

    def forward(self) -> tuple[tuple[float, float], ...]:
        read = self.rows + self.inputs + self.between + self.wide * self.pairs + self.step_sizes
        return (*self.states_of_chunks(), (self.with_states + self.with_pairs, read + self.rows))

    def backward(self) -> tuple[tuple[float, float], ...]:
        pairs, states = self.wide * self.pairs, self.wide * self.between
        once = 2 * self.rows + self.step_sizes
        return (
            *self.states_of_chunks(),
            (self.with_states, self.rows + self.inputs + states),  # of states
            (0, 2 * states + 2 * self.between),  # handed back
            (
                self.with_states + self.with_pairs,
                once + self.rows + self.inputs + pairs + self.between,
            ),  # of x
            (self.with_states, self.rows + self.between + (1 + self.wide) * self.inputs),  # of B
            (self.with_states, self.rows + self.between + (1 + self.wide) * self.inputs),  # of C
            (self.with_pairs, once + pairs),  # of the products of C and B
            *[(2 * self.inputs * self.chunk, 3 * self.inputs + pairs)] * 2,  # and of each of these
            (self.with_pairs, once + pairs),  # of step sizes
            (0, 3 * self.step_sizes),
        )


def mamba_chunk_scan_combined(
    x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, D: Any = None, z: Any = None, dt_bias: Any = None,  # noqa: N803  as there
    initial_states: Any = None, **rest: Any,
) -> Work:  # fmt: skip
    """`x` (samples, steps, heads, numbers of a head), `dt` (samples, steps, heads), `A` (heads), `B`, `C` (samples, steps, groups, states)."""
    given = _present(x, dt, A, B, C, D, z, dt_bias, initial_states)
    samples, steps, heads, head = x.shape
    dual = _dual(x, samples, steps, heads, head, B.shape[2], B.shape[3], chunk_size)
    last = [Inside(shape=(samples, heads, head, B.shape[3]), dtype=_FLOAT)]
    return Work(
        returns=(Inside(shape=tuple(x.shape)), *(last if rest.get("return_final_states") else [])),
        kept=(
            Inside(shape=(samples, heads, dual.tokens // samples), dtype=_FLOAT),
            *([Inside(shape=tuple(x.shape))] if z is not None else []),
        ),
        given=tuple(range(len(given))),
        made=() if z is not None else (0,),
        forward=_steps("", *dual.forward()),
        backward=_steps("input", *dual.backward()),
    )


def _dual(
    rows: Any, samples: int, steps: int, heads: int, head: int, groups: int, states: int, chunk: int
) -> _Dual:
    tokens = samples * -(-steps // chunk) * chunk
    return _Dual(
        tokens=tokens,
        heads=heads,
        head=head,
        groups=groups,
        states=states,
        chunk=chunk,
        wide=_floats(rows),
    )


def mamba_split_conv1d_scan_combined(
    zxbcdt: Any, conv1d_weight: Any, conv1d_bias: Any, dt_bias: Any, A: Any, D: Any, chunk_size: int,  # noqa: N803  as there
    initial_states: Any = None, *, rmsnorm_weight: Any = None, outproj_weight: Any = None, outproj_bias: Any = None,
    headdim: int | None = None, ngroups: int = 1, **rest: Any,
) -> Work:  # fmt: skip
    """A whole mixer but its first product: `zxbcdt` (samples, steps, 2 inner + 2 groups states + heads), convolution, scan, gated norm
    and the last product, of (model, inner). Kept are what comes in and the scan's result; the rest is computed again."""
    given = _present(
        zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, initial_states, rmsnorm_weight, outproj_weight, outproj_bias,
    )  # fmt: skip
    samples, steps, _ = zxbcdt.shape
    heads, head = D.shape[0], headdim or D.shape[-1]
    inner, (channels, taps) = heads * head, conv1d_weight.shape
    states = (channels - inner) // ngroups // 2
    dual = _dual(zxbcdt, samples, steps, heads, head, ngroups, states, chunk_size)
    rows = samples * steps * inner
    there, back = _convolution(samples * steps * channels, taps)
    normed = rmsnorm_weight is not None
    norm = ((0, 3 * rows), (0, 6 * rows)) if normed else ((0, 0), (0, 0))
    width = inner if outproj_weight is None else outproj_weight.shape[0]
    last = [] if outproj_weight is None else [Step(product="roi")]
    product = [Step(product="rio", of="input"), Step(product="oir", of="weight")] if last else []
    return Work(
        returns=(
            Inside(shape=(samples, steps, width)),
            *(
                [Inside(shape=(samples, heads, head, states), dtype=_FLOAT)]
                if rest.get("return_final_states")
                else []
            ),
        ),
        kept=(
            Inside(shape=(samples, steps, inner)),
            *([Inside(shape=(samples * steps * ngroups,), dtype=_FLOAT)] if normed else []),
        ),
        given=tuple(range(len(given))),
        forward=(*_steps("", there, *dual.forward(), norm[0]), *last),
        backward=(*product, *_steps("input", there, norm[1], *dual.backward(), back)),
        sizes={"r": samples * steps, "o": width, "i": inner},
    )


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
    wide = _floats(q)
    pairs = Inside(shape=(samples, steps, heads, chunk))
    kept = [Inside(shape=tuple(g.shape), dtype=_FLOAT), pairs, *([pairs] if per_key else [])]
    if normed:
        kept += [
            *[Inside(shape=tuple(q.shape))] * 2,
            *[Inside(shape=(samples, steps, queries), dtype=_FLOAT)] * 2,
        ]
    delta = _Delta(
        tokens=tokens, queries=queries * keys, keys=heads * keys, values=heads * values, heads=heads, chunk=chunk,
        states=tokens // chunk * heads * keys * values,
        gates=round(tokens * heads * (keys if per_key else 1) * wide), per_key=per_key,
    )  # fmt: skip
    norms = [(0, 4 * tokens * queries * keys)] if normed else []
    again = [(0, 6 * tokens * queries * keys)] if normed else []
    final = [Inside(shape=(samples, heads, keys, values), dtype=_FLOAT)] if last else []
    count = 5 + (initial_state is not None)
    return Work(
        returns=(Inside(shape=tuple(v.shape)), *final),
        kept=tuple(kept),
        given=(*(range(2, count) if normed else range(count)),),
        forward=_steps("", *norms, *delta.forward()),
        backward=_steps("input", *delta.backward(), *again),
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


WORKS = {
    work.__name__: work
    for work in (
        selective_scan_fn,
        causal_conv1d_fn,
        mamba_chunk_scan_combined,
        mamba_split_conv1d_scan_combined,
        chunk_gated_delta_rule,
    )
} | {"chunk_kda": chunk_kda}
