"""Example inputs of a transformers model: what it is made for, by the names that its `forward` gives its arguments."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoparallel.planner.capture.errors import ModelError
from autoparallel.planner.capture.image_tokens import with_images

# The sequence length where neither the user nor the model says one (kind: chosen).
DEFAULT_SEQ_LEN = 4096
USUAL_IMAGE_SIZE = 224  # pixels. Kind: chosen. Source: the usual crop of ImageNet
USUAL_FRAMES = (
    1024  # of sound, 10 ms each. Kind: chosen. Source: the ten seconds that speech is usually cut into
)

# Samples in the example inputs. Capture chooses its own batch sizes.
SAMPLES = 2

# transformers' tables by what a label is given for: one a sample; one a pixel; or of a form of its own (boxes, masks),
# where the outputs are differentiated instead. All others take one a token.
_ONE_A_SAMPLE = (
    "SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "MULTIPLE_CHOICE",
)  # fmt: skip
_ONE_A_PIXEL = ("SEMANTIC_SEGMENTATION",)
_OTHERWISE = ("OBJECT_DETECTION", "INSTANCE_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "DEPTH_ESTIMATION")


@dataclass(frozen=True, slots=True)
class _Model:
    """A module, its settings and the length of its sequences."""

    file: Path
    module: Any
    config: Any
    seq_len: int | None  # as the user asked

    @property
    def text(self) -> Any:
        """The settings of what reads tokens."""
        return self.config.get_text_config()

    @property
    def length(self) -> int:
        return self.seq_len or _default_length(self.text)

    def setting(self, *keys: str) -> Any:
        """The first of these settings that the model, or a part of it, has."""
        parts = [getattr(self.config, name, None) for name in getattr(self.config, "sub_configs", ())]
        for key in keys:
            for config in (self.config, *parts):
                if (value := getattr(config, key, None)) is not None:
                    return value
        return None


def example_inputs(file: Path, module: Any, config: Any, seq_len: int | None) -> dict[str, Any]:
    """Keyword inputs that reach the loss, with labels where `forward` takes them. Raises ModelError where no example
    is known of what the model is fed."""
    model = _Model(file, module, config, seq_len)
    accepted = inspect.signature(module.forward).parameters
    main = module.main_input_name
    needed = [main] if isinstance(main, str) else list(main)
    needed += [n for n, p in accepted.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if "return_loss" in accepted and "pixel_values" in accepted:  # images and texts that belong together
        needed.append("pixel_values")
    if "input_ids" in accepted and "text" in module.input_modalities:
        needed.append("input_ids")
    if "future_values" in accepted:
        needed += [
            name
            for name in accepted
            if name in {"past_time_features", "future_values", "future_time_features"}
        ]
    inputs: dict[str, Any] = {name: _made(model, name) for name in dict.fromkeys(needed)}
    inputs |= {"return_loss": True} if "return_loss" in accepted else {}
    if "labels" in accepted:
        inputs |= _labels(model, inputs)
        if "next_sentence_label" in accepted:
            inputs["next_sentence_label"] = torch.zeros(SAMPLES, dtype=torch.int64)
    elif "input_ids" in inputs and config.is_encoder_decoder:
        inputs["decoder_input_ids"] = _tokens(model)
    if "pixel_values" in accepted and "pixel_values" not in inputs:
        return with_images(module, config, inputs, _image(model))
    return inputs


def _made(model: _Model, name: str) -> torch.Tensor:
    maker = _MAKERS.get(name)
    if maker is None:
        raise ModelError(
            f"{model.file}: {type(model.module).__name__} is fed {name}, for which no example is known; build it in a "
            "file of your own and pass FILE.py:NAME"
        )
    return maker(model)


def _default_length(config: Any) -> int:
    for key in ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len"):
        length = getattr(config, key, None)
        if isinstance(length, int) and length > 0:
            return min(length, DEFAULT_SEQ_LEN)
    return DEFAULT_SEQ_LEN


def _tokens(model: _Model) -> torch.Tensor:
    _check_length(model)
    row = torch.arange(model.length) % max(getattr(model.text, "vocab_size", None) or model.length, 1)
    return row.expand(SAMPLES, model.length).contiguous()


def _check_length(model: _Model) -> None:
    """A learned table of positions bounds the sequence; rotary and relative positions do not."""
    longest = getattr(model.text, "max_position_embeddings", None)
    if longest is None or model.length <= longest:
        return
    for name, part in model.module.named_modules():
        if isinstance(part, torch.nn.Embedding) and part.num_embeddings == longest:
            raise ModelError(
                f"{model.file}: sequence length {model.length} is more than the {longest} positions of {name}; use "
                f"--seq-len {longest} or less, or raise max_position_embeddings"
            )


def _image(model: _Model) -> torch.Tensor:
    """Of the model's own size; convolutional ones have none and take any. Of a film, all of its frames."""
    size = model.setting("image_size", "crop_size")
    if isinstance(size, int):
        size = (size, size)
    if not (isinstance(size, list | tuple) and len(size) == 2):
        size = (USUAL_IMAGE_SIZE, USUAL_IMAGE_SIZE)
    channels = model.setting("num_channels", "in_channels", "in_chans") or 3
    frames = (model.config.num_frames,) if hasattr(model.config, "num_frames") else ()
    return _floats(model, *frames, channels, int(size[0]), int(size[1]))


def _spectrum(model: _Model) -> torch.Tensor:
    """Sound as bands over time, or time over bands where no convolution over time comes first."""
    frames, bands = model.setting("max_source_positions"), model.setting("num_mel_bins")
    if frames is not None and bands is not None:
        return _floats(model, bands, 2 * frames)  # the second convolution halves the frames
    bands = model.setting("input_feat_per_channel", "feature_projection_input_dim") or bands
    if bands is None:
        raise ModelError(
            f"{model.file}: how many bands the sound has that {type(model.module).__name__} is fed is not known; build "
            "it in a file of your own and pass FILE.py:NAME"
        )
    return _floats(model, model.seq_len or frames or USUAL_FRAMES, bands)


def _sound(model: _Model) -> torch.Tensor:
    """Sound as it is recorded: as many samples as the convolutions turn into the frames asked for."""
    if (bands := model.setting("num_mel_bins")) is not None:
        return _floats(model, model.setting("max_length") or USUAL_FRAMES, bands)
    strides = model.setting("conv_stride")
    factor = math.prod(strides) if strides else 1
    return _floats(model, (model.seq_len or USUAL_FRAMES) * factor)


def _series(model: _Model, length: int, *, channels: str = "") -> torch.Tensor:
    """Numbers over time; of several series at once, side by side."""
    width = getattr(model.config, channels, 1) if channels else (model.setting("num_input_channels") or 1)
    many = channels or width > 1 or hasattr(model.config, "num_input_channels")
    return _floats(model, length, *((width,) if many else ()))


def _past(model: _Model) -> int:
    return int(model.setting("context_length") or model.length) + int(
        max(model.setting("lags_sequence") or [0])
    )


def _future(model: _Model) -> int:
    return int(model.setting("prediction_length", "horizon_length") or 1)


_MAKERS: dict[str, Callable[[_Model], torch.Tensor]] = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "pixel_values": _image,
    "pixel_values_videos": _image,
    "input_features": _spectrum,
    "input_values": _sound,
    "past_values": lambda model: _series(model, _past(model)),
    "past_observed_mask": lambda model: torch.ones_like(_series(model, _past(model))),
    "future_values": lambda model: _series(model, _future(model)),
    "past_time_features": lambda model: _series(model, _past(model), channels="num_time_features"),
    "future_time_features": lambda model: _series(model, _future(model), channels="num_time_features"),
}


def _labels(model: _Model, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    name = type(model.module).__name__
    if name in _classes(_OTHERWISE):
        return {}
    if name in _classes(_ONE_A_SAMPLE):
        return {"labels": torch.zeros(SAMPLES, dtype=torch.int64)}
    if name in _classes(_ONE_A_PIXEL):
        return {"labels": torch.zeros((SAMPLES, *inputs["pixel_values"].shape[-2:]), dtype=torch.int64)}
    if "input_ids" in inputs:
        return {"labels": inputs["input_ids"].clone()}
    length = model.seq_len or getattr(model.config, "max_target_positions", None)
    text = _Model(model.file, model.module, model.config, length)
    return {"labels": _tokens(text)}


def _classes(tasks: tuple[str, ...]) -> set[str]:
    """Names of transformers' classes for these tasks."""
    from transformers.models.auto import modeling_auto

    tables = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in tasks]
    return {
        name
        for table in tables
        for found in table.values()
        for name in ([found] if isinstance(found, str) else found)
    }


def _floats(model: _Model, *shape: int) -> torch.Tensor:
    dtype = next(p.dtype for p in model.module.parameters() if p.is_floating_point())
    return torch.empty((SAMPLES, *shape), dtype=dtype, device="meta")
