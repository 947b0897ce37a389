"""`Program`: what one optimizer step does, as data. The simulator prices it, the runtime executes it.

Per pipeline rank a tuple of `Action`s (which has a text form that round-trips), and per stage (a chunk of
consecutive links of the model's chain) a `StageWork` that says what its forward and backward consist of on
one device: kernels with local shapes and collectives over named mesh axes, no seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from autoparallel.costmodel.graph import OpKind


class ActionKind(StrEnum):
    """As in torch.distributed.pipelining, plus what surrounds the schedule."""

    FORWARD = "F"
    BACKWARD = "B"  # input and weight gradients together
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE_GRAD = (
        "REDUCE_GRAD"  # gradients over the data-parallel axes; bucketed, may overlap what stands before
    )
    STEP = "STEP"  # optimizer, and the gather of ZeRO-1/2 parameters after it


@dataclass(frozen=True, slots=True)
class Action:
    """`2F0`: stage 2, forward, micro-batch 0. `micro` is None where there is none (`2STEP`)."""

    stage: int
    kind: ActionKind
    micro: int | None = None


class CollectiveOp(StrEnum):
    """Collectives, and point-to-point between neighbouring stages."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Local attention: batch, query heads, key-value heads, lengths and head sizes."""

    batch: int
    heads: int
    kv_heads: int
    query_length: int
    key_length: int
    head_size: int
    value_size: int
    causal: bool
    flash: bool
    last: bool = False  # the queries are the last of the sequence: they see the keys before them, too
    generation: int = 0  # of flash kernels, FlashAttention 1 or 2; 0: the best of the device
    dropout: bool = False  # of the probabilities, in a kernel of its own where attention is unfused


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel on one device, with local sizes; `count` launches of it."""

    kind: (
        OpKind | str
    )  # or "optimizer", "compress", "host" (a copy to or from the host's memory), "served", "host_update"
    dtype: str  # what the arithmetic runs in: the execution dtype for GEMMs
    flops: int
    bytes_moved: int
    product: tuple[int, int, int, int] | None = None  # batch, m, n, k
    attention: AttentionShape | None = None
    backward: bool = False
    count: int = 1
    beside: bool = (
        False  # on a stream of its own: only what the kernels of its pass do not hide is waited for
    )
    in_library: bool = False  # launched in a library's own loop: a step of a recurrent layer
    sharers: int = 1  # devices whose kernels like this one use their host's memory at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective. `size_bytes` is the full tensor: the output of an all-gather, the input of a
    reduce-scatter, of an all-to-all and of an all-reduce, the message of a send."""

    op: CollectiveOp
    axes: tuple[str, ...]  # mesh axes it spans, e.g. ("dp_shard", "cp")
    size_bytes: int
    algorithm: str = "auto"
    compression: tuple[str, ...] = ()  # per network level, innermost first; () is none
    item_bytes: int = 4  # of one number of the tensor: what compression is relative to
    label: str = ""  # breakdown key: tp, cp, ep, pp, dp
    beside: bool = False  # started ahead of the kernels of its pass: only what they do not hide is waited for
    wraps: bool = False  # a message from the last rank to the first, on irregular networks
    copies: int = (
        1  # of each row in an all-to-all, for as many receivers: those for one rank or node travel as one
    )


Step = Kernel | Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Undivided:
    """Bytes of a block in the halves of a backward pass where autograd keeps the stage's graph whole, as it does unless all blocks of
    the stage put the gradients of their weights off; this one `puts_off` or does not. In a first stage I has nothing to do (`half_idle`),
    and W is a whole pass."""

    puts_off: bool
    saved_bytes: int  # from I to W
    half_temp_bytes: int
    again_temp_bytes: int  # likewise where W is a pass of its own: I keeps nothing for it
    weight_temp_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """One link of the chain on one device for one micro-batch.

    `saved_bytes` live from its forward to its backward; `*_temp_bytes` is the peak above what is live at
    entry and above `saved_bytes` while it runs. `recompute` runs before the backward, and `recomputed_bytes`
    live while that backward runs. Where whole gradients stand until the backward is over, to be reduced (ZeRO-2, 3),
    its peak is `standing_temp_bytes`, and `left_bytes` stand when it is over, also above `saved_bytes`.
    In the first half of a split backward (I), beside which nothing is reduced, its peak is `half_temp_bytes`. Where W is a backward pass of its own it runs `weight_again`, too.
    `weight_gathers`: what is gathered before a backward is gathered before W once more, for autograd's kernels.
    `undivided`: those bytes where the weights of its stage are not put off.
    In the second half of a split backward (W) `weight_temp_bytes` are gradients of weights while they are made, above what is kept for
    that; `weight_reduced_bytes` they and what is reduced, when that has gone.
    `made_bytes` are gradients that are there once its backward is over, and not before; `passing_bytes` parameters that come
    with its forward and go with its backward: both of a step's only micro-batch, and parts of the stage's state.
    `waiting_bytes` are gradients that its backward leaves to be added to those of an earlier link of the stage, which has the
    same tensors. Of what it gathers, `rooted_bytes` stand all through a pass, and are counted in `buffer_bytes`. `gather` brings in ZeRO-3 parameters before forward and again before
    backward, `expert_gather` those of experts; `reduce` is the block's share of gradient synchronisation, in the
    order in which it runs. Parameter counts are this device's after tensor, expert and pipeline sharding and
    before ZeRO; `expert_*` are the part of them that is synchronised over other ranks (`mesh.ep` > 1).
    """

    name: str
    forward: tuple[Step, ...]
    backward_input: tuple[Step, ...]
    backward_weight: tuple[Step, ...]
    recompute: tuple[Step, ...] = ()
    saved_bytes: int = 0
    recomputed_bytes: int = 0
    forward_temp_bytes: int = 0
    backward_temp_bytes: int = 0
    standing_temp_bytes: int | None = None  # None: not known
    half_temp_bytes: int | None = None  # None: that of a whole backward
    half_idle: bool = False  # I has nothing to do, as in a first stage whose weights are not put off
    left_bytes: int = 0
    waiting_bytes: int = 0
    made_bytes: int = 0
    passing_bytes: int = 0
    rooted_bytes: int = 0
    parameters: int = 0  # numbers, not bytes
    trainable: int = 0
    trainable_tensors: int = 0
    expert_parameters: int = 0
    expert_trainable: int = 0
    buffer_bytes: int = 0
    weight_saved_bytes: int | None = (
        None  # of `saved_bytes`, what a split backward keeps from I to W; None: all
    )
    weight_again: tuple[Step, ...] = ()
    weight_gathers: bool = False
    weight_temp_bytes: int = 0
    undivided: Undivided | None = None
    weight_reduced_bytes: int = 0
    host_bytes: int = 0  # of its activations, kept in the host's memory from its forward to its backward
    gather: Collective | None = None
    regather: Collective | None = None  # before backward, where that is another one than before forward
    expert_gather: Collective | None = None
    reduce: tuple[Collective, ...] = ()

    @property
    def gathers(self) -> tuple[Collective, ...]:
        """What is gathered before a forward."""
        return tuple(one for one in (self.gather, self.expert_gather) if one is not None)

    @property
    def regathers(self) -> tuple[Collective, ...]:
        """What is gathered before a backward; nothing where there is none, of a frozen part that no gradient goes through."""
        if not (self.backward_input or self.backward_weight):
            return ()
        return tuple(one for one in (self.regather or self.gather, self.expert_gather) if one is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """What reductions of a stage's gradients hold beside them, bytes, where they copy what they send or receive.

    By link, in the stage's order: `beside` the fullest moment of its last backward, and when that is over (`after`); then go copies of
    its parameters that stood all through the step before (`gone`). `left` stays when the stage's last backward is over; `ending` is
    the most while the step waits for all of them.
    """

    beside: tuple[int, ...]
    after: tuple[int, ...]
    gone: tuple[int, ...]
    left: int
    ending: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """A stage (chunk): runs of equal blocks in model order, what it hands to the next stage, and its state.

    `buffer_bytes` live for the whole step. Gathered ZeRO-3 parameters, and whole gradients on their way to a
    reduction of every micro-batch, are not among them: the memory walk adds those from `BlockWork.gather` and
    `.reduce`.
    """

    blocks: tuple[tuple[BlockWork, int], ...]  # (block, how many in a row)
    send: Collective | None  # activations to the next stage; gradients of the same size come back
    optimizer: tuple[Kernel, ...]
    after_step: tuple[Collective, ...]  # ZeRO-1/2: gather of updated parameters
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int  # communication and bucket buffers
    host_bytes: int = 0  # of optimizer state, kept in the host's memory
    output_bytes: int = (
        0  # of what it has handed on for a micro-batch, where that lives until its backward pass
    )
    input_bytes: int = 0  # of what it was handed for a micro-batch, beside what its first block keeps of that: until its backward pass is over
    tied_reduce: tuple[
        Collective, ...
    ] = ()  # once a step: gradients of tensors tied across stages, and of shards over replicas
    under_way: UnderWay | None = None  # None: reductions run in the gradients' own buffers
    received: Collective | None = (
        None  # after a message, either way: joins the shares of tensor-parallel ranks
    )

    @property
    def links(self) -> list[BlockWork]:
        """The work of every link, in model order."""
        return [work for work, count in self.blocks for _ in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A mesh axis on the topology: its size, and the distance in devices between neighbours along it.

    A `derived` one regroups the ranks of others: expert parallelism takes parts of tp, cp and dp_shard, which
    are then several axes of one name.
    """

    name: str
    size: int
    stride: int
    derived: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One optimizer step: `ranks[p]` is what pipeline rank p does, in order; `stages[s]` what a stage is.

    Gradients are reduced once a step, beside the backward of the stage's last micro-batch, or, with
    `reduce_every_micro` (ZeRO-2 and 3), beside every backward. With `bucket_bytes` > 0 a reduction starts when
    that many bytes of gradients are ready, inside a block or over several; else block by block.
    `model_flops` and `tokens` are of the whole step and model; `groups` names the device group of each rank.
    """

    ranks: tuple[tuple[Action, ...], ...]
    stages: tuple[StageWork, ...]
    axes: tuple[Axis, ...]  # innermost (stride 1) last
    micro_batches: int
    dtype: str
    overlap: bool  # gradient synchronisation runs beside the backward pass
    bucket_bytes: int = 0
    reduce_every_micro: bool = False
    blocking_launches: bool = False  # the host waits for each kernel before it launches the next
    blocking_sends: bool = False  # a rank waits for each message it sends, as in Megatron without p2p overlap
    late_gathers: bool = (
        False  # `after_step` runs beside the next step's first forwards, as Megatron's overlap_param_gather
    )
    kernels: str = "fused"  # eager, fused or compiled: as the strategy's `execution.kernels`
    model_flops: int = 0
    tokens: int = 0
    groups: tuple[int, ...] = ()  # empty: every rank on the cluster's (slowest) device
    host_bytes: int = 0  # that parameter servers hold in the memory of each node's host
