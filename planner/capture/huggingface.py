"""Hugging Face `config.json` files: the architecture they name on the meta device (its inputs: huggingface_inputs)."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autoparallel.planner.capture.errors import ModelError
from autoparallel.planner.capture.huggingface_inputs import example_inputs
from autoparallel.planner.capture.huggingface_model import text_settings
from autoparallel.planner.capture.meta_mode import MetaMode
from autoparallel.planner.capture.on_meta import holds_few, note_values
from autoparallel.planner.capture.placeholders import MEDIA_TOKENS

# For a config without `architectures`: the first of these tables of transformers that knows the model type.
_TASKS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)


def load_huggingface(
    path: Path, seq_len: int | None
) -> tuple[torch.nn.Module, dict[str, Any], str, tuple[str, ...]]:
    """Module, keyword inputs, name and warnings for a `config.json` or the folder that holds it."""
    file = path / "config.json" if path.is_dir() else path
    raw = _read(file)
    config = _config(file, raw)
    module = _build(file, raw, config)
    module.train()
    try:
        inputs = example_inputs(file, module, config, seq_len)
    except (RuntimeError, OverflowError, MemoryError) as error:
        if seq_len is None:
            raise
        reason = str(error).splitlines()[0]
        raise ModelError(f"{file}: no example sequence of {seq_len} tokens can be made: {reason}") from error
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return module, inputs, name, _unquantised(file, raw)


def _unquantised(file: Path, raw: dict[str, Any]) -> tuple[str, ...]:
    """A quantised checkpoint is stored in fewer bits than it is trained in: says which of the two is planned."""
    quantised = raw.get("quantization_config")
    if not quantised:
        return ()
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    return (
        f"{file}: quantization_config ({method or 'no quant_method'}) is left out: planned is training of the "
        "unquantised model, parameters in execution.param_dtype. Adapters on frozen quantised weights (QLoRA) need a "
        "model of your own, as FILE.py:NAME",
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(), object_hook=_infinite)
    except FileNotFoundError as error:
        raise ModelError(
            f"{file}: no such file; give a config.json or the folder that holds it. Nothing is downloaded: of a model "
            "on the Hugging Face Hub fetch its config.json first"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{file}: not a config: expected an object, found {type(raw).__name__}")
    if raw.get("auto_map"):
        raise ModelError(
            f"{file}: auto_map asks for code from a repository, which is never run; load the model in a file of "
            "your own and pass FILE.py:NAME"
        )
    if not isinstance(raw.get("model_type"), str):
        raise ModelError(f"{file}: model_type is missing; is this a Hugging Face config.json?")
    return raw


def _infinite(value: dict[str, Any]) -> Any:
    """Numbers that JSON does not have, as transformers writes them: `{"__float__": "Infinity"}`."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _config(file: Path, raw: dict[str, Any]) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ModelError(
            "hf: models need transformers: pip install 'autoparallel-planner[transformers]'"
        ) from error
    settings = {k: v for k, v in raw.items() if k not in {"model_type", "auto_map", "transformers_version"}}
    try:
        config = AutoConfig.for_model(raw["model_type"], **settings)
    except ValueError as error:
        if "Unrecognized model identifier" not in str(error) and "not a" not in str(error):
            raise ModelError(f"{file}: {error}") from error
        raise ModelError(
            f"{file}: transformers does not know model_type {raw['model_type']!r}; upgrade it, or pass your own "
            "code as FILE.py:NAME"
        ) from error
    except Exception as error:
        raise ModelError(f"{file}: not a valid {raw['model_type']} config: {error}") from error
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.use_cache = False  # a cache of keys and values is for generation
    _name_media_tokens(config)
    if config.is_encoder_decoder:
        # Checkpoints say which token comes first and which fills up; the decoder's inputs are made of labels with them.
        for key in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, key, None) is None:
                setattr(config, key, 0)
    return config


def _name_media_tokens(config: Any) -> None:
    """Checkpoints say which token stands for an image or a sound; where a configuration of its own does not, one of the last
    does."""
    last = getattr(text_settings(config), "vocab_size", None) or 0
    for key in MEDIA_TOKENS:
        if last > 0 and getattr(config, key, 0) is None:
            last -= 1
            setattr(config, key, last)


def _build(file: Path, raw: dict[str, Any], config: Any) -> torch.nn.Module:
    import transformers

    architecture = (raw.get("architectures") or [_architecture(config)])[0]
    known = getattr(transformers, str(architecture), None)
    if not (inspect.isclass(known) and issubclass(known, transformers.PreTrainedModel)):
        raise ModelError(
            f"{file}: architectures: transformers {transformers.__version__} has no {architecture!r}; use one it "
            "has, or pass your own code as FILE.py:NAME"
        )
    try:
        with torch.device("meta"):
            module: torch.nn.Module = known._from_config(config)
        if any(map(_is_setting, module.named_buffers())):
            module = _with_known_buffers(lambda: known._from_config(config))
    except Exception as error:
        raise ModelError(
            f"{file}: {architecture} cannot be built: {type(error).__name__}: {str(error).strip()}"
        ) from error
    return module


def _is_setting(named: tuple[str, torch.Tensor]) -> bool:
    name, buffer = named
    return holds_few(buffer) and not name.endswith("num_batches_tracked")


def _with_known_buffers(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """A module built on the meta device whose buffers of a few integers say what they hold."""
    mode = MetaMode(lambda *_: None)
    with mode:  # which sees what torch.device("meta") puts there out of sight
        module = build()
    for buffer in module.buffers():
        values = mode.known(buffer) if buffer.is_meta and holds_few(buffer) else None
        if values is not None:
            note_values(buffer, values)
    return module


def _architecture(config: Any) -> str | None:
    from transformers.models.auto import modeling_auto

    # Of an encoder and a decoder, the first table has the decoder alone.
    tasks = (*_TASKS[1:], _TASKS[0]) if config.is_encoder_decoder else _TASKS
    for task in tasks:
        found = getattr(modeling_auto, task).get(config.model_type)
        if found:
            return str(found if isinstance(found, str) else found[0])
    return None
