"""Draws a model: a dozen families at sizes that people train, described without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.random_problems.sizes import Body, body, key_value_heads, log_uniform, rounded

VOCABULARIES = (32000, 32064, 50304, 65536, 100352, 128256, 151936)
LENGTHS = (512, 1024, 2048, 2048, 4096, 4096, 4096, 8192, 8192, 16384, 32768)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A drawn model: a Hugging Face config, or a function of `zoo.py` and its arguments."""

    family: str
    size: str  # for people
    settings: dict[str, Any]  # {"hf": config} or {"zoo": name, "args": {…}}
    seq_len: int | None = None
    samples: tuple[float, float] = (0.25, 32.0)  # a device and step: least and most drawn
    heads: int = 0  # that tensor parallelism must divide; 0: none

    @property
    def told(self) -> str:
        length = f" s{self.seq_len}" if self.seq_len else ""
        return f"{self.family} {self.size}{length}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to draw one, between so many parameters, and how many of them a device has at least."""

    least: float
    most: float
    draw: Callable[[Random, float], Model]
    per_device: float = 1e6
    weight: int = 4


def draw_model(rng: Random, devices: int, memory_bytes: float) -> Model:
    """A model that so many devices may train: its state would fit between a thousandth of and all of their memory."""
    while True:
        name = rng.choices(list(FAMILIES), [family.weight for family in FAMILIES.values()])[0]
        family = FAMILIES[name]
        most = min(family.most, memory_bytes * 1.1 / 16)
        least = max(family.least, devices * family.per_device, memory_bytes / 16 / 1000)
        if least < most:
            return family.draw(rng, log_uniform(rng, least, most))
        if rng.random() < 0.02:  # so many devices that nobody has a model for them: the largest of the family
            return family.draw(rng, family.most)


def _billions(parameters: float) -> str:
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def _size(parameters: float, stack: Body) -> str:
    return f"{_billions(parameters)} d{stack.hidden} L{stack.layers}"


def _length(rng: Random, parameters: float) -> int:
    return rng.choice(LENGTHS[: 8 if parameters < 1e9 else len(LENGTHS)])


def _causal(
    architecture: str, kind: str, rng: Random, parameters: float, per_layer: float
) -> tuple[dict[str, Any], Body]:
    """What the configs of all Llama-like models share."""
    stack = body(rng, parameters, per_layer=per_layer)
    config = {
        "architectures": [architecture], "model_type": kind, "hidden_size": stack.hidden,
        "num_attention_heads": stack.heads, "num_key_value_heads": key_value_heads(rng, stack.heads),
        "num_hidden_layers": stack.layers, "head_dim": stack.hidden // stack.heads,
        "vocab_size": rng.choice(VOCABULARIES), "max_position_embeddings": 131072,
        "tie_word_embeddings": parameters < 3e9 and rng.random() < 0.5, "torch_dtype": "bfloat16",
    }  # fmt: skip
    return config, stack


def _llama(rng: Random, parameters: float) -> Model:
    kind = rng.choice(
        (("LlamaForCausalLM", "llama"), ("Qwen2ForCausalLM", "qwen2"), ("MistralForCausalLM", "mistral"))
    )
    config, stack = _causal(*kind, rng, parameters, 12.0)
    config |= {
        "intermediate_size": rounded(stack.hidden * rng.uniform(2.5, 4.0), 256),
        "sliding_window": None,
    }
    return Model(
        family="llama", size=_size(parameters, stack), settings={"hf": config}, seq_len=_length(rng, parameters),
        heads=int(config["num_key_value_heads"]),
    )  # fmt: skip


def _gpt2(rng: Random, parameters: float) -> Model:
    stack, length = body(rng, parameters), rng.choice((512, 1024, 1024, 2048, 2048))
    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": stack.hidden, "n_head": stack.heads,
        "n_layer": stack.layers, "n_positions": length, "vocab_size": 50257, "attn_pdrop": 0.1,
    }  # fmt: skip
    return Model(
        family="gpt2", size=_size(parameters, stack), settings={"hf": config}, seq_len=length, heads=stack.heads,
        samples=(0.5, 64),
    )  # fmt: skip


def _gemma(rng: Random, parameters: float) -> Model:
    config, stack = _causal("Gemma2ForCausalLM", "gemma2", rng, parameters, 14.0)
    config |= {
        "intermediate_size": rounded(stack.hidden * 4, 256), "vocab_size": 256000, "tie_word_embeddings": True,
        "query_pre_attn_scalar": stack.hidden // stack.heads, "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    }  # fmt: skip
    return Model(
        family="gemma", size=_size(parameters, stack), settings={"hf": config}, seq_len=rng.choice(LENGTHS[1:9]),
        heads=int(config["num_key_value_heads"]),
    )  # fmt: skip


def _mixtral(rng: Random, parameters: float) -> Model:
    experts = rng.choice((4, 8, 8, 8, 16))
    config, stack = _causal("MixtralForCausalLM", "mixtral", rng, parameters, 3.0 + 10.5 * experts)
    config |= {
        "intermediate_size": rounded(stack.hidden * 3.5, 256), "num_local_experts": experts, "sliding_window": None,
        "num_experts_per_tok": rng.choice((1, 2, 2)), "output_router_logits": False, "router_aux_loss_coef": 0.02,
    }  # fmt: skip
    return Model(
        family="mixtral", size=f"{_size(parameters, stack)} E{experts}", settings={"hf": config},
        seq_len=_length(rng, parameters), heads=int(config["num_key_value_heads"]),
    )  # fmt: skip


def _qwen_experts(rng: Random, parameters: float) -> Model:
    """Layers with experts and dense ones in turn, or experts everywhere."""
    experts = rng.choice((32, 64, 128))
    config, stack = _causal("Qwen3MoeForCausalLM", "qwen3_moe", rng, parameters, 3.0 + 1.1 * experts)
    step = rng.choice((1, 1, 2))
    config |= {
        "intermediate_size": rounded(stack.hidden * 3, 256), "moe_intermediate_size": rounded(stack.hidden * 0.37, 128),
        "num_experts": experts, "num_experts_per_tok": rng.choice((4, 8)), "decoder_sparse_step": step, "mlp_only_layers": [],
        "norm_topk_prob": True,
    }  # fmt: skip
    return Model(
        family="qwen-moe", size=f"{_size(parameters, stack)} E{experts}/{step}", settings={"hf": config},
        seq_len=_length(rng, parameters), heads=int(config["num_key_value_heads"]),
    )  # fmt: skip


def _deepseek(rng: Random, parameters: float) -> Model:
    experts = rng.choice((16, 32, 64, 128, 256) if parameters > 3e10 else (8, 16, 32, 64))
    stack = body(rng, parameters, per_layer=4.0 + 0.9 * experts, head=128, most_layers=80)
    dense = min(rng.choice((1, 1, 2, 3)), stack.layers - 1)
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": stack.hidden,
        "num_attention_heads": stack.heads, "num_key_value_heads": stack.heads, "num_hidden_layers": stack.layers,
        "first_k_dense_replace": dense, "intermediate_size": rounded(stack.hidden * 2.6, 256), "kv_lora_rank": 512,
        "moe_intermediate_size": rounded(stack.hidden * 0.29, 128), "n_group": 4, "topk_group": 2, "n_routed_experts": experts,
        "n_shared_experts": 1, "num_experts_per_tok": rng.choice((2, 4, 6)), "q_lora_rank": rng.choice((1024, 1536)),
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": rng.choice((102400, 129280)),
        "max_position_embeddings": 163840, "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    return Model(
        family="deepseek", size=f"{_size(parameters, stack)} E{experts}", settings={"hf": config},
        seq_len=rng.choice((2048, 4096, 4096, 8192)), heads=stack.heads,
    )  # fmt: skip


def _bert(rng: Random, parameters: float) -> Model:
    stack, length = body(rng, parameters), rng.choice((128, 256, 512, 512))
    config = {
        "architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": stack.hidden,
        "intermediate_size": 4 * stack.hidden, "num_attention_heads": stack.heads, "num_hidden_layers": stack.layers,
        "max_position_embeddings": 512, "vocab_size": 30522, "type_vocab_size": 2,
    }  # fmt: skip
    return Model(
        family="bert", size=_size(parameters, stack), settings={"hf": config}, seq_len=length, heads=stack.heads,
        samples=(2, 256),
    )  # fmt: skip


def _t5(rng: Random, parameters: float) -> Model:
    """An encoder and a decoder, not always as deep, sometimes with wide feed-forward layers."""
    wide = rng.choice((4, 4, 4, 16, 64) if parameters > 5e8 else (4, 4, 2.5))
    stack = body(rng, parameters, per_layer=6.0 + 2.0 * wide, head=64)
    decoder = max(2, round(stack.layers / 2 * rng.choice((1.0, 1.0, 1.0, 0.5))))
    config = {
        "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": stack.hidden, "d_kv": 64,
        "d_ff": rounded(stack.hidden * wide, 64), "num_layers": max(2, stack.layers // 2), "num_decoder_layers": decoder,
        "num_heads": stack.heads, "vocab_size": 32128, "n_positions": 512, "is_encoder_decoder": True,
        "feed_forward_proj": rng.choice(("relu", "gated-gelu")), "decoder_start_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    return Model(
        family="t5", size=f"{_size(parameters, stack)} x{wide:g}", settings={"hf": config},
        seq_len=rng.choice((256, 512, 512, 1024)), heads=stack.heads, samples=(1, 128),
    )  # fmt: skip


def _vit(rng: Random, parameters: float) -> Model:
    stack, patch = body(rng, parameters), rng.choice((14, 16, 16, 32))
    image = rng.choice([pixels for pixels in (192, 224, 224, 224, 256, 336, 384, 448) if pixels % patch == 0])
    config = {
        "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": stack.hidden,
        "intermediate_size": 4 * stack.hidden, "num_attention_heads": stack.heads, "num_hidden_layers": stack.layers,
        "image_size": image, "patch_size": patch, "num_channels": 3, "qkv_bias": True,
    }  # fmt: skip
    return Model(
        family="vit", size=f"{_size(parameters, stack)} {image}px/{patch}", settings={"hf": config}, heads=stack.heads,
        samples=(4, 512),
    )  # fmt: skip


def _whisper(rng: Random, parameters: float) -> Model:
    stack = body(rng, parameters, per_layer=14.0, head=64, most_layers=80)
    encoder = max(2, stack.layers // 2)
    decoder = rng.choice((encoder, encoder, max(2, encoder // 4)))  # as deep, or distilled
    config = {
        "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": stack.hidden,
        "encoder_layers": encoder, "decoder_layers": decoder, "encoder_attention_heads": stack.heads,
        "decoder_attention_heads": stack.heads, "encoder_ffn_dim": 4 * stack.hidden, "decoder_ffn_dim": 4 * stack.hidden,
        "num_mel_bins": rng.choice((80, 128)), "max_source_positions": 1500, "max_target_positions": 448, "vocab_size": 51865,
        "num_hidden_layers": encoder, "is_encoder_decoder": True, "decoder_start_token_id": 50258, "pad_token_id": 50257,
        "dropout": 0.0,
    }  # fmt: skip
    return Model(
        family="whisper",
        size=_size(parameters, stack),
        settings={"hf": config},
        heads=stack.heads,
        samples=(1, 64),
    )


def _convnet(rng: Random, parameters: float) -> Model:
    layers = rng.choice(((2, 2, 2, 2), (3, 4, 6, 3), (3, 4, 6, 3), (3, 4, 23, 3), (3, 8, 36, 3)))
    width = min(512, rounded((parameters / 25e6 * 16 / sum(layers)) ** 0.5 * 64, 16))
    image = rng.choice((160, 224, 224, 288))
    return Model(
        family="convnet", size=f"{_billions(parameters)} {sum(layers)} blocks w{width} {image}px",
        settings={"zoo": "convnet", "args": {"layers": list(layers), "width": width, "image_size": image}}, samples=(8, 512),
    )  # fmt: skip


def _recommender(rng: Random, parameters: float) -> Model:
    tables, dim = rng.choice((8, 16, 26, 26, 40)), rng.choice((16, 32, 64, 128, 128))
    rows = max(1000, round(parameters / tables / dim))
    top = rng.choice(((512, 256), (1024, 1024, 512, 256), (2048, 2048, 1024), (4096, 4096, 4096, 1024)))
    arguments = {"tables": tables, "rows": rows, "dim": dim, "top": list(top)}
    return Model(
        family="recommender", size=f"{_billions(parameters)} {tables} tables of {rows}x{dim}",
        settings={"zoo": "recommender", "args": arguments}, samples=(64, 8192),
    )  # fmt: skip


def _mlp(rng: Random, parameters: float) -> Model:
    depth = rng.choice((2, 4, 8, 8, 16, 32, 64))
    width = rounded((parameters / depth) ** 0.5, 64)
    arguments = {"features": rng.choice((784, 1024, 4096)), "width": width, "depth": depth, "classes": 1000}
    return Model(
        family="mlp", size=f"{_billions(parameters)} w{width} L{depth}", settings={"zoo": "mlp", "args": arguments},
        samples=(16, 4096),
    )  # fmt: skip


def _tapered(rng: Random, parameters: float) -> Model:
    """A language model whose layers grow wider from the first to the last (OpenELM)."""
    stack = body(rng, parameters, per_layer=10.0)
    least, kinds = rng.choice((0.5, 1.0, 2.0)), min(stack.layers, rng.choice((2, 3, 4, 8)))
    widths = [rounded(stack.hidden * (least + (4.0 - least) * i / (kinds - 1)), 128) for i in range(kinds)]
    length = rng.choice(LENGTHS[:7])
    arguments = {
        "hidden": stack.hidden, "heads": stack.heads, "vocabulary": rng.choice(VOCABULARIES), "seq_len": length,
        "widths": [widths[i * kinds // stack.layers] for i in range(stack.layers)],
    }  # fmt: skip
    return Model(
        family="tapered", size=f"{_size(parameters, stack)} of {kinds} kinds",
        settings={"zoo": "tapered", "args": arguments}, seq_len=length, heads=stack.heads,
    )  # fmt: skip


FAMILIES: dict[str, Family] = {
    "llama": Family(least=1e8, most=5e11, draw=_llama, weight=8),
    "gpt2": Family(least=1e8, most=2e11, draw=_gpt2),
    "gemma": Family(least=1e9, most=6e10, draw=_gemma),
    "mixtral": Family(least=1e9, most=3e11, draw=_mixtral),
    "qwen-moe": Family(least=2e9, most=4e11, draw=_qwen_experts, weight=3),
    "deepseek": Family(least=3e9, most=7e11, draw=_deepseek),
    "bert": Family(least=3e7, most=4e9, draw=_bert, per_device=5e5),
    "t5": Family(least=6e7, most=4e10, draw=_t5),
    "vit": Family(least=2e7, most=2e10, draw=_vit, per_device=3e5),
    "whisper": Family(least=4e7, most=5e9, draw=_whisper, per_device=3e5),
    "convnet": Family(least=1e7, most=1e9, draw=_convnet, per_device=5e4),
    "recommender": Family(least=1e7, most=1e11, draw=_recommender, per_device=1e5),
    "mlp": Family(least=1e6, most=4e10, draw=_mlp, per_device=1e5),
    "tapered": Family(least=1e8, most=7e10, draw=_tapered),
}
