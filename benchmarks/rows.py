"""From a row of published measurements to what `score` takes: a model shape, a cluster, a strategy.

What a source does not say is filled by the rules below, the same for every source: what the frameworks of
that software generation do by default. Nothing here depends on a row's measurement.
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from autoparallel.planner.expand.schedules import rank_of_stage
from autoparallel.planner.strategy.stacks import SOFTWARE_KEYS, runs_of, stack_values
from autoparallel.planner.strategy.types import (
    Batch,
    Execution,
    GradSync,
    Mesh,
    Pipeline,
    Recompute,
    Shard,
    Strategy,
)
from autoparallel.profiles import load_cluster, load_device
from autoparallel.profiles.constants import KERNEL_MODES
from autoparallel.profiles.hardware import Cluster, Group
from autoparallel.profiles.parts import at_nodes, bounded, evenly_filled
from benchmarks.beside import Beside
from benchmarks.frameworks import BLOCKING_LAUNCHES, DROPOUT, DROPPING, framework_of
from benchmarks.models import Shape

Row = Mapping[str, str]

FAMILIES = ("gpt", "mpt", "llama", "nemotron")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")
ATTENTIONS = ("flash", "flash-v1", "flash-v2", "unfused")
RECOMPUTES = ("none", "selective", "operators", "full", "half")
OUTCOMES = ("ok", "oom")
MLPS = ("gelu-4h", "gelu", "swiglu", "squared-relu", "relu2")
DTYPES = {"fp8-cs": "fp8", "fp8-mx": "mxfp8"}  # scaling variants of one GEMM dtype
EIGHTHS = 8  # in which recomputation is varied where a row is silent
HALF = 4  # `recompute = half`: every second block, or every second product of each (torchtitan's selective modes)
VOCAB_MULTIPLE = 128  # Megatron pads the vocabulary to a multiple of 128 * tp


class Unscorable(ValueError):
    """The row does not say enough, or asks for what the cost model does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run, ready to be scored."""

    id: str
    source: str
    group: str
    shape: Shape
    layers: int
    cluster: Cluster
    strategies: tuple[Strategy, ...]  # the first that fits is what ran: more than one where the row is silent
    outcome: str
    step_time_s: float | None
    peak_memory_gib: float | None
    memory_kind: str
    fits_judged: bool  # whether what it held is what its strategy says
    beside: Callable[[Strategy], Beside]


# A node with less network than this for each of its devices has fewer ports than devices. Kind: formula. Source:
# of the published clusters, p3.16xlarge has one port of 25 Gbit/s, Jean Zay four of 100.
PORT_GBPS = 100.0


# What notes say of runs whose memory is not that of the strategy they are scored as.
OTHER_MEMORY = ("memory not comparable", "needs less memory than")
# Why rows are not scored, by id.
SET_ASIDE: dict[str, str] = {
    row_id: entry["reason"]
    for entry in tomllib.loads(Path(__file__).with_name("set_aside.toml").read_text(encoding="utf-8"))["rows"]
    for row_id in entry["ids"]
}


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """All rows of the CSV files, in order."""
    rows: list[Row] = []
    for path in paths:
        with path.open(newline="") as handle:
            rows.extend(csv.DictReader(handle))
    return rows


def _int(row: Row, key: str, default: int | None = None, *, least: int = 1) -> int:
    number = _float(row, key)
    if number is None:
        if default is None:
            raise Unscorable(f"{key} is not stated")
        return default
    if number != int(number) or number < least:
        raise Unscorable(f"{key} is {row[key]}: a whole number of at least {least} is needed")
    return int(number)


def _float(row: Row, key: str) -> float | None:
    text = row.get(key)
    try:
        return float(text) if text else None
    except ValueError as error:
        raise Unscorable(f"{key} is {text}: a number is needed") from error


def _text(row: Row, key: str, known: Sequence[str] = (), default: str = "") -> str:
    text = row.get(key) or default
    if not text:
        raise Unscorable(f"{key} is not stated")
    if known and text not in known:
        raise Unscorable(f"{key} is {text}: the benchmark knows {', '.join(known)}")
    return text


def _flag(row: Row, key: str, default: bool) -> bool:
    return {"True": True, "False": False}.get(row.get(key, ""), default)


def _assumed(row: Row) -> bool:
    """Whether the row's vocabulary and attention are what its reader took for likely."""
    return "vocabulary, dtype, recomputation and attention kernel are assumptions" in row.get("note", "")


def _says(row: Row, *words: str) -> bool:
    """Whether the row's software or note names one of these."""
    return any(word in row.get("software", "") + row.get("note", "") for word in words)


def _dropout(row: Row) -> float:
    kept = any(place in row.get("origin", "") for place in DROPPING)
    return DROPOUT if kept else framework_of(row.get("framework", "")).dropout


def _words(row: Row, thousand: int) -> int:
    """The row's vocabulary; where a k of its framework's is `thousand` words, and the row has 1024, so many instead."""
    words = _int(row, "vocab")
    return words if words % 1024 else words // 1024 * thousand


def shape_of(row: Row) -> Shape:
    """The model's shape, the vocabulary padded as Megatron pads it."""
    hidden, heads = _int(row, "hidden"), _int(row, "heads")
    framework = framework_of(row.get("framework", ""))
    multiple = VOCAB_MULTIPLE * _int(row, "tp", 1)
    said = framework.vocab if framework.vocab and _assumed(row) else _words(row, framework.thousand)
    vocab = -(-said // multiple) * multiple
    return Shape(
        family=_text(row, "family", FAMILIES),
        hidden=hidden,
        heads=heads,
        kv_heads=_int(row, "kv_heads", heads),
        head_dim=_int(row, "head_dim", hidden // heads),
        ffn_hidden=_int(row, "ffn_hidden", 4 * hidden),
        gated=_text(row, "mlp", MLPS) == "swiglu",
        vocab=vocab,
        tied=_flag(row, "tied_embeddings", False),
        seq_len=_int(row, "seq_len"),
        rotary=row.get("positions") == "rope",
        experts=_int(row, "experts", 0, least=0),
        experts_per_token=_int(row, "experts_per_token", 0, least=0),
        dropout=_dropout(row),
        loss=framework.loss,
        fused_norm=_said(row).get("kernels") == "eager" and _flag(row, "fused_norm", False),
    )


_loaded = cache(load_device)  # many rows are of few devices


def cluster_of(row: Row, dirs: Sequence[Path] = ()) -> Cluster:
    """The device's usual box, with the node count and network bandwidth that the row states."""
    device = _loaded(_text(row, "device"), dirs=tuple(dirs))
    per_node = _int(row, "devices_per_node", device.devices_per_node)
    devices = _int(row, "devices")
    gbps = _float(row, "inter_node_gbps_per_node")
    per_node = min(per_node, devices)
    *inner, outer = at_nodes(device.levels, device.devices_per_node, per_node)
    if _says(row, "(TCPX)"):
        outer = replace(load_cluster("a3-high").levels[-1], size=outer.size)
    elif gbps and inner:
        ports = max(1, round(gbps / PORT_GBPS))
        rate = gbps * 1e9 / 8 / per_node
        outer = replace(outer, bytes_per_s=rate, nics=ports if ports < per_node else 0)
    group = Group(device=device, nodes=-(-devices // per_node), devices_per_node=per_node)
    levels = bounded(evenly_filled((*inner, outer), devices), devices)
    return Cluster(name=f"{device.name}x{devices}", groups=(group,), levels=levels)


def chunk_layers(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers per chunk: even; where that does not divide, the first and last chunk hold fewer."""
    if layers % chunks == 0:
        return (layers // chunks,) * chunks
    if (layers + 2) % chunks == 0:
        most = (layers + 2) // chunks
        return (most - 1, *(most,) * (chunks - 2), most - 1)
    if (layers + 1) % chunks == 0:
        most = (layers + 1) // chunks
        return (*(most,) * (chunks - 1), most - 1)
    base, extra = divmod(layers, chunks)
    return tuple(base + (1 if 0 < i <= extra else 0) for i in range(chunks))


def _stack(row: Row) -> str:
    return framework_of(row.get("framework", "")).stack


def _said(row: Row, dtype: str = "bf16") -> Mapping[str, object]:
    """What the row's software stack says of its execution."""
    return stack_values(_stack(row), dtype)


def _sequence_parallel(row: Row) -> bool:
    return _flag(row, "sequence_parallel", bool(runs_of(_stack(row)).sequence_parallel))


def _attention(row: Row) -> str:
    """The generation of flash attention that the row names, else its software's."""
    framework, own = framework_of(row.get("framework", "")), str(_said(row).get("attention", "flash"))
    attention = _text(row, "attention", ATTENTIONS, default="flash")
    if own == "unfused" and _assumed(row):
        return own
    if attention != "flash":
        return attention
    kernel = row.get("attention_kernel", "")
    named = {"flash_attentionv1": "flash-v1", "flash_attention2": "flash-v2", "cudnn": "flash"}
    return next(
        (generation for name, generation in named.items() if kernel.startswith(name)),
        "flash-v1" if row.get("device") in framework.early_flash_on else own.replace("unfused", "flash"),
    )


def _execution(row: Row) -> Execution:
    """What the row's stack says, and how the row used it: flags that mean something for some strategies only are off elsewhere."""
    dtype = framework_of(row.get("framework", "")).dtype or _text(row, "dtype", (*PRECISIONS, *DTYPES))
    dtype = DTYPES.get(dtype, dtype)
    half = "fp16" if dtype == "fp16" else "bf16"
    said = _said(row, dtype)
    zero = _int(row, "zero", 0, least=0)
    sharded = zero == 3
    half_gradients = said.get("grad_dtype") == half or (sharded and said.get("grad_dtype") != "fp32")
    kernels = _text(row, "kernels", KERNEL_MODES, default="fused")
    if said.get("kernels") == "eager" or row.get("fused_norm") == "False":
        kernels = "eager"  # a code base whose normalisation is not one kernel fuses nothing else either
    flags = {key: bool(said.get(key, False)) for key in SOFTWARE_KEYS}
    flags["merged_dispatch"] |= _says(row, "DeepEP", "HybridEP")
    flags["hidden_dispatch"] |= _says(row, "A2A overlap")
    flags["blocking_launches"] |= any(place in row.get("origin", "") for place in BLOCKING_LAUNCHES)
    used = {
        "async_tp": _sequence_parallel(row),
        "late_gathers": _flag(row, "overlap_dp", False),
        "blocking_sends": zero > 0,  # without ZeRO a run may have run in Megatron's own engine
        "parameter_gathers": sharded,
        "joined_pieces": sharded,
    }
    flags |= {key: flags[key] and use for key, use in used.items()}
    return Execution(
        stack=_stack(row),
        dtype=dtype,
        param_dtype="fp32" if sharded and said.get("param_dtype") == "fp32" else half,
        # Megatron and DeepSpeed keep an fp32 master copy and accumulate bf16 gradients in fp32, fp16 ones in
        # fp16, and NeMo's recipes bf16 ones in bf16; "pure" FSDP mixed precision holds everything in half
        # precision.
        master_weights=not sharded,
        grad_dtype=half if dtype == "fp16" or half_gradients else "fp32",
        attention=_attention(row),
        kernels=kernels,
        dropout=_dropout(row),
        **flags,
    )


def _schedule(row: Row) -> Pipeline:
    pp, virtual = _int(row, "pp", 1), _int(row, "vpp", 1)
    name = row.get("schedule") or "1f1b"
    if pp == 1:
        name, virtual = "none", 1
    elif virtual > 1 and name == "1f1b":
        name = "interleaved-1f1b"
    if name in ("zbv", "dualpipev"):
        virtual = 2
    return Pipeline(
        schedule=name, virtual_stages=virtual, stage_blocks=chunk_layers(_int(row, "layers"), pp * virtual)
    )


def _bucket_mib(row: Row, mesh: Mesh) -> float:
    """Megatron's rule: max(40e6, 1e6 * data-parallel ranks) gradients a bucket, one bucket without overlap.

    Source: Megatron-LM, megatron/core/distributed/distributed_data_parallel.py (bucket_size).
    """
    gradients = framework_of(row.get("framework", "")).bucket_elements
    if gradients is None:
        gradients = max(40e6, 1e6 * mesh.data_parallel * mesh.cp)
    if not _flag(row, "overlap_dp", False):
        gradients = 1e12
    return gradients * 4 / 2**20


def _mesh(row: Row) -> Mesh:
    """What the row says; where it is silent on data parallelism, all ranks that the other axes leave are replicas."""
    pp, cp, tp = (_int(row, axis, 1) for axis in ("pp", "cp", "tp"))
    said = row.get("dp_replicate") or row.get("dp_shard")
    return Mesh(
        pp=pp,
        dp_replicate=_int(row, "dp_replicate", 1) if said else max(1, _int(row, "devices") // (pp * cp * tp)),
        dp_shard=_int(row, "dp_shard", 1),
        cp=cp,
        tp=tp,
        ep=_int(row, "ep", 1),
    )


def strategies_of(row: Row) -> tuple[Strategy, ...]:
    """What the row says ran; where it is silent on recomputation, more and more blocks in full, by eighths."""
    mesh = _mesh(row)
    if mesh.devices != _int(row, "devices"):
        raise Unscorable(f"the mesh has {mesh.devices} devices, the row {row['devices']}")
    batch = Batch(global_=_int(row, "global_batch"), micro=_int(row, "micro_batch"))
    if batch.global_ % (batch.micro * mesh.data_parallel):
        raise Unscorable(
            f"global batch {batch.global_} is no multiple of micro-batch {batch.micro} x {mesh.data_parallel} replicas"
        )
    base = Strategy(
        batch=batch,
        mesh=mesh,
        shard=Shard(
            zero=_int(row, "zero", 0, least=0),
            sequence_parallel=mesh.tp > 1 and _sequence_parallel(row),
        ),
        pipeline=_schedule(row),
        execution=_execution(row),
        grad_sync=GradSync(overlap=_flag(row, "overlap_dp", False), bucket_mib=_bucket_mib(row, mesh)),
        tensor=framework_of(row.get("framework", "")).tensor if mesh.tp > 1 else (),
    )
    if row.get("recompute") == "half":
        return (replace(base, recompute=_recomputed(base, HALF)),)
    if row.get("recompute"):
        return (replace(base, recompute=Recompute(mode=_text(row, "recompute", RECOMPUTES))),)
    return tuple(replace(base, recompute=_recomputed(base, part)) for part in range(EIGHTHS + 1))


def _recomputed(base: Strategy, eighths: int) -> Recompute:
    """So many eighths of each pipeline rank's blocks in full, dealt evenly to its chunks."""
    blocks, pipeline = base.pipeline.stage_blocks, base.pipeline
    dealt = dict.fromkeys(range(base.mesh.pp), 0)
    counts = []
    for rank, count in zip(
        rank_of_stage(pipeline.schedule, base.mesh.pp, pipeline.virtual_stages), blocks, strict=True
    ):
        before, dealt[rank] = dealt[rank], dealt[rank] + count
        counts.append(-(-dealt[rank] * eighths // EIGHTHS) - -(-before * eighths // EIGHTHS))
    return Recompute(per_stage=tuple(counts))


def _peak_memory_gib(row: Row) -> float | None:
    printed = _float(row, "peak_memory_gib")
    uncertain = row.get("memory_kind", "").endswith("-gb")
    if printed is None or not uncertain:
        return printed
    return printed * framework_of(row.get("framework", "")).gb_bytes / 2**30


def _memory_kind(row: Row) -> str:
    kind, place = row.get("memory_kind", ""), framework_of(row.get("framework", "")).reserved_in
    reserved = place and place in row.get("origin", "")
    return kind.replace("torch-allocated", "torch-reserved") if reserved else kind


def parse(row: Row, dirs: Sequence[Path] = ()) -> Run:
    """A run from its row. Raises Unscorable with the reason."""
    if reason := SET_ASIDE.get(row.get("id", "")):
        raise Unscorable(f"set aside: {reason}")
    shape = shape_of(row)
    if "LoRA" in row.get("note", ""):
        raise Unscorable("fine-tuning with adapters (LoRA), whose rank and targets are not stated")
    return Run(
        id=row.get("id") or "",
        source=row.get("source") or "",
        group=row.get("group") or "",
        shape=shape,
        layers=_int(row, "layers"),
        cluster=cluster_of(row, dirs),
        strategies=strategies_of(row),
        outcome=_text(row, "outcome", OUTCOMES, default="ok"),
        step_time_s=_float(row, "step_time_s"),
        peak_memory_gib=_peak_memory_gib(row),
        memory_kind=_memory_kind(row),
        fits_judged=not _says(row, *OTHER_MEMORY),
        beside=framework_of(row.get("framework", "")).beside,
    )
