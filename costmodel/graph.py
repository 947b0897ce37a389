"""`ModelGraph`: what capture extracts from a module and everything else plans with. Plain data, no torch.

A model is a *chain* of block instances. Blocks that are structurally the same are stored once, so that cost
grows with the number of distinct blocks and not with depth. Inside a block stand its operators in execution
order. Every size is an affine function of the micro-batch, so that one capture serves every micro-batch.

Values inside a block are named by strings:

    input:0        the block's first activation input
    param:NAME     a parameter of the block, NAME relative to the block instance's module path
    buffer:NAME    likewise a buffer
    OP or OP.1     the (first or) second output of the operator called OP
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

SCHEMA = 1

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """A function of the micro-batch: `const + per_sample * micro_batch + per_pair * micro_batch**2`.

    Shapes are affine, `per_pair` is 0 there. FLOPs and bytes are not where every sample meets every other one, as in a
    contrastive loss.
    """

    const: int = 0
    per_sample: int = 0
    per_pair: int = 0

    def at(self, micro_batch: int) -> int:
        return self.const + (self.per_sample + self.per_pair * micro_batch) * micro_batch

    def __add__(self, other: Size) -> Size:
        return Size(
            self.const + other.const, self.per_sample + other.per_sample, self.per_pair + other.per_pair
        )

    def __mul__(self, factor: int) -> Size:
        return Size(self.const * factor, self.per_sample * factor, self.per_pair * factor)


ONCE = Size(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape and dtype (torch's name without the prefix) of one tensor."""

    shape: tuple[Size, ...]
    dtype: str

    def numel(self, micro_batch: int) -> int:
        count = 1
        for size in self.shape:
            count *= size.at(micro_batch)
        return count


class OpKind(StrEnum):
    """What an operator is to the cost model."""

    GEMM = "gemm"
    GROUPED_GEMM = "grouped_gemm"  # experts: one product per expert over the tokens routed to it
    CONV = "conv"
    ATTENTION = "attention"  # scaled_dot_product_attention, whole
    EMBEDDING = "embedding"
    NORM = "norm"  # layer, rms, group norm where it is one operator
    BATCH_NORM = "batch_norm"
    POOL = "pool"
    SOFTMAX = "softmax"
    CROSS_ENTROPY = "cross_entropy"  # log-softmax and nll over classes, whole
    DROPOUT = "dropout"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    COPY = "copy"  # cat, contiguous clone, index, gather, scatter: bytes move, nothing is computed
    VIEW = "view"  # no kernel at all
    RECURRENT = "recurrent"  # all steps and layers of one call
    LEAF = "leaf"  # a submodule that could not be exported: priced whole, never sharded


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """One kernel that an operator launches, before sharding.

    `product` names, for (grouped) GEMMs and convolutions lowered to them, the operator's size letters in the
    order batch, m, n, k: forward of a linear layer is "bmnk", its input gradient "bmkn", its weight gradient
    "bnkm".
    """

    kind: OpKind
    dtype: str
    flops: Size
    bytes_moved: Size  # read and written, device memory
    product: str = ""
    gradient_of: str = ""  # "" forward; "input" or "weight": the zero-bubble split of the backward pass
    count: Size = ONCE  # launches: rounds of a loop, over samples too; the sizes are those of one


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A storage that autograd keeps from forward to backward, listed at the first operator that keeps it.

    `value` is a value of the block (which carries the sharding), or "" for one internal to the operator
    (softmax statistics, dropout masks), which shards like the operator's first output.
    Parameters and buffers are never listed.
    """

    value: str
    spec: TensorSpec


def strided(dim: int, parts: int) -> str:
    """The placement in which each of `parts` equal parts of `dim` is sharded."""
    return f"S{dim}" if parts == 1 else f"S{dim}/{parts}"


def sharded_dim(placement: str) -> int:
    """The dim that a placement "S…" shards."""
    return int(placement[1:].partition("/")[0])


def parts_of(placement: str) -> int:
    """Into how many parts, each of them sharded, a placement "S…" divides its dim: 1 for a plain shard."""
    return int(placement.partition("/")[2] or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """One legal way to run an operator on a one-dimensional mesh, from DTensor's own rules.

    Placements: "R" replicated, "P" partial sum, "S0", "S1" … sharded along that dim; "S1/3" dim 1 holds three
    parts one after another, each of them sharded (a fused query-key-value projection); "" for a value that is
    not a tensor. The parallel degree must divide each size in `divides`.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    divides: tuple[Size, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One ATen operator (or one whole attention, loss or leaf) of a block.

    `labels` name the dims of each tensor input, then of each output, one letter a dim, as in einsum ("mmk",
    "nk", "mmn"; "_" where a dim has no name), and `sizes` give the product of the dims that share a letter.
    GEMM and convolution: b batch, m rows, n columns, k contracted. Attention: b batch, h query heads,
    g key-value heads, s query length, t key length, d head size, v value head size. Grouped GEMM also e experts.
    """

    name: str
    target: str  # "aten.mm.default"
    kind: OpKind
    module: str  # path of the module that called it, relative to the block; "" is the block itself
    inputs: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]
    forward: tuple[KernelSpec, ...] = ()
    backward: tuple[KernelSpec, ...] = ()
    saved: tuple[Saved, ...] = ()
    shardings: tuple[Sharding, ...] = ()
    labels: tuple[str, ...] = ()
    sizes: tuple[tuple[str, Size], ...] = ()
    causal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a block; `tied` names the group of parameters that are one tensor ("" if alone)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    tied: str = ""

    @property
    def numel(self) -> int:
        """Real numbers in it: of a complex one, as it is held and moved, two."""
        return math.prod(self.shape) * (2 if self.dtype.startswith("complex") else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One call of a submodule of a block: its boundary, where layouts can be pinned.

    `inputs` are (name of the argument in `forward`'s signature, value) of the tensor arguments; tensors inside
    a tuple argument stand as "name.0", "name.1". `outputs` are the values returned, in order.
    """

    module: str  # path relative to the block
    inputs: tuple[tuple[str, str], ...] = ()
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A distinct piece of the chain: a repeated block (a transformer layer) or the glue between (embedding,
    head, loss)."""

    name: str  # class name, made unique
    inputs: tuple[TensorSpec, ...]  # activations and model inputs it reads
    outputs: tuple[str, ...]  # values it hands on
    operators: tuple[Operator, ...]
    parameters: tuple[Parameter, ...] = ()
    buffers: tuple[tuple[str, TensorSpec], ...] = ()
    calls: tuple[ModuleCall, ...] = ()  # () where capture could not tell: positions are then inferred


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One link of the chain: which block stands where in the module."""

    block: int  # index into ModelGraph.blocks
    path: str  # module path of the instance ("model.layers.3"); "" for glue, whose names are then absolute
    repeated: bool  # counts in pipeline.stage_blocks, may be cut at and recomputed
    sends: tuple[
        TensorSpec, ...
    ] = ()  # trainable-dependent activations alive after it: what a cut here sends


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A parameter that the model's own forward pass writes to, and whether what it writes comes from its samples."""

    name: str
    from_samples: bool


@dataclass(frozen=True, kw_only=True)
class ModelGraph:
    """A captured model: the distinct blocks, and the chain of their instances in execution order."""

    name: str
    dtype: str  # floating dtype of the parameters at capture: tensors of it take the execution dtype
    blocks: tuple[Block, ...]
    chain: tuple[Instance, ...]
    tokens_per_sample: int  # sequence length; 1 where a sample is not a sequence
    has_loss: bool  # the captured outputs end in a scalar loss
    pipeline_cuts: bool  # the chain may be cut into pipeline stages between repeated instances
    warnings: tuple[str, ...] = ()
    dropout: float = 0.0  # the largest share that its modules drop in training
    written: tuple[Written, ...] = ()  # parameters that its forward pass writes to
    differentiates: bool = False  # its forward pass takes derivatives
    other_lengths: tuple[ModelGraph, ...] = ()  # of the same model, for phases with other sequences
    schema: int = SCHEMA

    def of_length(self, tokens: int) -> ModelGraph | None:
        """The graph of the model with sequences of so many tokens, itself for 0; None where it was not captured with such."""
        if tokens in (0, self.tokens_per_sample):
            return self
        return next((graph for graph in self.other_lengths if graph.tokens_per_sample == tokens), None)

    @cached_property
    def repeated_positions(self) -> tuple[int, ...]:
        """Chain positions of the repeated instances, in model order."""
        return tuple(i for i, link in enumerate(self.chain) if link.repeated)

    @cached_property
    def repeated_blocks(self) -> frozenset[int]:
        """The blocks of repeated instances."""
        return frozenset(self.chain[i].block for i in self.repeated_positions)

    @cached_property
    def backward_throughout(self) -> bool:
        """Whether every part of the model has a backward pass; frozen ones that no gradient goes through have none."""
        return all(any(op.backward for op in block.operators) for block in self.blocks if block.parameters)

    @cached_property
    def parameter_count(self) -> int:
        """Number of parameters, tied ones once; complex ones are two."""
        return sum(parameter.numel for parameter in self._each_parameter())

    @cached_property
    def trainable_count(self) -> int:
        """Number of parameters that are trained, tied ones once."""
        return sum(parameter.numel for parameter in self._each_parameter() if parameter.trainable)

    def _each_parameter(self) -> Iterator[Parameter]:
        """Every parameter, tied ones once."""
        tied = set()
        for link in self.chain:
            for parameter in self.blocks[link.block].parameters:
                if parameter.tied:
                    if parameter.tied in tied:
                        continue
                    tied.add(parameter.tied)
                yield parameter

    def model_flops(self, samples: int) -> int:
        """FLOPs of forward and backward of `samples` samples, nothing recomputed, attention not causal."""
        total = 0
        for link in self.chain:
            for op in self.blocks[link.block].operators:
                total += sum(k.flops.at(samples) * k.count.at(samples) for k in (*op.forward, *op.backward))
        return total
