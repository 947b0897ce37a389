"""The strategy file's keys, types and ranges, as pydantic models: the file boundary and nothing else.

Every key may be absent (a constraint that is not there is a decision left to the planner), so each field is
optional; what was written is `model_fields_set`. A field's description is the comment `write_strategy` puts
beside it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

SCHEMA = 1
MOST = 2**31 - 1  # more devices or sequences than any cluster or step has; their products fit 64 bits

Degree = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Compression = Annotated[
    str,
    StringConstraints(
        pattern=r"^(none|fp16|bf16|fp8|int8|int4|int2|sign|topk:RATIO(-RATIO)?|powersgd:[1-9]\d*)$".replace(
            "RATIO", r"(0?\.0*[1-9]\d*|1|1\.0)"
        )
    ),
]
Layout = Annotated[
    str, StringConstraints(pattern=r"^(replicate|partial|shard\(-?\d+(, strided [2-9]\d*)?\))$")
]
AxisName = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp"]
Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
StoredPrecision = Literal["fp64", "fp32", "bf16", "fp16"]


class Section(BaseModel):
    """Base of every table: unknown keys and wrong types are errors, nothing is coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=False, allow_inf_nan=False)


class BatchSection(Section):
    """`[batch]`."""

    global_: Degree | None = Field(None, alias="global", description="sequences per optimizer step")
    micro: Degree | None = Field(None, description="sequences per micro-batch and data-parallel rank")
    seq_len: Degree | None = Field(None, description="tokens per sequence; a phase may have longer ones")


class MeshSection(Section):
    """`[mesh]`."""

    pp: Degree | None = Field(None, description="pipeline ranks")
    dp_replicate: Degree | None = Field(None, description="replicas of the sharded group")
    dp_shard: Degree | None = Field(None, description="ranks that share one replica's state (ZeRO)")
    cp: Degree | None = Field(None, description="context parallelism: the sequence, split")
    tp: Degree | None = Field(None, description="tensor parallelism: each layer's matrices, split")
    ep: Degree | None = Field(None, description="expert parallelism: divides dp_shard * cp * tp")
    order: list[AxisName] | None = Field(None, description="outermost first: where each axis sits")
    groups: list[Count] | None = Field(None, description="device group of each pipeline rank")
    placement: list[Count] | None = Field(None, description="nodes in rank order, those in use")
    per_node: Degree | None = Field(None, description="devices used of each node")


class ShardSection(Section):
    """`[shard]`."""

    zero: Annotated[int, Field(ge=0, le=3)] | None = Field(
        None, description="0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters"
    )
    sequence_parallel: bool | None = Field(
        None, description="activations outside tensor-parallel regions sharded along the sequence"
    )
    secondary: Count | None = Field(
        None,
        description="ranks that share a second copy of ZeRO-3's parameters, for backward passes; 0: none",
    )


class PipelineSection(Section):
    """`[pipeline]`."""

    schedule: (
        Literal["none", "gpipe", "1f1b", "interleaved-1f1b", "zb1p", "zbv", "dualpipev", "program"] | None
    ) = Field(None, description="order of forward and backward passes")
    virtual_stages: Degree | None = Field(None, description="model chunks per pipeline rank")
    stage_blocks: list[Count] | None = Field(None, description="repeated blocks per chunk, in model order")


class RecomputeSection(Section):
    """`[recompute]`."""

    mode: Literal["none", "selective", "full", "operators"] | None = Field(
        None,
        description="none | selective (attention core only) | operators (all but matrix products and attention) | full",
    )
    per_stage: list[Count] | None = Field(
        None, description="per chunk: that many of its blocks in full, the rest by mode"
    )


class OffloadSection(Section):
    """`[offload]`."""

    optimizer: Share | None = Field(None, description="share of the optimizer state kept on the host")
    activations: Share | None = Field(None, description="share of the activations kept on the host")


class ExecutionSection(Section):
    """`[execution]`."""

    stack: str | None = Field(
        None, description="the software, a file of profiles/stacks: keys below override it"
    )
    dtype: Precision | None = Field(None, description="matrix products")
    param_dtype: StoredPrecision | None = Field(None, description="what parameters() hold")
    master_weights: bool | None = Field(None, description="an fp32 copy beside, held by the optimizer")
    grad_dtype: StoredPrecision | None = Field(None, description="gradients: accumulated and reduced in")
    optimizer: Literal["adamw", "adam", "sgd", "sgd-momentum", "adafactor"] | None = None
    attention: Literal["flash", "flash-v1", "flash-v2", "unfused"] | None = None
    kernels: Literal["eager", "fused", "compiled"] | None = None
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    async_tp: bool | None = Field(None, description="sequence-parallel gathers beside the products")
    async_gradients: bool | None = Field(
        None, description="tensor-parallel gradient sums beside the products"
    )
    blocking_sends: bool | None = Field(None, description="stages wait for their messages to have gone")
    kept_outputs: bool | None = Field(
        None, description="what was sent, or returned beside the loss, is kept until the backward"
    )
    blocking_launches: bool | None = Field(
        None, description="the host waits for each kernel (CUDA_LAUNCH_BLOCKING=1)"
    )
    parameter_gathers: bool | None = Field(
        None, description="ZeRO-3 fetches each parameter by itself and waits for it"
    )
    joined_pieces: bool | None = Field(
        None,
        description="parameter_gathers in one piece, not one of each rank (DeepSpeed since October 2021)",
    )
    late_gathers: bool | None = Field(
        None, description="ZeRO-1 and 2 gather updated parameters beside the next step's first forwards"
    )
    added_gradients: bool | None = Field(
        None,
        description="fused kernels, but a micro-batch's gradients are added to the sum by one of their own",
    )
    dtensor: bool | None = Field(
        None,
        description="tp and cp by torch's DTensor: its gathers copy, and the host dispatches each eager operator",
    )
    fsdp2: bool | None = Field(
        None,
        description="ZeRO is torch's FSDP2: shards beside whole parameters, units that are gathered and reduced at once",
    )
    hidden_dispatch: bool | None = Field(
        None, description="experts' exchanges run beside the computation of another micro-batch"
    )
    merged_dispatch: bool | None = Field(
        None, description="a token goes once to a rank and a node that hold several of its experts (DeepEP)"
    )


class GradSyncSection(Section):
    """`[grad_sync]`."""

    algorithm: Literal["auto", "ring", "tree", "hierarchical", "parameter-server"] | None = None
    bucket_mib: Annotated[float, Field(gt=0.0)] | None = Field(None, description="MiB per bucket")
    overlap: bool | None = Field(None, description="beside the backward pass")
    compression: list[Compression] | None = Field(None, description="per network level, innermost first")
    weights: Literal["none", "fp16", "bf16", "fp8", "int8", "int4"] | None = Field(
        None, description="what ZeRO-3 gathers parameters as"
    )


class RecoverySection(Section):
    """`[recovery]`."""

    policy: Literal["restart", "peers", "replan", "spares", "drop-replica"] | None = Field(
        None, description="restart | peers | replan | spares | drop-replica"
    )
    checkpoint_every_s: Annotated[float, Field(ge=0.0)] | None = Field(
        None, description="seconds between checkpoints"
    )
    storage_every_s: Annotated[float, Field(ge=0.0)] | None = Field(
        None, description="seconds between checkpoints in storage, where checkpoints are copies in memory"
    )
    peers: Annotated[int, Field(ge=0, le=1)] | None = Field(
        None, description="copies of each share in the memory of other nodes"
    )
    spares: Count | None = Field(None, description="nodes that wait")
    timeout_s: Annotated[float, Field(ge=0.0)] | None = Field(
        None, description="without a sign of progress, then a rank is given up"
    )


class TensorEntry(Section):
    """One `[[tensor]]` entry."""

    module: str
    params: dict[str, Layout] = Field(default_factory=dict)
    inputs: dict[str, Layout] = Field(default_factory=dict)
    outputs: list[Layout] = Field(default_factory=list)


class EmbeddingEntry(Section):
    """One `[[embedding]]` entry."""

    module: str
    tier: Literal["device", "sharded", "parameter-server"] | None = None
    hot_rows: Count | None = None


class EmbeddingAccessSection(Section):
    """`[embedding_access]`: inputs, never chosen."""

    law: str | None = Field(None, description="of look-ups by row: uniform | zipf:EXPONENT | FILE.csv")
    tables: dict[str, str] | None = Field(None, description="laws of single tables, by module")
    update: Literal["auto", "all", "touched"] | None = Field(
        None, description="rows that a step updates: all (dense optimizer) | touched (sparse) | auto"
    )


class ServersSection(Section):
    """`[servers]`: parameter servers of embedding tables."""

    mode: Literal["synchronous", "bounded-stale", "asynchronous"] | None = Field(
        None,
        description="when a step's gradients count: all at its end | within `staleness` steps | as they come",
    )
    staleness: Count | None = Field(None, description="bounded-stale: steps that workers may be apart")
    copies: Annotated[int, Field(ge=1, le=8)] | None = Field(
        None, description="servers that have each row: all but one may die"
    )
    memory: Share | None = Field(
        None, description="share of the served rows in memory; the others are on disk"
    )
    nodes: list[Count] | None = Field(None, description="nodes whose hosts serve; all that compute if empty")
    per_node: Degree | None = Field(None, description="servers on each of them")
    timeout_s: Annotated[float, Field(gt=0.0)] | None = Field(
        None, description="a server that does not answer for so long is given up"
    )


class OuterSection(Section):
    """`[outer]`: local updates over the slowest network; off unless something of it is said."""

    algorithm: Literal["none", "diloco"] | None = Field(
        None, description="replicas train by themselves between exchanges; another algorithm"
    )
    every: Degree | None = Field(None, description="steps between exchanges of a parameter")
    fragments: Degree | None = Field(None, description="parts that are exchanged at different steps")
    bits: Literal[32, 16, 8, 4] | None = Field(None, description="of each number that is exchanged")
    lr: Annotated[float, Field(gt=0.0)] | None = Field(None, description="of the outer SGD")
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] | None = Field(
        None, description="Nesterov's, of the outer SGD"
    )


class ProblemSection(Section):
    """`[problem]`: what the file was planned for."""

    model: str | None = None
    model_args: dict[str, str] | None = None
    graph_hash: str | None = None
    seq_len: Degree | None = None
    objective: Literal["time", "cost", "memory"] | None = None
    allow_lossy: bool | None = None
    lossy_methods: list[Compression] | None = None
    cluster: dict[str, Any] | None = None


class StrategySchema(Section):
    """The whole file."""

    schema_: int = Field(SCHEMA, alias="schema")
    problem: ProblemSection | None = None
    batch: BatchSection | None = None
    mesh: MeshSection | None = None
    shard: ShardSection | None = None
    pipeline: PipelineSection | None = None
    recompute: RecomputeSection | None = None
    offload: OffloadSection | None = None
    execution: ExecutionSection | None = None
    grad_sync: GradSyncSection | None = None
    tensor: list[TensorEntry] | None = None
    embedding: list[EmbeddingEntry] | None = None
    embedding_access: EmbeddingAccessSection | None = None
    recovery: RecoverySection | None = None
    servers: ServersSection | None = None
    outer: OuterSection | None = None
    phase: list[dict[str, Any]] | None = None
    predicted: dict[str, Any] | None = None
    search: dict[str, Any] | None = None


SECTIONS: dict[str, type[Section]] = {
    "batch": BatchSection,
    "mesh": MeshSection,
    "shard": ShardSection,
    "pipeline": PipelineSection,
    "recompute": RecomputeSection,
    "offload": OffloadSection,
    "execution": ExecutionSection,
    "grad_sync": GradSyncSection,
    "embedding_access": EmbeddingAccessSection,
    "recovery": RecoverySection,
    "servers": ServersSection,
    "outer": OuterSection,
}


def keys_of(section: type[Section]) -> tuple[str, ...]:
    """Keys of a table as the file spells them (`global`, not `global_`)."""
    return tuple(field.alias or name for name, field in section.model_fields.items())


def comment_of(section: str, key: str) -> str:
    """The comment that stands beside a key; empty where the key speaks for itself."""
    for name, field in SECTIONS[section].model_fields.items():
        if (field.alias or name) == key:
            return field.description or ""
    raise AssertionError(f"no key {section}.{key}")
