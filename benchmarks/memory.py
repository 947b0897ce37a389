"""Predicted against measured memory of truncated Llama-2-7B runs: `python benchmarks/memory.py [--json OUT.json]`.

Data: benchmarks/published/memory_llama2_7b.csv, the memory profile that Galvatron ships (its `origin` column): torch's
allocated bytes after a step's backward pass (states), after its forward pass less before it (kept), and the step's peak
less that after the backward pass (galvatron/core/profiler/runtime_profiler.py).

What the profile does not state is inferred from it:
- model states grow by 386 MiB a layer whatever the split: 16 bytes a parameter over all eight devices, so ZeRO-3 over
  the data-parallel ranks;
- eight samples a step (the keys say `bsz8`) in one micro-batch (profiler/model_profiler.py: chunks 1), so one a device on
  eight data-parallel ranks, of 4,096 tokens, not the 2,048 that the keys say: one layer keeps 514.6 MiB, twice the 257.3
  MiB that 2,048 tokens keep, and what the loss needs is 250 MiB, one bf16 value for each of 4,096 tokens and 32,000
  words. One sample it is, for only two and more keep attention's output once more (below). The rows of the source's
  second file are of 2,048 tokens: its layer and head would keep 414 MiB; it keeps 43 more, one value for each of 11,008
  units (a SwiGLU that is not one kernel), and 250 MiB of gathered vocabulary in its states.

What Galvatron does that no strategy says (`as_galvatron`), from its sources (PKU-DAIR/Hetu-Galvatron@cea12ff,
galvatron/core/runtime):
- parallel.py: FSDP1 with flat parameters in bf16, sharded or not; embedding, each layer, the last norm and the head are
  units of their own; fp32 gradients of a unit appear when it is reduced;
- transformer/attention.py: attention's output is copied into the sequence-first layout, which for one sample is a view;
- transformer/fused_kernels.py: the loss is compiled functions, which hand out new tensors where the original wrote in
  place: on its way back two more of the logits' size stand beside the softmax;
- pipeline/pipeline.py: a stage keeps what it sent until its backward pass;
- with vocab_parallel = 0 embedding and head are whole on every tensor-parallel rank, and their samples split.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.costmodel.memory import ActivationProfile, activation_profile, rank_memory
from autoparallel.costmodel.program import BlockWork, Collective, CollectiveOp, StageWork
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Pipeline, Recompute, Shard, Strategy
from autoparallel.profiles.load import load_cluster

ROWS = Path(__file__).parent / "published" / "memory_llama2_7b.csv"
MIB = 2**20
SAMPLES, TOKENS, HIDDEN, WORDS = 8, 4096, 4096, 32000  # samples a step; see above
SHORT_TOKENS = {"memory_profiling_bf16_llama2-7b_seqlen2048_all.json": 2048}  # of the source's second file
HALF_BYTES, FP32_BYTES = 2, 4
CLUSTER = "a100-sxm-80gb:1x8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One row: MiB predicted and measured."""

    key: str
    layers: int
    rank: int
    states_mib: float
    measured_states_mib: float
    kept_mib: float  # of activations, from the forward pass to the backward
    measured_kept_mib: float
    peak_mib: float
    measured_peak_mib: float

    @property
    def states_error(self) -> float:
        return self.states_mib / self.measured_states_mib - 1

    @property
    def kept_error(self) -> float:
        return self.kept_mib / self.measured_kept_mib - 1

    @property
    def peak_error(self) -> float:
        return self.peak_mib / self.measured_peak_mib - 1


def llama2_7b(layers: int, length: int = TOKENS) -> ModelGraph:
    """The model at a small depth, captured on the meta device."""
    import torch
    import torch.nn.functional as F
    from transformers import LlamaConfig, LlamaForCausalLM

    from autoparallel.planner.capture import capture

    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=11008, num_hidden_layers=layers, num_attention_heads=32,
        vocab_size=WORDS, use_cache=False,
    )  # fmt: skip

    class HalfLoss(torch.nn.Module):
        """The model with the loss of its bf16 logits."""

        def __init__(self) -> None:
            super().__init__()
            self.lm = LlamaForCausalLM(config)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.lm(input_ids=input_ids).logits.flatten(0, 1), labels.flatten())

    with torch.device("meta"):
        model = HalfLoss().to(torch.bfloat16).train()
        tokens = torch.zeros(2, length, dtype=torch.int64)
    return capture(model, {"input_ids": tokens, "labels": tokens}, name="llama-2-7b")


def strategy(row: dict[str, str]) -> Strategy:
    pp, tp, dp, layers = (int(row[k]) for k in ("pp", "tp", "dp", "layers"))
    return Strategy(
        batch=Batch(global_=SAMPLES, micro=SAMPLES // dp),
        mesh=Mesh(pp=pp, dp_shard=dp, tp=tp),
        shard=Shard(zero=3 if dp > 1 else 0, sequence_parallel=tp > 1),
        pipeline=Pipeline(schedule="gpipe" if pp > 1 else "none", stage_blocks=(layers // pp,) * pp),
        recompute=Recompute(mode="full" if row["checkpoint"] == "1" else "none"),
        execution=Execution(grad_dtype="bf16", kept_outputs=True),
    )


def as_galvatron(work: StageWork, row: dict[str, str], length: int) -> StageWork:
    """The stage with what Galvatron keeps and holds beside it; see above."""
    tp, samples = int(row["tp"]), SAMPLES // int(row["dp"])
    hidden = HALF_BYTES * samples * length * HIDDEN // tp
    logits = HALF_BYTES * samples * length * WORDS // tp
    found: list[tuple[BlockWork, int]] = []
    for block, count in work.blocks:
        if block.name == "LlamaDecoderLayer":
            found.append(
                (_unit(_keeping(block, hidden if samples > 1 and not block.recompute else 0), 1), count)
            )
            continue
        head = block.saved_bytes > hidden
        if head:
            found.append((BlockWork(name="norm", forward=(), backward_input=(), backward_weight=()), 1))
            assert block.standing_temp_bytes is not None
            block = replace(block, standing_temp_bytes=max(block.standing_temp_bytes, 2 * logits))
        found.append((_unit(block, tp if row["vocab_parallel"] == "0" else 1), count))
    return replace(work, blocks=tuple(found))


def _keeping(block: BlockWork, more: int) -> BlockWork:
    """The block with so many more bytes from its forward to its backward."""
    return replace(block, saved_bytes=block.saved_bytes + more, left_bytes=block.left_bytes - more)


def _unit(block: BlockWork, parts: int) -> BlockWork:
    """The block as one FSDP1 unit of `parts` times the parameters that a tensor-parallel rank has here."""
    whole = HALF_BYTES * block.parameters * parts
    gather = Collective(op=CollectiveOp.ALL_GATHER, axes=("dp_shard",), size_bytes=whole)
    reduce = (Collective(op=CollectiveOp.REDUCE_SCATTER, axes=("dp_shard",), size_bytes=whole),)
    more = HALF_BYTES * block.parameters * (parts - 1)
    return replace(block, gather=gather, reduce=reduce, left_bytes=block.left_bytes + more)


def galvatron_profile(work: StageWork, ranks: int) -> ActivationProfile:
    """Its activations: FSDP1, and fp32 gradients of `ranks`' shares that appear when they are reduced."""
    shards = [FP32_BYTES * block.trainable // ranks for block, count in work.blocks for _ in range(count)]
    return activation_profile(work, reduce_every_micro=True, flat=True, shards=shards)


def compare(row: dict[str, str], graph: ModelGraph, length: int) -> Compared:
    chosen = strategy(row)
    expander = Expander(graph, load_cluster(CLUSTER))
    works = [as_galvatron(w, row, length) for w in expander.stages(chosen)]
    rank = 0 if row["rank"] == "0" else len(works) - 1
    work = works[rank]
    profiles = [galvatron_profile(w, int(row["dp"])) for w in works]
    memory = rank_memory(rank, expander.prepared(chosen).states[rank], works, profiles)
    states = work.parameter_bytes + work.gradient_bytes + work.optimizer_bytes + work.buffer_bytes
    return Compared(
        key=row["key"], layers=int(row["layers"]), rank=int(row["rank"]), states_mib=states / MIB,
        measured_states_mib=float(row["model_states_mib"]), kept_mib=profiles[rank].saved / MIB,
        measured_kept_mib=float(row["activation_mib"]), peak_mib=(memory.peak - states) / MIB,
        measured_peak_mib=float(row["activation_peak_mib"]),
    )  # fmt: skip


def grown(graph: ModelGraph, layers: int) -> ModelGraph:
    first, *_, last = graph.repeated_positions
    links = tuple(replace(graph.chain[first], path=f"lm.model.layers.{i}") for i in range(layers))
    return replace(graph, chain=(*graph.chain[:first], *links, *graph.chain[last + 1 :]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with ROWS.open() as file:
        rows = list(csv.DictReader(file))
    lengths = [SHORT_TOKENS.get(row["origin"].rpartition("/")[2], TOKENS) for row in rows]
    graphs = {length: llama2_7b(2, length) for length in dict.fromkeys(lengths)}
    found = [
        compare(row, grown(graphs[length], int(row["layers"])), length)
        for row, length in zip(rows, lengths, strict=True)
    ]
    print(
        f"{'run':16} {'layers':>6} {'rank':>4} {'states MiB':>22} {'':>7} {'kept MiB':>22} {'':>7} {'peak MiB':>22}"
    )
    for c in found:
        print(
            f"{c.key:16} {c.layers:6} {c.rank:4} {c.states_mib:10.0f} {c.measured_states_mib:10.0f} "
            f"{c.states_error:+7.1%} {c.kept_mib:10.0f} {c.measured_kept_mib:10.0f} "
            f"{c.kept_error:+7.1%} {c.peak_mib:10.0f} {c.measured_peak_mib:10.0f} {c.peak_error:+7.1%}"
        )
    for name, errors in (
        ("states", [abs(c.states_error) for c in found]),
        ("kept", [abs(c.kept_error) for c in found]),
        ("peak", [abs(c.peak_error) for c in found]),
    ):
        within = sum(e <= 0.03 for e in errors)
        print(f"{name}: mean error {sum(errors) / len(errors):.1%}, {within} of {len(errors)} within 3 %")
    if options.json:
        options.json.write_text(json.dumps([asdict(c) for c in found], indent=1))


if __name__ == "__main__":
    main()
