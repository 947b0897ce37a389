"""Examples of the arguments of transformers models, by the names that their `forward` gives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoparallel.planner.capture.errors import ModelError

# The sequence length where neither the user nor the model says one (kind: chosen).
DEFAULT_SEQ_LEN = 4096
USUAL_IMAGE_SIZE = 224  # pixels. Kind: chosen. Source: the usual crop of ImageNet
USUAL_SIZES = (512, 560)  # pixels, where windows of patches of 16 or 14 are to fit. Kind: chosen
USUAL_BANDS = (80, 128)  # of sound. Kind: chosen. Source: what Whisper's models are fed
USUAL_FRAMES = (
    1024  # of sound, 10 ms each. Kind: chosen. Source: the ten seconds that speech is usually cut into
)
USUAL_SOUND = (
    48_000  # samples: two seconds at 24 kHz. Kind: chosen; codecs of sound cut it into frames of many lengths
)
USUAL_REGIONS = (
    36  # of an image, found by a detector. Kind: chosen. Source: bottom-up attention's regions a picture
)

# Samples in the example inputs. Capture chooses its own batch sizes.
SAMPLES = 2


@dataclass(frozen=True, slots=True)
class Model:
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


def _default_length(config: Any) -> int:
    for key in ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len"):
        length = getattr(config, key, None)
        if isinstance(length, int) and length > 0:
            return min(length, DEFAULT_SEQ_LEN)
    return DEFAULT_SEQ_LEN


def tokens(model: Model) -> torch.Tensor:
    """A text as long as asked for, or as the model takes."""
    _check_length(model)
    row = torch.arange(model.length) % max(getattr(model.text, "vocab_size", None) or model.length, 1)
    return row.expand(SAMPLES, model.length).contiguous()


def _check_length(model: Model) -> None:
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


def image(model: Model) -> torch.Tensor:
    """Of the model's own size; convolutional ones have none and take any. Of a film, all of its frames."""
    size = model.setting("image_size", "crop_size")
    if isinstance(size, int):
        size = (size, size)
    if not (isinstance(size, list | tuple) and len(size) == 2):
        size = (USUAL_IMAGE_SIZE, USUAL_IMAGE_SIZE)
    channels = model.setting("num_channels", "in_channels", "in_chans") or 3
    frames = (model.config.num_frames,) if hasattr(model.config, "num_frames") else ()
    return _floats(model, *frames, channels, int(size[0]), int(size[1]))


def _first_width(module: torch.nn.Module, kinds: tuple[type, ...]) -> int | None:
    """How many numbers the first layer of these kinds reads at a place: bands of sound, values of a patch."""
    for part in module.modules():
        if isinstance(part, kinds):
            weight = part.get_parameter("weight")
            return int(weight.shape[1] if weight.dim() < 4 else weight[0].numel())
    return None


def _bands(model: Model) -> int:
    bands = model.setting("input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins", "n_mels")
    bands = bands or _first_width(model.module, (torch.nn.Linear, torch.nn.Conv1d))
    if bands is None:
        raise ModelError(
            f"{model.file}: how many bands the sound has that {type(model.module).__name__} is fed is not known; build "
            "it in a file of your own and pass FILE.py:NAME"
        )
    return int(bands)


def _spectrum(model: Model) -> torch.Tensor:
    """Sound as bands over time, or time over bands where no convolution over time comes first."""
    frames, bands = model.setting("max_source_positions"), model.setting("num_mel_bins")
    if frames is not None and bands is not None:
        return _floats(model, bands, 2 * frames)  # the second convolution halves the frames
    return _floats(model, model.seq_len or frames or USUAL_FRAMES, _bands(model))


def _spectrum_of(model: Model, *, bands_first: bool, learned: bool) -> torch.Tensor:
    """Sound in the other order, or in as many bands as the first layer reads."""
    bands = _first_width(model.module, (torch.nn.Linear, torch.nn.Conv1d)) if learned else None
    bands = bands or _bands(model)
    frames = 2 * (model.setting("max_source_positions") or USUAL_FRAMES // 2)
    return _floats(model, *((bands, frames) if bands_first else (frames, bands)))


def _sound(model: Model) -> torch.Tensor:
    """Sound as it is recorded: as many samples as the convolutions turn into the frames asked for."""
    if (bands := model.setting("num_mel_bins")) is not None:
        return _floats(model, model.setting("max_length") or USUAL_FRAMES, bands)
    strides = model.setting("conv_stride")
    factor = math.prod(strides) if strides else 1
    return _floats(model, (model.seq_len or USUAL_FRAMES) * factor)


def _series(model: Model, length: int, *, channels: str = "") -> torch.Tensor:
    """Numbers over time; of several series at once, side by side."""
    width = getattr(model.config, channels, 1) if channels else (model.setting("num_input_channels") or 1)
    many = channels or width > 1 or hasattr(model.config, "num_input_channels")
    return _floats(model, length, *((width,) if many else ()))


def _past(model: Model) -> int:
    return int(model.setting("context_length") or model.length) + int(
        max(model.setting("lags_sequence") or [0])
    )


def _future(model: Model) -> int:
    return int(model.setting("prediction_length", "horizon_length") or 1)


def _floats(model: Model, *shape: int) -> torch.Tensor:
    dtype = next(p.dtype for p in model.module.parameters() if p.is_floating_point())
    return torch.empty((SAMPLES, *shape), dtype=dtype, device="meta")


MAKERS: dict[str, Callable[[Model], torch.Tensor]] = {
    "input_ids": tokens,
    "decoder_input_ids": tokens,
    "pixel_values": image,
    "pixel_values_videos": image,
    "input_features": _spectrum,
    "input_values": _sound,
    "past_values": lambda model: _series(model, _past(model)),
    "past_observed_mask": lambda model: torch.ones_like(_series(model, _past(model))),
    "future_values": lambda model: _series(model, _future(model)),
    "past_time_features": lambda model: _series(model, _past(model), channels="num_time_features"),
    "future_time_features": lambda model: _series(model, _future(model), channels="num_time_features"),
}


# -- what goes with an argument that is given -----------------------------------------------------------------------

Inputs = Mapping[str, Any]
_WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim")


def _width(model: Model) -> int:
    return int(next((w for key in _WIDTHS if (w := getattr(model.text, key, None)) is not None), 0)) or 1


def _ones(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int64)


def _over_time(given: Inputs) -> torch.Tensor:
    """A mask over the frames of sound: its longer dim, the bands are the other."""
    known = ("input_features", "input_values", "inputs_embeds", "input_ids")
    timed = next((given[name] for name in (*known, *given) if name in given), None)
    return _ones((SAMPLES, max(timed.shape[1:3]) if timed is not None and timed.dim() > 1 else 1))


def _over_sound(given: Inputs) -> torch.Tensor:
    sound = given.get("input_values", given.get("input_features"))
    return _ones((SAMPLES, 1 if sound is None else sound.shape[-1]))


def _like_tokens(model: Model, given: Inputs) -> torch.Tensor:
    ids = given.get("input_ids")
    return torch.zeros(ids.shape if ids is not None else (SAMPLES, model.length), dtype=torch.int64)


def _embedded(model: Model, length: int | None = None, width: int | None = None) -> torch.Tensor:
    return _floats(model, length or model.length, width or _width(model))


# -- patches that are cut out of images before --------------------------------------------------------------------

GRIDS = ("grid_thw", "image_grid_thw")  # of an image: frames, rows and columns of patches
_SIDE = (
    16  # rows and columns. Kind: chosen; 224 pixels in patches of 14, and even as often as patches are merged
)
_PATCHES = ("hidden_states", "pixel_values")


def patches(model: Model, _: Inputs) -> torch.Tensor:
    """Patches of one image a sample, flattened."""
    kinds = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d)
    towers = [part for name, part in model.module.named_children() if "visi" in name or "visual" in name]
    inside = [
        part
        for name, part in model.module.named_modules()
        if name.rpartition(".")[2] in ("visual", "vision_tower", "vision_model")
    ]
    tower = next(iter((*towers, *inside)), model.module)
    first = next((part for part in tower.modules() if isinstance(part, kinds)), None)
    width = 1 if first is None else int(first.get_parameter("weight")[0].numel())
    return _floats(model, _SIDE * _SIDE, width)


def grid(_: Model, __: Inputs) -> torch.Tensor:
    """Rows and columns of the patches of one image a sample."""
    return torch.tensor([[1, _SIDE, _SIDE]]).repeat(SAMPLES, 1)


def in_one_row(module: torch.nn.Module) -> None:
    """Let a module that is fed the patches of all images in one row take them sample by sample, batch first."""

    def flatten(_: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not any(name in kwargs for name in GRIDS):
            return None
        found = {n: kwargs[n].flatten(0, 1) for n in _PATCHES if n in kwargs and kwargs[n].dim() == 3}
        return (args, kwargs | found) if found else None

    module.register_forward_pre_hook(flatten, with_kwargs=True)


Example = Callable[[Model, Inputs], Any]
# Further examples of an argument: other shapes of those above, and what the code of a model may ask for besides.
OTHERS: dict[str, tuple[Example, ...]] = {
    "input_ids": (lambda model, _: tokens(model),),
    "decoder_input_ids": (lambda model, _: tokens(model),),
    "pixel_values": (
        lambda model, _: image(model),
        lambda model, _: _floats(model, *image(model).shape[-3:]),
        lambda model, _: image(model).unsqueeze(1),
        lambda model, _: _floats(model, int(model.setting("num_frames")), *image(model).shape[-3:]),
        *(
            lambda model, _, size=size: _floats(model, image(model).shape[-3], size, size)
            for size in USUAL_SIZES
        ),
    ),
    "target_sizes": (lambda model, given: _places_of(model, given),),
    "spatial_shapes": (lambda model, given: _places_of(model, given),),
    "image_sizes": (lambda _, given: torch.tensor(given["pixel_values"].shape[-2:]).repeat(SAMPLES, 1),),
    "image_attention_mask": (lambda model, given: _like_tokens(model, given)[..., None] + 1,),
    "input_features": (
        lambda model, _: _spectrum(model),
        *(
            lambda model, _, first=first, learned=learned: _spectrum_of(
                model, bands_first=first, learned=learned
            )
            for learned in (False, True)
            for first in (False, True)
        ),
        *(lambda model, _, bands=bands: _floats(model, USUAL_FRAMES, bands) for bands in USUAL_BANDS),
    ),
    "input_values": (
        lambda model, _: _sound(model),
        lambda model, _: _floats(model, 1, USUAL_SOUND),
        lambda model, _: _floats(model, USUAL_SOUND),
        lambda model, _: _spectrum_of(model, bands_first=True, learned=True),
        lambda model, _: _spectrum_of(model, bands_first=False, learned=True),
    ),
    "attention_mask": (lambda _, given: _over_time(given),),
    "input_features_mask": (lambda _, given: _over_time(given),),
    "feature_attention_mask": (lambda _, given: _over_time(given),),
    "features_mask": (lambda _, given: _over_time(given),),
    "padding_mask": (lambda _, given: _over_sound(given),),
    "pixel_mask": (lambda _, given: _ones((SAMPLES, *given["pixel_values"].shape[-2:])),),
    "pixel_attention_mask": (lambda _, given: _ones((SAMPLES, *given["pixel_values"].shape[-2:])),),
    "token_type_ids": (_like_tokens,),
    "mm_token_type_ids": (_like_tokens,),
    "bbox": (
        lambda model, given: _like_tokens(model, given)[..., None].expand(-1, -1, 4).contiguous(),
        lambda model, _: _floats(model, model.length, 4),
        lambda model, _: _floats(model, model.length, 8),
    ),
    "inputs_embeds": (lambda model, _: _embedded(model),),
    "hidden_states": (lambda model, _: _embedded(model), lambda model, _: _convolved(model)),
    "encoder_hidden_states": (lambda model, _: _embedded(model),),
    "query_embeds": (lambda model, _: _embedded(model, model.setting("num_query_tokens") or 32),),
    "latents": (lambda model, _: _floats(model, _width(model), USUAL_FRAMES),),
    "visual_feats": (lambda model, _: _embedded(model, USUAL_REGIONS, model.setting("visual_feat_dim")),),
    "visual_pos": (lambda model, _: _embedded(model, USUAL_REGIONS, model.setting("visual_pos_dim") or 4),),
    "visual_embeds": (
        lambda model, _: _embedded(model, USUAL_REGIONS, model.setting("visual_embedding_dim")),
    ),
    "states": (lambda model, _: _embedded(model, USUAL_REGIONS, model.setting("state_dim")),),
    "state": (lambda model, _: _floats(model, model.setting("max_state_dim", "state_dim") or 32),),
    "actions": (lambda model, _: _embedded(model, USUAL_REGIONS, model.setting("act_dim")),),
    "rewards": (lambda model, _: _embedded(model, USUAL_REGIONS, 1),),
    "returns_to_go": (lambda model, _: _embedded(model, USUAL_REGIONS, 1),),
    "timesteps": (lambda _, __: torch.arange(USUAL_REGIONS).expand(SAMPLES, -1).contiguous(),),
    "inputs": (lambda model, _: tokens(model), lambda model, _: _embedded(model)),
    "qformer_input_ids": (lambda model, _: tokens(model)[:, :USUAL_REGIONS].contiguous(),),
    "bool_masked_pos": (lambda model, given: _patches_of(model, given),),
    "flattened_patches": (
        lambda model, _: _flat_patches(model, 0),
        lambda model, _: _flat_patches(model, 2),
    ),
    **dict.fromkeys(GRIDS, (grid,)),
    "noise_embeds": (lambda model, _: _embedded(model),),
}


def _convolved(model: Model) -> torch.Tensor:
    """Channels over time, as many as the first convolution reads."""
    channels = _first_width(model.module, (torch.nn.Conv1d,)) or 1
    return _floats(model, channels, USUAL_SOUND if channels == 1 else USUAL_FRAMES)


def _flat_patches(model: Model, places: int) -> torch.Tensor:
    """Patches cut out before, of which the first `places` numbers say where they were."""
    width = _first_width(model.module, (torch.nn.Linear,)) or 1
    return _floats(model, model.setting("seq_len") or DEFAULT_SEQ_LEN // 2, width + places)


def _places_of(model: Model, given: Inputs) -> torch.Tensor:
    """Rows and columns of the patches of each image."""
    patch = int(model.setting("patch_size") or 16)
    return torch.tensor([int(size) // patch for size in given["pixel_values"].shape[-2:]]).repeat(SAMPLES, 1)


def _patches_of(model: Model, given: Inputs) -> torch.Tensor:
    rows, columns = _places_of(model, given)[0].tolist()
    return torch.zeros((SAMPLES, rows * columns), dtype=torch.bool)
