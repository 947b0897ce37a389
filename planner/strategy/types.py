"""`Strategy`: every decision of a plan, as frozen data; the in-memory form of the strategy file."""

from __future__ import annotations

from dataclasses import dataclass, field

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
TIERS = ("device", "sharded", "parameter-server")
SCHEDULES = ("none", "gpipe", "1f1b", "interleaved-1f1b", "zb1p", "zbv", "dualpipev", "program")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences per optimizer step, and per micro-batch and data-parallel rank; tokens per sequence, 0 where the model's inputs
    say how many."""

    global_: int  # the file's key is `global`
    micro: int
    seq_len: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the mesh axes; `order` is outermost first. Nodes are numbered through the cluster's groups."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    order: tuple[str, ...] = AXES
    groups: tuple[int, ...] = ()
    placement: tuple[
        int, ...
    ] = ()  # node of each block of devices in rank order; empty: as in the cluster's file
    per_node: int = 0  # devices taken of each node; 0: all that it has

    @property
    def devices(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_parallel(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """ZeRO level over dp_shard * cp, and sequence parallelism beside tensor parallelism.

    `secondary` ranks of dp_shard, neighbours along it, share a second copy of ZeRO-3's parameters from forward to backward, which
    the backward pass gathers from (hpZ of ZeRO++, Wang et al. 2023); 0: from all, as the forward pass.
    """

    zero: int = 0
    sequence_parallel: bool = False
    secondary: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Schedule, chunks per rank, and repeated blocks per chunk in model order."""

    schedule: str = "none"
    virtual_stages: int = 1
    stage_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """`mode` for every repeated block; `per_stage[c]` blocks of chunk c are recomputed in full instead.

    "selective" runs the attention core again, "operators" everything but matrix products, attention and the sums of
    tensor parallelism, whose results are kept, "full" the whole block.
    """

    mode: str = "none"
    per_stage: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Shares kept on the host, 0 to 1."""

    optimizer: float = 0.0
    activations: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What the user runs with: never chosen by the planner. Flags say what the software does of its own accord; `stack` names
    the one that they describe (`profiles/stacks/`), whose values they are unless stated one by one."""

    stack: str = "plain"
    dtype: str = "bf16"
    param_dtype: str = "bf16"
    master_weights: bool = True
    grad_dtype: str = "fp32"
    optimizer: str = "adamw"
    attention: str = "flash"
    kernels: str = "fused"
    dropout: float = 0.0
    async_tp: bool = (
        False  # gathers and scatters of sequence parallelism run beside the products (userbuffers)
    )
    async_gradients: bool = (
        False  # tensor-parallel sums of input gradients run beside the products of weight gradients
    )
    blocking_sends: bool = False  # a stage waits until its message has gone to the next one
    kept_outputs: bool = False  # what a stage has sent (DeepSpeed), or the model returned beside its loss, stays until the backward pass
    blocking_launches: bool = False  # the host waits for each kernel (CUDA_LAUNCH_BLOCKING=1)
    late_gathers: bool = False  # ZeRO-1 and 2 gather updated parameters beside the next step's first forwards, as fsdp2 does, too
    parameter_gathers: bool = False  # ZeRO-3 fetches each parameter by itself and waits for it
    joined_pieces: bool = (
        False  # with parameter_gathers: in one piece, not one of each rank (DeepSpeed since October 2021)
    )
    added_gradients: bool = False  # with fused kernels: a kernel of its own adds a micro-batch's gradients to the sum (Megatron until 2022)
    dtensor: bool = (
        False  # tp and cp by torch's DTensor: its gathers copy, and the host dispatches each eager operator
    )
    fsdp2: bool = False  # ZeRO is torch's FSDP2: shards beside whole parameters, units that are gathered and reduced at once
    hidden_dispatch: bool = False  # experts' exchanges run beside the computation of another micro-batch
    merged_dispatch: bool = (
        False  # a token goes once to a rank and a node that hold several of its experts (DeepEP)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GradSync:
    """How gradients are synchronised over the data-parallel axes."""

    algorithm: str = "auto"
    bucket_mib: float = 25.0
    overlap: bool = True
    compression: tuple[str, ...] = ()  # per network level, innermost first
    weights: str = "none"  # what parameters travel as where ZeRO-3 gathers them, on all levels

    @property
    def compresses(self) -> bool:
        """Whether gradients are compressed on some level."""
        return any(method != "none" for method in self.compression)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """One `[[tensor]]` entry: placements of a module's parameters, and layouts pinned at its boundary.

    Layouts are "replicate", "shard(dim)", "shard(dim, strided parts)" (the dim is that many equal parts one
    after another, each of them sharded: a fused query-key-value projection) or "partial".
    """

    module: str  # `*` stands for the index of a repeated block
    params: tuple[tuple[str, str], ...] = ()
    inputs: tuple[tuple[str, str], ...] = ()  # by argument name, or by position as "0", "1"
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRule:
    """One `[[embedding]]` entry: where the rows of embedding tables live; what is None is chosen.

    "device": like any other parameters. "sharded": a row each on the devices of the data-parallel ranks in turn.
    "parameter-server": on the hosts. The first `hot_rows`, the most wanted, are on every device in any case.
    """

    module: str  # `*` stands for anything
    tier: str | None = None
    hot_rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingAccess:
    """How tables are looked up and updated: never chosen. `tables` has laws by module that `law` is not for."""

    law: str = "uniform"  # as `costmodel.access.parse_law` reads it
    tables: tuple[tuple[str, str], ...] = ()
    update: str = "auto"  # rows that a step updates outside the hot ones: all | touched | auto


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRule:
    """What happens when something fails: a policy of `costmodel.recovery.POLICIES`, seconds between checkpoints, copies of
    each share on neighbouring nodes, nodes that wait, seconds without a sign of progress after which a rank is given up.
    Zero seconds: nobody said. The default is what is done where nothing is known of failures. Under "peers" checkpoints are copies in
    memory, and `storage_every_s` is between those in storage, for neighbours that are lost at once."""

    policy: str = "restart"
    checkpoint_every_s: float = 0.0
    storage_every_s: float = 0.0
    peers: int = 0
    spares: int = 0
    timeout_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Parameter servers that hold rows of embedding tables: never chosen.

    "synchronous" computes what one process does; "bounded-stale" lets workers be `staleness` steps apart; "asynchronous"
    any number. `copies` of every row are on as many servers, all but one of which may die; the share `memory` of the rows is in
    their memory, the least wanted are on disk.
    """

    mode: str = "synchronous"
    staleness: int = 1
    copies: int = 1
    memory: float = 1.0
    nodes: tuple[int, ...] = ()  # whose hosts serve; empty: all that compute
    per_node: int = 1
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """Local updates: replicas train by themselves, and exchange what their parameters have become once in `every` steps.

    "diloco": the mean of what replicas moved by is the gradient of an outer SGD with Nesterov momentum (Douillard et al. 2023,
    arXiv:2311.08105); with several `fragments` a part of the parameters at a time, spread over the `every` steps (Streaming
    DiLoCo, arXiv:2501.18512). `bits` of a number are exchanged.
    """

    algorithm: str = "none"
    every: int = 100
    fragments: int = 1
    bits: int = 32
    lr: float = 0.7
    momentum: float = 0.9


SAYS_NOTHING = (
    Outer(),
    EmbeddingAccess(),
    RecoveryRule(),
    Servers(),
)  # sections that are left out: most models and clusters need none


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One `[[phase]]` entry: from this step on (the first is 1) these keys, dotted, have other values."""

    from_step: int
    keys: tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A complete plan."""

    batch: Batch
    mesh: Mesh = field(default_factory=Mesh)
    shard: Shard = field(default_factory=Shard)
    pipeline: Pipeline = field(default_factory=Pipeline)
    recompute: Recompute = field(default_factory=Recompute)
    offload: Offload = field(default_factory=Offload)
    execution: Execution = field(default_factory=Execution)
    grad_sync: GradSync = field(default_factory=GradSync)
    tensor: tuple[TensorRule, ...] = ()
    embedding: tuple[EmbeddingRule, ...] = ()  # empty: every table on the devices
    embedding_access: EmbeddingAccess = field(default_factory=EmbeddingAccess)
    recovery: RecoveryRule = field(default_factory=RecoveryRule)
    servers: Servers = field(default_factory=Servers)
    outer: Outer = field(default_factory=Outer)
    phases: tuple[Phase, ...] = ()  # by from_step

    @property
    def micro_batches(self) -> int:
        """Micro-batches per optimizer step and data-parallel rank."""
        return self.batch.global_ // (self.batch.micro * self.mesh.data_parallel)
