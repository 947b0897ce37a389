"""Examples of the arguments of transformers models, by the names that their `forward` gives them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from autoparallel.planner.capture.errors import ModelError
from autoparallel.planner.capture.huggingface_images import (
    GRIDS,
    PLACES,
    flat_patches,
    grid,
    image,
    in_a_strip,
    in_patches,
    masked,
    places_in_rows,
    places_of,
    places_of_film,
)
from autoparallel.planner.capture.huggingface_model import (
    SAMPLES,
    Inputs,
    Model,
    first_width,
    floats,
)

USUAL_SIZES = (512, 560)  # pixels, where windows of patches of 16 or 14 are to fit. Kind: chosen
MANY_PATCHES = (
    1536  # pixels, of a model that looks at its image in several sizes. Kind: chosen. Source: Depth Pro
)
USUAL_BANDS = (80, 128)  # of sound. Kind: chosen. Source: what Whisper's models are fed
USUAL_FRAMES = (
    1024  # of sound, 10 ms each. Kind: chosen. Source: the ten seconds that speech is usually cut into
)
LONG_SOUND = (
    3_000  # frames, 10 ms each. Kind: chosen. Source: the thirty seconds that Whisper's models are fed
)
USUAL_SOUND = (
    48_000  # samples: two seconds at 24 kHz. Kind: chosen; codecs of sound cut it into frames of many lengths
)
USUAL_REGIONS = (
    36  # of an image, found by a detector. Kind: chosen. Source: bottom-up attention's regions a picture
)


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


def _bands(model: Model) -> int:
    bands = model.setting("input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins", "n_mels")
    bands = bands or first_width(model.module, (torch.nn.Linear, torch.nn.Conv1d))
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
        return floats(model, bands, 2 * frames)  # the second convolution halves the frames
    return floats(model, model.seq_len or frames or USUAL_FRAMES, _bands(model))


def _spectrum_of(model: Model, *, bands_first: bool, learned: bool) -> torch.Tensor:
    """Sound in the other order, or in as many bands as the first layer reads."""
    bands = first_width(model.module, (torch.nn.Linear, torch.nn.Conv1d)) if learned else None
    bands = bands or _bands(model)
    frames = 2 * (model.setting("max_source_positions") or USUAL_FRAMES // 2)
    return floats(model, *((bands, frames) if bands_first else (frames, bands)))


def _sound(model: Model) -> torch.Tensor:
    """Sound as it is recorded: as many samples as the convolutions turn into the frames asked for."""
    if (bands := model.setting("num_mel_bins")) is not None:
        return floats(model, model.setting("max_length") or USUAL_FRAMES, bands)
    strides = model.setting("conv_stride")
    factor = math.prod(strides) if strides else 1
    return floats(model, (model.seq_len or USUAL_FRAMES) * factor)


def _series(model: Model, length: int, *, channels: str = "") -> torch.Tensor:
    """Numbers over time; of several series at once, side by side."""
    width = getattr(model.config, channels, 1) if channels else (model.setting("num_input_channels") or 1)
    many = channels or width > 1 or hasattr(model.config, "num_input_channels")
    return floats(model, length, *((width,) if many else ()))


def _past(model: Model) -> int:
    return int(model.setting("context_length") or model.length) + int(
        max(model.setting("lags_sequence") or [0])
    )


def _future(model: Model) -> int:
    return int(model.setting("prediction_length", "horizon_length") or 1)


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


def _over_pixels(given: Inputs) -> torch.Tensor:
    """A mask over the pixels of images, or over patches that were cut out before."""
    images = given["pixel_values"]
    return _ones((SAMPLES, images.shape[1]) if images.dim() == 3 else (SAMPLES, *images.shape[-2:]))


def _over_views(given: Inputs) -> torch.Tensor:
    """A mask over several images of a sample."""
    images = given["pixel_values"]
    return _ones((SAMPLES, images.shape[1] if images.dim() == 5 else 1))


def _over_sound(given: Inputs) -> torch.Tensor:
    sound = given.get("input_values", given.get("input_features"))
    return _ones((SAMPLES, 1 if sound is None else sound.shape[-1]))


def _like_tokens(model: Model, given: Inputs) -> torch.Tensor:
    ids = given.get("input_ids")
    return torch.zeros(ids.shape if ids is not None else (SAMPLES, model.length), dtype=torch.int64)


def _embedded(model: Model, length: int | None = None, width: int | None = None) -> torch.Tensor:
    return floats(model, length or model.length, width or _width(model))


Example = Callable[[Model, Inputs], Any]
# Further examples of an argument: other shapes of those above, and what the code of a model may ask for besides.
OTHERS: dict[str, tuple[Example, ...]] = {
    "input_ids": (
        lambda model, _: tokens(model),
        # the tokens of several codebooks at a place, without and with one of a text
        lambda model, _: _in_books(model, int(model.setting("num_codebooks"))),
        lambda model, _: _in_books(model, int(model.setting("num_codebooks")) + 1),
    ),
    "decoder_input_ids": (lambda model, _: tokens(model),),
    "lang_ids": (lambda _, __: torch.zeros(SAMPLES, dtype=torch.int64),),
    "pixel_values": (
        lambda model, _: image(model),
        lambda model, _: floats(model, *image(model).shape[-3:]),
        lambda model, _: image(model).unsqueeze(1),
        lambda model, _: floats(model, 1, int(model.setting("max_num_tiles")), *image(model).shape[-3:]),
        lambda model, _: floats(model, int(model.setting("num_frames")), *image(model).shape[-3:]),
        # two views to match; an image, and the crops it was cut into
        *(
            lambda model, _, count=count: floats(model, count, *image(model).shape[-3:])
            for count in (2, 3, 5)
        ),
        lambda model, _: in_patches(model),
        in_a_strip,
        *(
            lambda model, _, size=size: floats(model, image(model).shape[-3], size, size)
            for size in (*USUAL_SIZES, MANY_PATCHES)
        ),
        lambda model, _: floats(
            model, *image(model).shape[-3:-2], *(n // 2 for n in image(model).shape[-2:])
        ),
    ),
    **dict.fromkeys(PLACES, (lambda _, given: places_in_rows(given),)),
    "target_sizes": (lambda model, given: places_of(model, given),),
    "spatial_shapes": (lambda model, given: places_of(model, given),),
    "image_sizes": (lambda _, given: torch.tensor(given["pixel_values"].shape[-2:]).repeat(SAMPLES, 1),),
    **dict.fromkeys(("merge_sizes", "image_merge_sizes"), (lambda model, _: _merged(model),)),
    # An image in one tile of those that its model cuts images into.
    "aspect_ratio_ids": (
        lambda _, given: torch.ones((SAMPLES, given["pixel_values"].shape[1]), dtype=torch.int64),
    ),
    "aspect_ratio_mask": (
        lambda _, given: torch.ones((SAMPLES, *given["pixel_values"].shape[1:3]), dtype=torch.int64),
    ),
    "cross_attention_mask": (
        lambda model, given: torch.ones(
            (SAMPLES, _like_tokens(model, given).shape[1], *given["pixel_values"].shape[1:3]),
            dtype=torch.int64,
        ),
    ),
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
        *(lambda model, _, bands=bands: floats(model, USUAL_FRAMES, bands) for bands in USUAL_BANDS),
        lambda model, _: floats(model, 1, USUAL_FRAMES, _bands(model)),  # as a picture
        lambda model, _: floats(model, _bands(model), LONG_SOUND),
    ),
    "input_values": (
        lambda model, _: _sound(model),
        lambda model, _: floats(model, 1, USUAL_SOUND),
        lambda model, _: floats(model, USUAL_SOUND),
        lambda model, _: _spectrum_of(model, bands_first=True, learned=True),
        lambda model, _: _spectrum_of(model, bands_first=False, learned=True),
    ),
    "attention_mask": (
        lambda _, given: _over_time(given),
        lambda model, given: floats(model, *given["pixel_values"].shape[1:]),
    ),
    "input_features_mask": (lambda _, given: _over_time(given),),
    "feature_attention_mask": (lambda _, given: _over_time(given),),
    "features_mask": (lambda _, given: _over_time(given),),
    "padding_mask": (lambda _, given: _over_sound(given),),
    "pixel_mask": (lambda _, given: _over_pixels(given),),
    "pixel_attention_mask": (lambda _, given: _over_pixels(given), lambda _, given: _over_views(given)),
    "token_type_ids": (_like_tokens,),
    "mm_token_type_ids": (_like_tokens,),
    "bbox": (
        lambda model, given: _like_tokens(model, given)[..., None].expand(-1, -1, 4).contiguous(),
        lambda model, _: floats(model, model.length, 4),
        lambda model, _: floats(model, model.length, 8),
    ),
    "inputs_embeds": (lambda model, _: _embedded(model),),
    "hidden_states": (lambda model, _: _embedded(model), lambda model, _: _convolved(model)),
    "encoder_hidden_states": (
        lambda model, _: _embedded(model),
        lambda model, _: _embedded(model, width=model.setting("encoder_hidden_size", "encoder_width")),
    ),
    "query_embeds": (lambda model, _: _embedded(model, model.setting("num_query_tokens") or 32),),
    "latents": (lambda model, _: floats(model, _width(model), USUAL_FRAMES),),
    "visual_feats": (lambda model, _: _embedded(model, USUAL_REGIONS, model.setting("visual_feat_dim")),),
    "visual_pos": (lambda model, _: _embedded(model, USUAL_REGIONS, model.setting("visual_pos_dim") or 4),),
    "visual_embeds": (
        lambda model, _: _embedded(model, USUAL_REGIONS, model.setting("visual_embedding_dim")),
    ),
    "states": (lambda model, _: _embedded(model, USUAL_REGIONS, model.setting("state_dim")),),
    "state": (lambda model, _: floats(model, model.setting("max_state_dim", "state_dim") or 32),),
    "actions": (lambda model, _: _embedded(model, USUAL_REGIONS, model.setting("act_dim")),),
    "rewards": (lambda model, _: _embedded(model, USUAL_REGIONS, 1),),
    "returns_to_go": (lambda model, _: _embedded(model, USUAL_REGIONS, 1),),
    "timesteps": (lambda _, __: torch.arange(USUAL_REGIONS).expand(SAMPLES, -1).contiguous(),),
    "inputs": (
        lambda model, _: tokens(model),
        lambda model, _: _embedded(model),
        lambda model, _: floats(model, USUAL_SOUND),
    ),
    # Of speech: a frame a token, its bands, pitch and energy.
    "duration_labels": (lambda model, given: _like_tokens(model, given) + 1,),
    "spectrogram_labels": (
        lambda model, given: floats(model, _like_tokens(model, given).shape[1], _bands(model)),
    ),
    **dict.fromkeys(
        ("pitch_labels", "energy_labels"),
        (lambda model, given: floats(model, _like_tokens(model, given).shape[1], 1),),
    ),
    "qformer_input_ids": (lambda model, _: tokens(model)[:, :USUAL_REGIONS].contiguous(),),
    "bool_masked_pos": (
        lambda model, given: masked(math.prod(places_of(model, given)[0].tolist())),
        lambda model, given: masked(places_of_film(model, given)),
        lambda model, given: masked(*places_of(model, given)[0].tolist()),
    ),
    "flattened_patches": (
        lambda model, _: flat_patches(model, 0),
        lambda model, _: flat_patches(model, 2),
    ),
    **dict.fromkeys(GRIDS, (grid,)),
    "noise_embeds": (lambda model, _: _embedded(model),),
}


def _merged(model: Model) -> torch.Tensor:
    """Rows and columns of patches that become one, of each image."""
    return torch.full((SAMPLES,), int(model.setting("spatial_merge_size") or 1))


def _convolved(model: Model) -> torch.Tensor:
    """Channels over time, as many as the first convolution reads."""
    channels = first_width(model.module, (torch.nn.Conv1d,)) or 1
    return floats(model, channels, USUAL_SOUND if channels == 1 else USUAL_FRAMES)


def _in_books(model: Model, count: int) -> torch.Tensor:
    return tokens(model)[..., None].repeat(1, 1, count)


_LIKE = (  # what an argument is like whose name has one of these words, the first that fits
    (("pixel_values", "images"), "pixel_values"),
    (("input_ids",), "input_ids"),
    (("token_type_ids",), "token_type_ids"),
    (("pixel_attention_mask",), "pixel_attention_mask"),
    (("mask",), "attention_mask"),
    (("input_features", "mel", "spectrogram", "fbank"), "input_features"),
    (("input_values", "waveform", "audio_values"), "input_values"),
    (("grid_thw",), "grid_thw"),
    (("image_sizes",), "image_sizes"),
    (("hidden_states",), "encoder_hidden_states"),
    (("lang", "speaker"), "lang_ids"),
)


def examples_of(name: str) -> tuple[Example, ...]:
    """Examples of an argument by its name, or of one that is called much the same; none where no such is known."""
    if name in OTHERS:
        return OTHERS[name]
    if "label" in name or name.startswith(("output_", "return_", "use_")):
        return ()
    return next((OTHERS[like] for words, like in _LIKE if any(word in name for word in words)), ())
