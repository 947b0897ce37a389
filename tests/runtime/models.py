"""Tiny models for comparisons against one process, with hand-written tensor rules and a batch each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoparallel.planner.strategy.types import TensorRule
from autoparallel.runtime.experts.modules import ExpertModule
from tests.own_blocks import ByHand, OwnModel, TorchAttention

VOCABULARY, LENGTH, CLASSES = 64, 8, 10


@dataclass(frozen=True, kw_only=True)
class Example:
    """A model, the paths of its repeated blocks, a batch, a loss, and rules that shard it over tp."""

    module: nn.Module
    blocks: tuple[str, ...]
    inputs: Any
    targets: Any
    loss_fn: Callable[[Any, Any], Tensor] | None
    rules: Callable[[bool], Sequence[TensorRule]]
    experts: tuple[ExpertModule, ...] = ()
    entered: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()


def rule(
    module: str, *outputs: str, params: dict[str, str] | None = None, inputs: dict[str, str] | None = None
) -> TensorRule:
    return TensorRule(
        module=module,
        params=tuple((params or {}).items()),
        inputs=tuple((inputs or {}).items()),
        outputs=outputs,
    )


def language_loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def class_loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(getattr(output, "logits", output), target)


def tokens(batch: int) -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.randint(0, VOCABULARY, (batch, LENGTH))
    return {"input_ids": ids}, ids.roll(-1, dims=1)


def _column(path: str, *names: str, bias: bool = False) -> list[TensorRule]:
    params = {"weight": "shard(0)"} | ({"bias": "shard(0)"} if bias else {})
    return [rule(f"{path}.{name}", "shard(-1)", params=params) for name in names]


def _row(path: str, *names: str, hidden: str, bias: bool = False) -> list[TensorRule]:
    params = {"weight": "shard(1)"} | ({"bias": "replicate"} if bias else {})
    return [rule(f"{path}.{name}", hidden, params=params) for name in names]


def llama_rules(sequence_parallel: bool) -> list[TensorRule]:
    hidden = "shard(1)" if sequence_parallel else "replicate"
    block = "model.layers.*"
    return [
        rule("model.embed_tokens", hidden, params={"weight": "shard(0)"}),
        rule(f"{block}.self_attn", hidden, inputs={"hidden_states": "replicate"}),
        *_column(f"{block}.self_attn", "q_proj", "k_proj", "v_proj"),
        *_row(f"{block}.self_attn", "o_proj", hidden=hidden),
        rule(f"{block}.mlp", hidden, inputs={"x": "replicate"}),
        *_column(f"{block}.mlp", "gate_proj", "up_proj"),
        *_row(f"{block}.mlp", "down_proj", hidden=hidden),
        rule("lm_head", "shard(-1)", params={"weight": "shard(0)"}, inputs={"input": "replicate"}),
    ]


def gpt2_rules(sequence_parallel: bool) -> list[TensorRule]:
    """Conv1D holds weights as (in, out); the fused query-key-value projection is sharded along `out`."""
    hidden = "shard(1)" if sequence_parallel else "replicate"
    block = "transformer.h.*"
    column = {"weight": "shard(1)", "bias": "shard(0)"}
    row = {"weight": "shard(0)", "bias": "replicate"}
    return [
        rule("transformer.wte", hidden, params={"weight": "shard(0)"}),
        rule("transformer.wpe", hidden),
        rule(f"{block}.attn", inputs={"hidden_states": "replicate"}),
        rule(f"{block}.attn.c_attn", "shard(-1)", params=column),
        rule(f"{block}.attn.c_proj", hidden, params=row, inputs={"x": "shard(-1)"}),
        rule(f"{block}.mlp", inputs={"hidden_states": "replicate"}),
        rule(f"{block}.mlp.c_fc", "shard(-1)", params=column),
        rule(f"{block}.mlp.c_proj", hidden, params=row),
        rule("lm_head", "shard(-1)", params={"weight": "shard(0)"}, inputs={"input": "replicate"}),
    ]


def vit_rules(sequence_parallel: bool) -> list[TensorRule]:
    hidden = "replicate"  # patches and the class token are an odd number: no sequence sharding
    block = "vit.layers.*"
    return [
        rule(f"{block}.attention", hidden, inputs={"hidden_states": "replicate"}),
        *_column(f"{block}.attention", "q_proj", "k_proj", "v_proj", bias=True),
        *_row(f"{block}.attention", "o_proj", hidden=hidden, bias=True),
        *_column(f"{block}.mlp", "fc1", bias=True),
        *_row(f"{block}.mlp", "fc2", hidden=hidden, bias=True),
    ]


def mlp_rules(sequence_parallel: bool) -> list[TensorRule]:
    return [*_column("blocks.*", "up", bias=True), *_row("blocks.*", "down", hidden="replicate", bias=True)]


def _llama_like(kind: str, batch: int, *, labels: bool = False) -> Example:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=32,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    inputs, targets = tokens(batch)
    if labels:
        inputs = inputs | {"labels": inputs["input_ids"]}
    return Example(
        module=AutoModelForCausalLM.from_config(config),
        blocks=("model.layers.0", "model.layers.1"),
        inputs=inputs,
        targets=None if labels else targets,
        loss_fn=None if labels else language_loss,
        rules=llama_rules,
        alone=("model.norm",),
    )


def llama(batch: int) -> Example:
    return _llama_like("llama", batch)


def llama_with_labels(batch: int) -> Example:
    return _llama_like("llama", batch, labels=True)


def qwen3(batch: int) -> Example:
    return _llama_like("qwen3", batch)


def gpt2(batch: int) -> Example:
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    inputs, targets = tokens(batch)
    return Example(
        module=AutoModelForCausalLM.from_config(config),
        blocks=("transformer.h.0", "transformer.h.1"),
        inputs=inputs,
        targets=targets,
        loss_fn=language_loss,
        rules=gpt2_rules,
        alone=("transformer.wpe", "transformer.ln_f"),
    )


def vit(batch: int) -> Example:
    from transformers import AutoModelForImageClassification, ViTConfig

    config = ViTConfig(
        image_size=8, patch_size=4, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return Example(
        module=AutoModelForImageClassification.from_config(config),
        blocks=("vit.layers.0", "vit.layers.1"),
        inputs={"pixel_values": torch.randn(batch, 3, 8, 8)},
        targets=torch.randint(0, CLASSES, (batch,)),
        loss_fn=class_loss,
        rules=vit_rules,
    )


class MlpBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.tensor(0.5))  # a scalar parameter

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(x)))


class Mlp(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mlp(batch: int) -> Example:
    return Example(
        module=Mlp(),
        blocks=("blocks.0", "blocks.1", "blocks.2"),
        inputs=torch.randn(batch, 16),
        targets=torch.randint(0, CLASSES, (batch,)),
        loss_fn=class_loss,
        rules=mlp_rules,
    )


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class ResNet(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(ResidualBlock(channels) for _ in range(2)))
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


def resnet(batch: int) -> Example:
    return Example(
        module=ResNet(),
        blocks=("blocks.0", "blocks.1"),
        inputs=(torch.randn(batch, 3, 6, 6),),
        targets=torch.randint(0, CLASSES, (batch,)),
        loss_fn=class_loss,
        rules=lambda _: [rule("head", "replicate", params={"weight": "shard(0)", "bias": "shard(0)"})],
    )


class RulelessBlock(MlpBlock):
    """Between its two projections: what DTensor has no rule for forwards, or backwards, or only says of itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(x))
        windows = y.as_strided((len(y), 4, 2), (y.stride(0), 2, 1))  # of the first numbers of each sample
        y = y.masked_scatter(y > 0.2, y.square()) + F.adaptive_avg_pool1d(windows, 1).mean()
        last = y.view(len(y), 2, 4, 4).permute(0, 3, 1, 2)  # channels, as pools of images ask for them
        y = y + F.adaptive_avg_pool2d(last, 1).flatten(1).repeat(1, 8)
        y = F.avg_pool2d(y[:, None, None], (1, 3), stride=1, padding=(0, 1))[:, 0, 0]
        return x + self.scale * self.down(y)


def without_rules(batch: int) -> Example:
    plain = mlp(batch)
    model = Mlp()
    model.blocks = nn.ModuleList(RulelessBlock(16) for _ in range(3))
    return replace(plain, module=model)


class Beside(Mlp):
    """An activation that goes past all blocks beside the one that goes through them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.stem(x)
        for block in self.blocks:
            x = first + block(x)
        return self.head(x * first)


class Entering(Mlp):
    """Its own code runs a part of the first block again, after all blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.blocks[0].up(x)[:, :16])  # type: ignore[operator]


def entering(batch: int) -> Example:
    return replace(mlp(batch), module=Entering(), entered=("blocks.0",), rules=lambda _: mlp_rules(False)[1:])


class SpectralBlock(MlpBlock):
    """Mixes the lowest frequencies of what its projections return, by complex weights."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.mix = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128) / 4)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(super().forward(x))
        low = waves[:, :4] @ self.mix.to(waves.dtype)
        return torch.fft.irfft(torch.cat([low, waves[:, 4:]], dim=1), n=x.shape[1])


def spectral(batch: int) -> Example:
    model = Mlp()
    model.blocks = nn.ModuleList(SpectralBlock(16) for _ in range(3))
    return replace(mlp(batch), module=model)


class RecurrentBlock(MlpBlock):
    """Reads the columns of its input as a series, one number a step; returns a view."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.series = nn.LSTM(1, 4, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        series: Tensor = self.series(x.unsqueeze(-1))[0]
        return (super().forward(x) + series.mean(-1)).view_as(x)


class Recurrent(Mlp):
    """Changes in place what its blocks return."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RecurrentBlock(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return self.head(x)


def recurrent(batch: int) -> Example:
    return replace(mlp(batch), module=Recurrent())


class Held(nn.Module):
    """Its layers only hold modules: they are called from here, one by one."""

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"mix": MlpBlock(width), "norm": nn.LayerNorm(width)}) for _ in range(depth)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["norm"](layer["mix"](x))  # type: ignore[index]
        return self.head(x)


def held(batch: int) -> Example:
    return replace(
        mlp(batch),
        module=Held(),
        blocks=("layers.0.mix", "layers.0.norm", "layers.1.mix", "layers.1.norm"),
        rules=lambda _: [
            *_column("layers.*.mix", "up", bias=True),
            *_row("layers.*.mix", "down", hidden="replicate", bias=True),
        ],
    )


def by_hand(batch: int) -> Example:
    """Layers that compute attention themselves, step by step, without a module around it."""
    model = OwnModel(ByHand, hidden=32, heads=4, vocabulary=VOCABULARY)
    return replace(llama_with_labels(batch), module=model, blocks=("layers.0", "layers.1"))


def torchs_attention(batch: int) -> Example:
    """Attention is `nn.MultiheadAttention`, its weights asked for, as where nobody thinks of `need_weights`."""
    model = OwnModel(TorchAttention, hidden=32, heads=4, vocabulary=VOCABULARY)
    return replace(llama_with_labels(batch), module=model, blocks=("layers.0", "layers.1"))


def beside(batch: int) -> Example:
    return replace(mlp(batch), module=Beside())


EXAMPLES: dict[str, Callable[[int], Example]] = {
    f.__name__: f
    for f in (
        llama,
        llama_with_labels,
        qwen3,
        gpt2,
        vit,
        mlp,
        resnet,
        without_rules,
        entering,
        spectral,
        recurrent,
        beside,
        held,
        by_hand,
        torchs_attention,
    )
}
