"""Tiny models with layers of experts, for comparisons against one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoparallel.planner.strategy.types import TensorRule
from autoparallel.runtime.experts.modules import ExpertModule
from tests.runtime.models import (
    CLASSES,
    VOCABULARY,
    Example,
    class_loss,
    language_loss,
    llama_rules,
    rule,
    tokens,
)

COUNT, WIDTH, CHOICES = 4, 32, 2
_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4,
    "max_position_embeddings": 32, "use_cache": False, "num_experts_per_tok": CHOICES,
}  # fmt: skip


def layer_at(path: str, *, width: int = WIDTH) -> ExpertModule:
    """The layer at `path`, called as those of transformers are."""
    return ExpertModule(
        path=path, experts=COUNT, parameters=("gate_up_proj", "down_proj"), hidden="hidden_states",
        index="top_k_index", weights="top_k_weights", width=width, choices=CHOICES,
    )  # fmt: skip


def _language_model(
    module: nn.Module, batch: int, layers: int, rules: Callable[[bool], Sequence[TensorRule]]
) -> Example:
    inputs, targets = tokens(batch)
    blocks = tuple(f"model.layers.{i}" for i in range(layers))
    paths = [f"{block}.mlp.experts" for block in blocks]
    return Example(
        module=module, blocks=blocks, inputs=inputs, targets=targets, loss_fn=language_loss, rules=rules,
        experts=tuple(layer_at(path) for path in paths if path in dict(module.named_modules())),
    )  # fmt: skip


def _mixtral_rules(sequence_parallel: bool) -> list[TensorRule]:
    hidden = "shard(1)" if sequence_parallel else "replicate"
    outside = [r for r in llama_rules(sequence_parallel) if ".mlp" not in r.module]
    return [*outside, rule("model.layers.*.mlp", hidden, inputs={"hidden_states": "replicate"})]


def mixtral(batch: int) -> Example:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **_DECODER, num_hidden_layers=2, num_key_value_heads=2, head_dim=8, num_local_experts=COUNT,
        tie_word_embeddings=True,
    )  # fmt: skip
    return _language_model(MixtralForCausalLM(config), batch, 2, _mixtral_rules)


def deepseek(batch: int) -> Example:
    """A dense layer, then two of experts beside an MLP that every token goes through."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **_DECODER, num_hidden_layers=3, num_key_value_heads=4, first_k_dense_replace=1, kv_lora_rank=8,
        q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12, n_routed_experts=COUNT,
        moe_intermediate_size=16, n_group=2, topk_group=1, n_shared_experts=1,
    )  # fmt: skip
    return _language_model(DeepseekV3ForCausalLM(config), batch, 3, lambda _: [rule("lm_head")])


class LoopedExperts(nn.Module):
    """Experts with biases, one after another; as many as `count`, which is also their width here."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.count, self.width = count, width
        self.up = nn.Parameter(torch.randn(count, width, 3 * width) * 0.3)
        self.shift = nn.Parameter(torch.randn(count, 3 * width) * 0.3)
        self.down = nn.Parameter(torch.randn(count, 3 * width, width) * 0.3)

    def forward(self, x: Tensor, by: Tensor, chosen: Tensor) -> Tensor:
        rows = x.view(-1, self.width)
        made = torch.zeros_like(rows)
        for expert in range(self.count):
            row, choice = torch.where(chosen == expert)
            if len(row):
                inner = F.gelu(rows[row] @ self.up[expert] + self.shift[expert])
                made = made.index_add(0, row, by[row, choice, None] * (inner @ self.down[expert]))
        return made


class RoutedBlock(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, count)
        self.experts = LoopedExperts(count, width)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        by, chosen = self.router(rows).sigmoid().topk(CHOICES, dim=-1)
        return x + self.experts(rows, by, chosen)


class Routed(nn.Module):
    """As many experts as tokens are wide, so that nothing tells the two apart but what the experts do."""

    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RoutedBlock(width, width) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def routed(batch: int) -> Example:
    layers = (
        ExpertModule(
            path=f"blocks.{i}.experts", experts=8, parameters=("up", "shift", "down"), hidden="x",
            index="chosen", weights="by", width=8, choices=CHOICES,
        )
        for i in range(2)
    )  # fmt: skip
    return Example(
        module=Routed(), blocks=("blocks.0", "blocks.1"), inputs=torch.randn(batch, 8),
        targets=torch.randint(0, CLASSES, (batch,)), loss_fn=class_loss,
        rules=lambda _: [rule("head", "replicate", params={"weight": "shard(0)", "bias": "shard(0)"})],
        experts=tuple(layers),
    )  # fmt: skip


EXPERT_EXAMPLES: dict[str, Callable[[int], Example]] = {f.__name__: f for f in (mixtral, deepseek, routed)}
