"""What compressed gradients cost in loss: `python benchmarks/compressed_training.py [--steps N] [METHOD ...]`.

A small Llama learns a source of tokens (each is followed by one of a few, with unlike chances) on two processes with Gloo,
once with every method of `grad_sync.compression`, over replicas and over ranks that shard (ZeRO-3), and once with every one
of `grad_sync.weights`, as `gathers METHOD`. Prints the loss on
tokens not seen before, relative to the uncompressed run's, and the source's own entropy, below which no model comes.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.costmodel.compression import WEIGHTS
from autoparallel.planner.strategy.types import Batch, Execution, GradSync, Mesh, Shard, Strategy
from autoparallel.runtime.start import parallelize

METHODS = (
    "none", "fp16", "bf16", "fp8", "int8", "int4", "int2", "sign", "topk:0.1", "topk:0.02-0.2", "powersgd:4",
)  # fmt: skip
VOCABULARY, LENGTH, PER_RANK, SUCCESSORS = 32, 16, 16, 4
CHANCES = torch.tensor([0.6, 0.2, 0.15, 0.05])
RATE, WARM = 6e-3, 20


def source_entropy() -> float:
    """Nats per token of the source."""
    return -sum(p * math.log(p) for p in CHANCES.tolist())


def drawn(samples: int, source: torch.Generator) -> Tensor:
    """Token sequences [samples, LENGTH + 1]."""
    table = torch.stack(
        [torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(t)) for t in range(VOCABULARY)]
    )
    ids = [torch.randint(0, VOCABULARY, (samples,), generator=source)]
    for _ in range(LENGTH):
        choice = torch.multinomial(CHANCES, samples, replacement=True, generator=source)
        ids.append(table[ids[-1], choice])
    return torch.stack(ids, dim=1)


def small_llama() -> torch.nn.Module:
    """Two blocks, 32 wide; the same on every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip


def language_loss(output: Any, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def final_loss(
    rank: int, world_size: int, method: str, zero: int, steps: int, weights: str = "none"
) -> float:
    """Loss on unseen tokens after `steps` of AdamW under `method`, parameters gathered as `weights`; zero 0 is replicas."""
    axis = "dp_shard" if zero else "dp_replicate"
    strategy = Strategy(
        batch=Batch(global_=PER_RANK * world_size, micro=PER_RANK), mesh=Mesh(**{axis: world_size}),
        shard=Shard(zero=zero), execution=Execution(dtype="fp32", param_dtype="fp32", kernels="eager"),
        grad_sync=GradSync(compression=(method,), bucket_mib=1.0, weights=weights),
    )  # fmt: skip
    module = small_llama()
    blocks = [f"model.layers.{n}" for n in range(2)]
    example = {"input_ids": drawn(PER_RANK, torch.Generator().manual_seed(9))[:, :-1]}
    model: Any = parallelize(module, example, strategy, blocks=blocks, program=lambda: None)  # type: ignore[arg-type,return-value]
    optimizer = model.optimizer(torch.optim.AdamW, lr=RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM) * (1 - step / steps) ** 0.5
    )
    source = torch.Generator().manual_seed(1000 + rank)
    for _ in range(steps):
        ids = drawn(PER_RANK, source)
        optimizer.zero_grad()
        model.step({"input_ids": ids[:, :-1]}, ids[:, 1:], loss_fn=language_loss)
        optimizer.step()
        schedule.step()
    unseen = drawn(512, torch.Generator().manual_seed(5))
    with torch.no_grad():
        return float(language_loss(model(input_ids=unseen[:, :-1]), unseen[:, 1:]))


def _serve(rank: int, store: str, methods: Sequence[str], steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    print_row = print if rank == 0 else lambda *_, **__: None
    print_row(f"entropy of the source {source_entropy():.4f}; {steps} steps", flush=True)
    for zero in (0, 3):
        exact = final_loss(rank, 2, "none", zero, steps)
        for method in methods:
            loss = final_loss(rank, 2, method, zero, steps)
            how = "ZeRO-3" if zero else "replicas"
            print_row(f"{how:9} {method:14} loss {loss:.4f}  {loss / exact - 1:+.2%}", flush=True)
    for weights in [method for method in WEIGHTS if method in methods]:
        loss = final_loss(rank, 2, "none", 3, steps, weights)
        print_row(
            f"{'ZeRO-3':9} {'gathers ' + weights:14} loss {loss:.4f}  {loss / exact - 1:+.2%}", flush=True
        )
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            multiprocessing.Process(
                target=_serve, args=(r, f"{folder}/store", arguments.methods, arguments.steps)
            )
            for r in range(2)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
