"""Train a Hugging Face Llama with any strategy, or without one. Run it under torchrun, or alone.

torchrun --nproc-per-node 4 examples/train_llama.py examples/configs/llama-tiny.json --strategy strategy.toml
python examples/train_llama.py examples/configs/llama-tiny.json --plain     # ordinary PyTorch, one process
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

LEARNING_RATE = 1e-3


def build(config: Path) -> torch.nn.Module:
    """The model with the same random weights in every process, in float32 and training mode."""
    torch.manual_seed(0)
    settings = AutoConfig.from_pretrained(str(config), trust_remote_code=False)
    return AutoModelForCausalLM.from_config(settings, dtype=torch.float32).train()


def batch(step: int, sequences: int, seq_len: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """The whole batch of a step, the same in every process: sequences that count up, so that there is
    something to learn."""
    random = torch.Generator().manual_seed(step)
    start = torch.randint(0, vocabulary, (sequences, 1), generator=random)
    tokens = (start + torch.arange(seq_len)) % vocabulary
    return {"input_ids": tokens, "labels": tokens}


def home(args: argparse.Namespace) -> torch.device:
    """Where one process computes."""
    found = None if args.cpu else torch.accelerator.current_accelerator(check_available=True)
    return found or torch.device("cpu")


def finished() -> float:
    """The time when all that this process has started is done: accelerators run behind."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter()


def train_plain(args: argparse.Namespace) -> dict[str, list[float]]:
    """One process, plain PyTorch: the micro-batches of a step one after another, gradients accumulated."""
    device = home(args)
    model = build(args.config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, times = [], []
    for step in range(args.steps):
        inputs = batch(step, args.global_batch, args.seq_len, model.config.vocab_size)
        begin = finished()
        optimizer.zero_grad()
        loss = 0.0
        for i in range(0, args.global_batch, args.micro):
            micro = {name: tensor[i : i + args.micro].to(device) for name, tensor in inputs.items()}
            part = model(**micro).loss * args.micro / args.global_batch
            part.backward()
            loss += part.item()
        optimizer.step()
        times.append(finished() - begin)
        losses.append(loss)
    return {"losses": losses, "step_times_s": times}


def train_parallel(args: argparse.Namespace) -> dict[str, list[float]]:
    """The same steps on every process of torchrun, by the strategy."""
    from autoparallel import auto_parallelize

    module = build(args.config)
    vocabulary = module.config.vocab_size
    world = int(os.environ.get("WORLD_SIZE", "1"))
    example = batch(0, max(args.global_batch // world, 1), args.seq_len, vocabulary)
    model = auto_parallelize(module, example, strategy=args.strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    share = args.global_batch // model.data_parallel_size
    first = model.data_parallel_rank * share
    losses, times = [], []
    for step in range(args.steps):
        whole = batch(step, args.global_batch, args.seq_len, vocabulary)
        mine = {name: tensor[first : first + share] for name, tensor in whole.items()}
        begin = finished()
        optimizer.zero_grad()
        loss = model.step(mine)
        optimizer.step()
        times.append(finished() - begin)
        losses.append(float(loss))
    return {"losses": losses, "step_times_s": times}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--strategy", type=Path)
    parser.add_argument("--plain", action="store_true", help="plain PyTorch in one process")
    parser.add_argument("--cpu", action="store_true", help="compute on the CPU, whatever else there is")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--micro", type=int, default=4, help="with --plain: sequences per micro-batch")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write losses and step times here")
    args = parser.parse_args()
    torch.set_num_threads(1)  # several processes share this machine's cores
    if args.cpu and not args.plain:  # with a process group of Gloo alone ranks compute on the CPU
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("gloo", **alone)
    result = train_plain(args) if args.plain else train_parallel(args)
    if int(os.environ.get("RANK", "0")) == 0:
        for step, (loss, step_s) in enumerate(zip(result["losses"], result["step_times_s"], strict=True)):
            print(f"step {step}: loss {loss:.6f}, {step_s * 1e3:.0f} ms")
        if args.json:
            args.json.write_text(json.dumps(result), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
