"""Losses of a few steps by strategies of every kind, against plain PyTorch on the same device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from autoparallel import auto_parallelize
from autoparallel.planner.strategy.stacks import OWN_STACK
from autoparallel.planner.strategy.types import (
    Batch,
    Execution,
    Offload,
    Pipeline,
    Recompute,
    Shard,
    Strategy,
)
from autoparallel.runtime.profiling.timing import device_name

DEVICE = device_name()
STEPS, SAMPLES, MICRO, LENGTH, WORDS = 5, 8, 2, 128, 1024
PLAIN = Execution(
    stack=OWN_STACK, dtensor=True, fsdp2=True, dtype="fp32", param_dtype="fp32", master_weights=False, grad_dtype="fp32",
    kernels="eager",
)  # fmt: skip


def models() -> Iterator[tuple[str, nn.Module]]:
    """A dense decoder and one of experts."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "use_cache": False, "num_key_value_heads": 4}
    yield (
        "llama",
        LlamaForCausalLM(
            LlamaConfig(
                hidden_size=256,
                intermediate_size=704,
                num_hidden_layers=4,
                num_attention_heads=8,
                **sizes,
            )
        ),
    )
    yield (
        "mixtral",
        MixtralForCausalLM(
            MixtralConfig(
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_local_experts=4,
                output_router_logits=False,
                **sizes,
            )
        ),
    )


def strategies(blocks: int) -> Iterator[tuple[str, Strategy | None]]:
    """By name; None is the planner's own."""
    plain = Strategy(
        batch=Batch(global_=SAMPLES, micro=MICRO), pipeline=Pipeline(stage_blocks=(blocks,)), execution=PLAIN
    )
    yield "as it is", plain
    yield "recompute full", replace(plain, recompute=Recompute(mode="full"))
    yield "recompute selective", replace(plain, recompute=Recompute(mode="selective"))
    yield "optimizer on the host", replace(plain, offload=Offload(optimizer=1.0))
    yield "half of the optimizer on the host", replace(plain, offload=Offload(optimizer=0.5))
    yield "activations on the host", replace(plain, offload=Offload(activations=1.0))
    yield "ZeRO-3 of one", replace(plain, shard=Shard(zero=3))
    yield "mixed precision", replace(plain, execution=replace(PLAIN, dtype="bf16"))
    short = replace(PLAIN, dtype="bf16", param_dtype="bf16", master_weights=True)
    yield "float32 copies", replace(plain, execution=short)
    yield "compiled", replace(plain, execution=replace(PLAIN, kernels="compiled"))
    yield "the plan", None


def by_hand(model: nn.Module, ids: Tensor) -> list[float]:
    """The losses of a loop of plain PyTorch."""
    model = copy.deepcopy(model).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for part in ids.to(DEVICE).split(MICRO):
            loss = model(input_ids=part, labels=part).loss * MICRO / SAMPLES
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def by_strategy(model: nn.Module, ids: Tensor, strategy: Strategy | None) -> list[float]:
    """The losses of the same steps by `auto_parallelize`."""
    batch = {"input_ids": ids, "labels": ids}
    named = {}
    if strategy is not None:
        e = strategy.execution
        named = {"dtype": e.dtype, "param_dtype": e.param_dtype, "grad_dtype": e.grad_dtype}
    made = auto_parallelize(copy.deepcopy(model), batch, strategy=strategy, cache=None, **named)
    optimizer = made.optimizer(torch.optim.AdamW, lr=1e-3)  # type: ignore[operator]
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(made.step(batch).item())  # type: ignore[operator]
        optimizer.step()
    return losses


def compare() -> None:
    """Prints how far the losses are apart, strategy by strategy."""
    ids = torch.randint(WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    for name, model in models():
        wanted = by_hand(model, ids)
        for kind, strategy in strategies(model.config.num_hidden_layers):  # type: ignore[union-attr, arg-type]
            try:
                found = by_strategy(model, ids, strategy)
            except Exception as error:  # the others are to be seen
                print(f"{name:10}{kind:36}{type(error).__name__}: {error}", flush=True)
                continue
            apart = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
            print(f"{name:10}{kind:36}{apart:.2e}", flush=True)
