"""Which models are tried, and how a small one is made of each."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.coverage import libraries

# Tables of transformers, in the order in which a class is chosen: what is trained before what is only a part.
TASKS = (
    "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "MASKED_LM", "CTC",
    "PRETRAINING", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION", "OBJECT_DETECTION",
    "ZERO_SHOT_OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION", "SEMANTIC_SEGMENTATION",
    "MASK_GENERATION", "DEPTH_ESTIMATION", "KEYPOINT_DETECTION", "TIME_SERIES_PREDICTION", "SEQUENCE_CLASSIFICATION",
    "MASKED_IMAGE_MODELING", "IMAGE_TO_IMAGE", "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM",
)  # fmt: skip

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model: where it comes from, what it is called there, and the class that is trained."""

    library: str
    name: str
    architecture: str

    @property
    def key(self) -> str:
        return f"{self.library}:{self.name}"


def transformers_entries() -> Iterator[Entry]:
    """One class of every model type of transformers; of types that share a class the one that it is called after."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    tables = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS]
    tables.append(modeling_auto.MODEL_MAPPING_NAMES)
    kinds: dict[str, list[str]] = {}
    for kind in sorted(CONFIG_MAPPING_NAMES):
        found = next((table[kind] for table in tables if kind in table), None)
        if found is not None:
            kinds.setdefault(found if isinstance(found, str) else found[0], []).append(kind)
    for name, sharing in sorted(kinds.items()):
        own = [kind for kind in sharing if name.lower().startswith(re.sub("[^a-z0-9]", "", kind.lower()))]
        yield Entry(library="transformers", name=max(own or sharing, key=len), architecture=name)


def default_settings(entry: Entry) -> Settings:
    """The `config.json` of an architecture with the settings that transformers gives it."""
    return {"model_type": entry.name, "architectures": [entry.architecture]}


# -- small ones ----------------------------------------------------------------------------------------------------

_DEPTH = re.compile(
    r"(^|_)(num_\w*layers|n_layers?|num_blocks|n_blocks|layers|depth|num_\w*hidden_layers)$|^num_layers"
)
_HEADS = re.compile(r"heads?$|^n_head|num_key_value|num_kv|n_groups$|mamba_n_heads")
_WIDTH = re.compile(
    r"(hidden|embed\w*|inter\w*|ffn|feed_forward|proj\w*|head|rnn|lru|state|conv|expert|mlp|fpn|mask_feature|text|vision|"
    r"decoder|encoder|attention|pooler|word|kv|model|bottleneck|neck)_?(\w*)(size|dims?|width|channels|rank)$|"
    r"^(d_\w+|n_embd|n_inner|dim|hidden_dim|width|\w+_lora_rank|embed_dims?|q_dim|\w+_ffn_dim|\w+_mlp_dim)$|_ffn_dim$"
)
_KEPT = re.compile(
    r"vocab|kernel|image|patch|window|chunk|max_|rope|rotary|conv_dim$|position|token|_id$|stride|frame"
)
_DROPPED = re.compile(r"drop(out|_path|_rate|$)|layerdrop|_dropout|stochastic")
_EXPERTS = re.compile(r"^(moe_)?(num|n)_(\w*_)?experts$")
_VOCABULARY = re.compile(r"vocab(_size)?$")
_TOKEN = re.compile(r"_token_(id|index)s?$|^image_token")
_STAGE = re.compile(r"^stage(\d+)$")
_DEPTH_LEFT, _LEAST, _EXPERTS_LEFT = 4, 8, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Smaller:
    """How much smaller: widths and heads by these factors, and vocabularies; whether heads get less wide."""

    widths: int
    heads: int
    vocabulary: int = 1
    head_dim: bool = True


_FACTORS = (
    (16, 4), (8, 8), (8, 4), (8, 2), (4, 4), (4, 2), (8, 1), (4, 1), (2, 2), (2, 1), (1, 1),
)  # fmt: skip
# What is tried, smallest first: a model is not always built with as many heads as it likes, nor with any width of one,
# which may be parted between dimensions. Tokens have special numbers, which a small vocabulary does not have.
SIZES = tuple(
    Smaller(widths=widths, heads=heads, vocabulary=vocabulary, head_dim=head_dim)
    for vocabulary in (1, 32)
    for head_dim in (True, False)
    for widths, heads in _FACTORS
)


def full_settings(entry: Entry) -> Settings:
    """Every setting of an architecture, spelled out."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(entry.name)
    settings: Settings = json.loads(config.to_json_string(use_diff=False))
    return settings | default_settings(entry)


def smaller(settings: Settings, by: Smaller) -> Settings:
    """The same model with four layers of each kind, less wide by a factor, and without dropout."""
    out = copy.deepcopy(settings)
    depths = {v for k, v in settings.items() if isinstance(v, int) and _DEPTH.search(k) and v > _DEPTH_LEFT}
    for key, value in settings.items():
        if key == "per_layer_config" and value:  # by the layer's number: the last one is unlike the others
            out[key] = {str(_DEPTH_LEFT - 1): smaller(next(iter(value.values())), by)}
        elif isinstance(value, dict) and key != "rope_parameters" and "label" not in key:
            out[key] = smaller(value, by)
        elif _DROPPED.search(key) and isinstance(value, int | float) and not isinstance(value, bool):
            out[key] = type(value)(0)
        elif isinstance(value, list) and len(value) in depths and key != "architectures":
            out[key] = value[:_DEPTH_LEFT]
        elif key == "out_features" and isinstance(value, list):
            out[key] = _stages(value)
        elif key == "out_indices":
            out[key] = None
        elif isinstance(value, int) and not isinstance(value, bool):
            out[key] = _number(key, value, by)
        elif isinstance(value, list) and value and all(type(v) is int for v in value):
            out[key] = [_number(key.rstrip("s"), v, by) for v in value] if not _DEPTH.search(key) else value
        if key == "depths" and isinstance(value, list):
            out[key] = [min(v, 2) for v in value]
    return out


def _stages(names: list[str]) -> list[str]:
    """As many stages of a backbone, of those that are left of it."""
    numbers = [int(found[1]) for name in names if (found := _STAGE.match(name))]
    if len(numbers) < len(names) or max(numbers, default=0) <= _DEPTH_LEFT:
        return names
    return [f"stage{number + 1}" for number in range(max(_DEPTH_LEFT - len(names), 0), _DEPTH_LEFT)]


def _number(key: str, value: int, by: Smaller) -> int:
    if _TOKEN.search(key) and by.vocabulary > 1:
        return value % 997
    if _VOCABULARY.search(key):
        return max(value // by.vocabulary, 1024) if value > 1024 else value
    if _EXPERTS.search(key):
        return min(value, _EXPERTS_LEFT)
    if key == "head_dim" and not by.head_dim:
        return value
    if _DEPTH.search(key):
        return min(value, _DEPTH_LEFT)
    if _KEPT.search(key):
        return value
    if _HEADS.search(key) and not key.endswith("dim"):
        return max(value // by.heads, 1) if value % by.heads == 0 else value
    if _WIDTH.search(key) and value % by.widths == 0 and value // by.widths >= _LEAST:
        return value // by.widths
    return value


def loaded(entry: Entry) -> tuple[Any, Any]:
    """The module as its library builds it, on the meta device, with its example inputs."""
    if entry.library != "transformers":
        return libraries.make(entry.library, entry.name, device="meta")
    found = load(default_settings(entry), None)
    return found.module, found.example_inputs


def library_entries() -> Iterator[Entry]:
    """The models of the other libraries, where these are installed."""
    for library, name in libraries.names():
        yield Entry(library=library, name=name, architecture=name)


def load(settings: Settings, seq_len: int | None) -> Any:
    """The module on the meta device with its example inputs, as `hf:` loads it."""
    from autoparallel.planner.capture.load import load_model

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{settings['model_type']}.json"
        path.write_text(json.dumps(settings), encoding="utf-8")
        return load_model(f"hf:{path}", model_args={}, seq_len=seq_len)
