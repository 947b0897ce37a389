"""State-space models' layers, which go over a sequence step by step or in chunks, as the kernels of the libraries for them.

Each function has the signature of the library's, reads shapes alone and says what one call is (`Work`). What bounds them is neither the matrix
units nor, on most devices, the memory: see docs/cost-model.md#kernels.

- `selective_scan_fn`, `mamba_inner_fn`: Gu, Dao, "Mamba", arXiv:2312.00752. Source: mamba_ssm 2.3, ops/selective_scan_interface.py
  (SelectiveScanFn, MambaInnerFn).
- `causal_conv1d_fn`: causal_conv1d 1.5: one kernel each way, which computes its activation again.
- `mamba_chunk_scan_combined`, `mamba_split_conv1d_scan_combined`: Dao, Gu, "Transformers are SSMs", arXiv:2405.21060. Source: mamba_ssm
  2.3, ops/triton/ssd_combined.py (MambaChunkScanCombinedFn, MambaSplitConv1dScanCombinedFn).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from autoparallel.costmodel.graph import ITEM_BYTES
from autoparallel.planner.capture.one_call import FLOAT, Inside, Step, Work, floats, kernels_of, present

_SCAN_CHUNK = 2048  # steps between states that the selective scan keeps
# FLOPs of a state and a step: seven multiply-adds, and an exponential, of which a unit of vectors makes one in the time of eight of these
# (CUDA C programming guide, arithmetic instructions: 16 of 128 a clock). Backward: the same again, and twice as much. Kind: formula.
_A_STATE, _BACK = 30, 3


def selective_scan_fn(
    u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, delta_bias: Any = None,  # noqa: N803  as there
    **rest: Any,
) -> Work:  # fmt: skip
    """`u`, `delta`, `z` (samples, width, steps), `A` (width, states), `B`, `C` (samples, states, steps). One kernel each way, which reads
    what it is given and writes what it returns."""
    given = present(u, delta, A, B, C, D, z, delta_bias)
    states = A.shape[-1]
    kept = (
        Inside(shape=(*u.shape[:2], -(-u.shape[-1] // _SCAN_CHUNK), 2 * states), dtype=FLOAT),
        *([Inside(like=0)] if z is not None else []),  # before the gate
    )
    last = (
        [Inside(shape=(u.shape[0], u.shape[1], A.shape[1]), dtype=FLOAT)]
        if rest.get("return_last_state")
        else []
    )
    moved = sum(math.prod(t.shape) * _wider(t, u) for t in (*given, u))
    flops = _A_STATE * math.prod(u.shape) * states
    return Work(
        returns=(Inside(like=0), *last),
        kept=kept,
        given=tuple(range(len(given))),
        forward=kernels_of("", (flops, moved)),
        backward=kernels_of("input", (_BACK * flops, 2 * moved)),
    )


def mamba_inner_fn(
    xz: Any, conv1d_weight: Any, conv1d_bias: Any, x_proj_weight: Any, delta_proj_weight: Any, out_proj_weight: Any,
    out_proj_bias: Any, A: Any, B: Any = None, C: Any = None, D: Any = None, delta_bias: Any = None, *,  # noqa: N803  as there
    b_rms_weight: Any = None, c_rms_weight: Any = None, dt_rms_weight: Any = None, **rest: Any,  # noqa: ARG001
) -> Work:  # fmt: skip
    """A whole mixer but its first product: `xz` (samples, 2 width, steps), convolution, the products that give step sizes, B and C, scan and
    the last product. Kept are what comes in, step sizes before their product, B, C and the scan's result; the rest is computed again."""
    given = present(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B, C, D, delta_bias,
        b_rms_weight, c_rms_weight, dt_rms_weight,
    )  # fmt: skip
    samples, _, steps = xz.shape
    width, rank = delta_proj_weight.shape
    states, tokens = A.shape[-1], samples * steps
    there, back = _convolution(tokens * width, conv1d_weight.shape[-1])
    choices, rows = 2 * tokens * states, tokens * width
    norms = [
        (0, 2 * n)
        for n, one in ((choices / 2, b_rms_weight), (choices / 2, c_rms_weight), (rows, dt_rms_weight))
        if one is not None
    ]
    scan, moved = _A_STATE * rows * states, 4 * rows + choices
    sizes = {"r": tokens, "w": width, "d": rank, "c": x_proj_weight.shape[0], "o": out_proj_weight.shape[0]}
    return Work(
        returns=(Inside(shape=(samples, steps, sizes["o"])),),
        kept=(
            Inside(shape=(tokens, sizes["c"])),
            *[Inside(shape=(samples, 1, states, steps))] * 2,
            Inside(shape=(samples, width, -(-steps // _SCAN_CHUNK), 2 * states), dtype=FLOAT),
            Inside(shape=(samples, width, steps)),
        ),
        given=tuple(range(len(given))),
        forward=(
            *kernels_of("", there), Step(product="rcw"), Step(product="wrd"), *kernels_of("", (0, 2 * choices), *norms, (scan, moved)),
            Step(product="row"),
        ),
        backward=(
            Step(product="rwo", of="input"), *kernels_of("input", there), Step(product="wrd", of="input"), *kernels_of("input", *norms),
            *kernels_of("input", (_BACK * scan, 2 * moved), (0, 2 * choices), *[(0, 1.5 * read) for _, read in norms]),
            Step(product="owr", of="weight"),
            Step(product="wdr", of="weight"), Step(product="rdw", of="input"),
            Step(product="cwr", of="weight"), Step(product="rwc", of="input"), *kernels_of("input", back),
        ),
        sizes=sizes,
    )  # fmt: skip


def _wider(given: Any, rows: Any) -> float:
    item = ITEM_BYTES[str(given.dtype).removeprefix("torch.")]
    return item / ITEM_BYTES[str(rows.dtype).removeprefix("torch.")]


def causal_conv1d_fn(x: Any, weight: Any, bias: Any = None, **rest: Any) -> Work:  # noqa: ARG001  as there
    """`x` (samples, channels, steps), `weight` (channels, taps)."""
    given = present(x, weight, bias)
    forward, backward = _convolution(math.prod(x.shape), weight.shape[-1])
    return Work(
        returns=(Inside(like=0),), given=tuple(range(len(given))), forward=kernels_of("", forward),
        backward=kernels_of("input", backward),
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
    given = present(x, dt, A, B, C, D, z, dt_bias, initial_states)
    samples, steps, heads, head = x.shape
    dual = _dual(x, samples, steps, heads, head, B.shape[2], B.shape[3], chunk_size)
    last = [Inside(shape=(samples, heads, head, B.shape[3]), dtype=FLOAT)]
    return Work(
        returns=(Inside(shape=tuple(x.shape)), *(last if rest.get("return_final_states") else [])),
        kept=(
            Inside(shape=(samples, heads, dual.tokens // samples), dtype=FLOAT),
            *([Inside(shape=tuple(x.shape))] if z is not None else []),
        ),
        given=tuple(range(len(given))),
        made=() if z is not None else (0,),
        forward=kernels_of("", *dual.forward()),
        backward=kernels_of("input", *dual.backward()),
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
        wide=floats(rows),
    )


def mamba_split_conv1d_scan_combined(
    zxbcdt: Any, conv1d_weight: Any, conv1d_bias: Any, dt_bias: Any, A: Any, D: Any, chunk_size: int,  # noqa: N803  as there
    initial_states: Any = None, *, rmsnorm_weight: Any = None, outproj_weight: Any = None, outproj_bias: Any = None,
    headdim: int | None = None, ngroups: int = 1, **rest: Any,
) -> Work:  # fmt: skip
    """A whole mixer but its first product: `zxbcdt` (samples, steps, 2 inner + 2 groups states + heads), convolution, scan, gated norm
    and the last product, of (model, inner). Kept are what comes in and the scan's result; the rest is computed again."""
    given = present(
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
                [Inside(shape=(samples, heads, head, states), dtype=FLOAT)]
                if rest.get("return_final_states")
                else []
            ),
        ),
        kept=(
            Inside(shape=(samples, steps, inner)),
            *([Inside(shape=(samples * steps * ngroups,), dtype=FLOAT)] if normed else []),
        ),
        given=tuple(range(len(given))),
        forward=(*kernels_of("", there, *dual.forward(), norm[0]), *last),
        backward=(*product, *kernels_of("input", there, norm[1], *dual.backward(), back)),
        sizes={"r": samples * steps, "o": width, "i": inner},
    )
