"""What our lowering costs beside torch code written by hand for the same strategy.

python -m benchmarks.overhead [--features 256 768] [--only replicas zero-3 tp 1f1b] [--rounds 12] [--json OUT.json]

A small decoder (embedding, four blocks of attention and MLP, head) trains on two Gloo processes of one thread each, by
`auto_parallelize` and by hand: DDP, FSDP2's `fully_shard` of each block and the root, `parallelize_module` with column- and
row-wise linears on plain local heads, and `torch.distributed.pipelining`'s Schedule1F1B over two stages of four micro-batches.
Both models live in one launch and step in turns, ours first in every other round, so that other work on the machine falls on
both. Printed are the median step of each, the median and the quartiles of the ratios of neighbouring steps, and the most bytes
that lived in a step beyond what was there before it, both counted in the same way.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from autoparallel import auto_parallelize
from autoparallel.planner.strategy.types import (
    Batch,
    Execution,
    Mesh,
    Pipeline,
    Shard,
    Strategy,
    TensorRule,
)
from autoparallel.runtime.check.live_bytes import LiveBytes

PROCESSES, BLOCKS, HEADS, VOCABULARY, LENGTH, SAMPLES, MICRO_BATCHES = 2, 4, 8, 2048, 64, 8, 4
WARM_UP = 2
LIMIT = 1.02  # of the time by hand, at 768 features and above: what this library wants to keep to
Step = Callable[[Tensor, Tensor], None]


class Block(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.head = features // HEADS
        self.first, self.second = nn.LayerNorm(features), nn.LayerNorm(features)
        self.q, self.k, self.v, self.o = (nn.Linear(features, features, bias=False) for _ in range(4))
        self.up = nn.Linear(features, 4 * features, bias=False)
        self.down = nn.Linear(4 * features, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        q, k, v = (p(y).view(*y.shape[:2], -1, self.head).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, features)
        self.blocks = nn.ModuleList(Block(features) for _ in range(BLOCKS))
        self.norm, self.out = nn.LayerNorm(features), nn.Linear(features, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _strategy(kind: str) -> Strategy:
    def rules(names: tuple[str, ...], dim: int, given: str, made: str) -> list[TensorRule]:
        return [
            TensorRule(
                module=f"blocks.*.{name}", params=(("weight", f"shard({dim})"),), inputs=(("input", given),),
                outputs=(made,),
            )
            for name in names
        ]  # fmt: skip

    parallel = {
        "replicas": {"dp_replicate": 2},
        "zero-3": {"dp_shard": 2},
        "tp": {"tp": 2},
        "1f1b": {"pp": 2},
    }[kind]
    mesh, pipelined = Mesh(**parallel), kind == "1f1b"
    return Strategy(
        batch=Batch(
            global_=SAMPLES, micro=SAMPLES // (MICRO_BATCHES if pipelined else 1) // mesh.data_parallel
        ),
        mesh=mesh,
        shard=Shard(zero=3 if kind == "zero-3" else 0),
        pipeline=Pipeline(schedule="1f1b", stage_blocks=(2, 2))
        if pipelined
        else Pipeline(stage_blocks=(BLOCKS,)),
        execution=Execution(dtype="fp32", param_dtype="fp32", master_weights=False, kernels="eager"),
        tensor=(
            *rules(("q", "k", "v", "up"), 0, "replicate", "shard(-1)"),
            *rules(("o", "down"), 1, "shard(-1)", "replicate"),
        )
        if kind == "tp"
        else (),
    )


def ours(kind: str, features: int) -> Step:
    """A training step by `auto_parallelize`."""
    module = _made(features)
    strategy = _strategy(kind)
    ids = torch.zeros(SAMPLES // strategy.mesh.data_parallel, LENGTH, dtype=torch.long)
    model = auto_parallelize(module, ids, strategy=strategy, cluster=f"cpu-gloo:1x{PROCESSES}", cache=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(ids: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        model.step(ids, targets, loss_fn=loss_of)
        optimizer.step()

    return step


def _made(features: int) -> Decoder:
    torch.manual_seed(0)
    return Decoder(features)


def by_hand(kind: str, features: int) -> Step:
    """The same step as a torch user writes it."""
    module = _made(features)
    if kind == "1f1b":
        return _pipelined(module)
    if kind == "replicas":
        model: nn.Module = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    elif kind == "zero-3":
        model = _sharded(module)
    else:
        model = _tensor_parallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(ids: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model(ids), targets).backward()
        optimizer.step()

    return step


def _sharded(module: Decoder) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (PROCESSES,))
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def _tensor_parallel(module: Decoder) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (PROCESSES,))
    for block in module.blocks:
        columns = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        parallelize_module(block, mesh, {**columns, "o": RowwiseParallel(), "down": RowwiseParallel()})
    return module


class _Stage(nn.Module):
    def __init__(self, module: Decoder, index: int) -> None:
        super().__init__()
        self.embedding = module.embedding if index == 0 else nn.Identity()
        self.blocks = module.blocks[2 * index : 2 * index + 2]
        self.end = nn.Identity() if index == 0 else nn.Sequential(module.norm, module.out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)  # type: ignore[no-any-return]


def _pipelined(module: Decoder) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    stage = _Stage(module, rank)
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, PROCESSES, torch.device("cpu")), MICRO_BATCHES, loss_fn=loss_of
    )
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-4)

    def step(ids: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=targets)
        optimizer.step()

    return step


def _timed(step: Step, ids: Tensor, targets: Tensor) -> float:
    dist.barrier()
    begin = time.perf_counter()
    step(ids, targets)
    dist.barrier()
    return time.perf_counter() - begin


def _peak_bytes(step: Step, ids: Tensor, targets: Tensor) -> int:
    gc.collect()
    with LiveBytes() as live:
        live.begin()
        step(ids, targets)
        return live.end().peak


def compared(kind: str, features: int, rounds: int) -> dict[str, Any]:
    """Seconds of both, in turns, and the bytes that live in a step. Collective."""
    generator = torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator) for _ in range(2))
    if kind in ("replicas", "zero-3"):
        mine = slice(dist.get_rank() * SAMPLES // PROCESSES, (dist.get_rank() + 1) * SAMPLES // PROCESSES)
        ids, targets = ids[mine], targets[mine]
    steps = (ours(kind, features), by_hand(kind, features))
    for step in (*steps, *steps)[: 2 * WARM_UP]:
        step(ids, targets)
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            seconds[which].append(_timed(steps[which], ids, targets))
    peaks = [_peak_bytes(step, ids, targets) for step in steps]
    ratios = [a / b for a, b in zip(*seconds, strict=True)]
    quarter = quantiles(ratios, n=4)
    return {
        "kind": kind, "features": features, "ours_s": median(seconds[0]), "by_hand_s": median(seconds[1]),
        "ratio": median(ratios), "quartiles": [quarter[0], quarter[2]], "ours_peak_bytes": peaks[0],
        "by_hand_peak_bytes": peaks[1],
    }  # fmt: skip


def train(rank: int, kind: str, features: int, rounds: int, folder: str) -> None:
    """One process of a comparison; rank 0 writes it."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(PROCESSES), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    found = compared(kind, features, rounds)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ("replicas", "zero-3", "tp", "1f1b")
    parser.add_argument("--features", type=int, nargs="+", default=[256, 768, 2048])
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for features in options.features:
        for kind in options.only:
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(train, args=(kind, features, options.rounds, folder), nprocs=PROCESSES)  # type: ignore[no-untyped-call]
                row = json.loads(Path(folder, "found.json").read_text())
            rows.append(row)
            low, high = row["quartiles"]
            verdict = "" if features < 768 else "; within 1.02" if row["ratio"] <= LIMIT else "; above 1.02"
            print(
                f"{kind:9} {features:5} features: {row['ours_s'] * 1e3:7.1f} ms, by hand {row['by_hand_s'] * 1e3:7.1f} ms, ratio "
                f"{row['ratio']:.3f} ({low:.3f} to {high:.3f}); peak {row['ours_peak_bytes'] / 2**20:.1f} MiB, by hand "
                f"{row['by_hand_peak_bytes'] / 2**20:.1f} MiB{verdict}", flush=True,
            )  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
