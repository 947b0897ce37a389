"""Predicted against measured memory of truncated Llama-2-7B runs: `python benchmarks/memory.py [--json OUT.json]`.

Data: benchmarks/published/memory_llama2_7b.csv, the memory profile that Galvatron ships (its `origin` column).
What the profile does not state is inferred from it:
- model states grow by 386 MiB a layer whatever the split: 16 bytes a parameter (bf16 parameter and gradient, fp32
  copy and two moments) over all eight devices, so ZeRO-3 over the data-parallel ranks;
- one row keeps 250 MiB of what the loss needs, one bf16 value for each of 4,096 tokens and 32,000 words: the loss
  is computed on bf16 logits;
- the peaks leave no room for a gather issued ahead nor for a reduction that is not over: torch counts what FSDP frees
  as free when the host lets go of it (c10/cuda/CUDACachingAllocator.cpp, `free`), whatever streams still do with it;
- activations grow by 514.6 MiB a layer on eight data-parallel ranks: twice the 257.3 MiB that one sample of 2,048
  tokens keeps, so two samples a device, sixteen a step, in one micro-batch.
Rows with tp > 1 and vocab_parallel = 0 split the vocabulary layers' samples over the tensor-parallel ranks, which
costs a rank what a share of the vocabulary costs it here.
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
from autoparallel.costmodel.memory import activation_profile, rank_memory
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Pipeline, Recompute, Shard, Strategy
from autoparallel.profiles.load import load_cluster

ROWS = Path(__file__).parent / "published" / "memory_llama2_7b.csv"
MIB = 2**20
SAMPLES = 16  # a step; see above
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


def llama2_7b(layers: int) -> ModelGraph:
    """The model at a small depth, captured on the meta device."""
    import torch
    import torch.nn.functional as F
    from transformers import LlamaConfig, LlamaForCausalLM

    from autoparallel.planner.capture import capture

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=layers, num_attention_heads=32,
        vocab_size=32000, use_cache=False,
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
        tokens = torch.zeros(2, 2048, dtype=torch.int64)
    return capture(model, {"input_ids": tokens, "labels": tokens}, name="llama-2-7b")


def strategy(row: dict[str, str]) -> Strategy:
    pp, tp, dp, layers = (int(row[k]) for k in ("pp", "tp", "dp", "layers"))
    return Strategy(
        batch=Batch(global_=SAMPLES, micro=SAMPLES // dp),
        mesh=Mesh(pp=pp, dp_shard=dp, tp=tp),
        shard=Shard(zero=3 if dp > 1 else 0, sequence_parallel=tp > 1),
        pipeline=Pipeline(schedule="gpipe" if pp > 1 else "none", stage_blocks=(layers // pp,) * pp),
        recompute=Recompute(mode="full" if row["checkpoint"] == "1" else "none"),
        execution=Execution(grad_dtype="bf16"),
    )


def compare(row: dict[str, str], graph: ModelGraph) -> Compared:
    chosen = strategy(row)
    expander = Expander(graph, load_cluster(CLUSTER))
    works = expander.stages(chosen)
    rank = 0 if row["rank"] == "0" else len(works) - 1
    work = works[rank]
    profiles = [activation_profile(w, reduce_every_micro=True, overlapping=False) for w in works]
    memory = rank_memory(rank, expander.prepared(chosen).states[rank], works, profiles)
    states = work.parameter_bytes + work.gradient_bytes + work.optimizer_bytes + work.buffer_bytes
    return Compared(
        key=row["key"], layers=int(row["layers"]), rank=int(row["rank"]), states_mib=states / MIB,
        measured_states_mib=float(row["model_states_mib"]),
        kept_mib=activation_profile(work, reduce_every_micro=False).saved / MIB,
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
    graph = llama2_7b(2)
    found = [compare(row, grown(graph, int(row["layers"]))) for row in rows]
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
