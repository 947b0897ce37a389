"""Examples of pictures and films: whole, in patches that were cut out before, with masks and places of their patches."""

from __future__ import annotations

import math
from typing import Any

import torch

from autoparallel.planner.capture.huggingface_model import (
    DEFAULT_SEQ_LEN,
    SAMPLES,
    Inputs,
    Model,
    first_width,
    floats,
)

USUAL_IMAGE_SIZE = 224  # pixels. Kind: chosen. Source: the usual crop of ImageNet


def image(model: Model) -> torch.Tensor:
    """Of the model's own size; convolutional ones have none and take any. Of a film, all of its frames."""
    size = model.setting("image_size", "crop_size", "img_size", "max_img_size")
    if isinstance(size, int):
        size = (size, size)
    if not (isinstance(size, list | tuple) and len(size) == 2):
        size = (USUAL_IMAGE_SIZE, USUAL_IMAGE_SIZE)
    channels = model.setting("num_channels", "in_channels", "in_chans") or 3
    frames = (model.config.num_frames,) if hasattr(model.config, "num_frames") else ()
    return floats(model, *frames, channels, int(size[0]), int(size[1]))


# -- patches that are cut out of images before --------------------------------------------------------------------

GRIDS = ("grid_thw", "image_grid_thw")  # of an image: frames, rows and columns of patches
PLACES = ("pixel_position_ids", "image_position_ids")  # of patches that were cut out before: column and row
_SIDE = (
    16  # rows and columns. Kind: chosen; 224 pixels in patches of 14, and even as often as patches are merged
)
_PATCHES = ("hidden_states", "pixel_values")


def patches(model: Model, _: Inputs) -> torch.Tensor:
    """Patches of one image a sample, flattened."""
    return floats(model, _SIDE * _SIDE, math.prod(_patch(model)))


def patches_as_they_are(model: Model, _: Inputs) -> torch.Tensor:
    """Patches of one image a sample, each (channels, rows, columns)."""
    return floats(model, _SIDE * _SIDE, *_patch(model))


def patches_colours_last(model: Model, _: Inputs) -> torch.Tensor:
    """Patches of one image a sample that become one later, each (rows, columns, channels)."""
    colours = int(model.setting("num_channels", "in_channels") or 3)
    merged = int(model.setting("merge_size", "spatial_merge_size") or 1)
    size = math.isqrt(math.prod(_patch(model)) // colours) * merged
    return floats(model, _SIDE * _SIDE, size, size, colours)


def in_a_strip(model: Model, _: Inputs) -> torch.Tensor:
    """Patches of one image a sample, side by side as an image of one row."""
    channels, rows, columns = _patch(model)
    return floats(model, channels, rows, _SIDE * _SIDE * columns)


def _patch(model: Model) -> tuple[int, ...]:
    """The shape that the first layer of what sees reads."""
    kinds = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d)
    towers = [part for name, part in model.module.named_children() if "visi" in name or "visual" in name]
    inside = [
        part
        for name, part in model.module.named_modules()
        if name.rpartition(".")[2] in ("visual", "vision_tower", "vision_model")
    ]
    tower = next(iter((*towers, *inside)), model.module)
    first = next((part for part in tower.modules() if isinstance(part, kinds)), None)
    return (1,) if first is None else tuple(first.get_parameter("weight").shape[1:])


def grid(_: Model, __: Inputs) -> torch.Tensor:
    """Rows and columns of the patches of one image a sample."""
    return torch.tensor([[1, _SIDE, _SIDE]]).repeat(SAMPLES, 1)


def in_one_row(module: torch.nn.Module) -> None:
    """Let a module that is fed the patches of all images in one row take them sample by sample, batch first."""

    def flatten(_: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        found = flattened(kwargs)
        return (args, kwargs | found) if found else None

    module.register_forward_pre_hook(flatten, with_kwargs=True)


def flattened(inputs: Inputs) -> dict[str, Any]:
    """Patches (samples, patches, numbers) or (samples, patches, channels, rows, columns) in one row, where a grid says which
    are whose; strips of them one after another, where their sizes do."""
    if not any(name in inputs for name in GRIDS):
        return _one_strip(inputs)
    return {n: inputs[n].flatten(0, 1) for n in _PATCHES if n in inputs and inputs[n].dim() in (3, 5)}


def _one_strip(inputs: Inputs) -> dict[str, Any]:
    images, sizes = inputs.get("pixel_values"), inputs.get("target_sizes")
    if (
        images is None
        or sizes is None
        or images.dim() != 4
        or images.shape[-1] != _SIDE**2 * images.shape[-2]
    ):
        return {}
    return {"pixel_values": images.movedim(0, -2).flatten(-2)[None]}


def flat_patches(model: Model, places: int) -> torch.Tensor:
    """Patches cut out before, of which the first `places` numbers say where they were."""
    width = first_width(model.module, (torch.nn.Linear,)) or 1
    return floats(model, model.setting("seq_len") or DEFAULT_SEQ_LEN // 2, width + places)


def in_patches(model: Model) -> torch.Tensor:
    """Patches cut out before, as many as a model says that it takes."""
    width = math.prod(_patch(model))
    pooled = int(model.setting("pooling_kernel_size") or 1)  # rows and columns that become one
    side = -(-_SIDE // pooled) * pooled
    return floats(model, int(model.setting("num_patches", "max_num_patches") or side * side), width)


def places_of(model: Model, given: Inputs) -> torch.Tensor:
    """Rows and columns of the patches of each image; of patches cut out before, of a square."""
    images = given["pixel_values"]
    if images.dim() == 3:
        return torch.tensor([math.isqrt(images.shape[1])] * 2).repeat(SAMPLES, 1)
    if images.shape[-1] == _SIDE**2 * images.shape[-2]:  # a strip
        return torch.tensor([_SIDE, _SIDE]).repeat(SAMPLES, 1)
    patch = int(model.setting("patch_size") or 16)
    return torch.tensor([int(size) // patch for size in images.shape[-2:]]).repeat(SAMPLES, 1)


def places_in_rows(given: Inputs) -> torch.Tensor:
    """Column and row of each patch that was cut out before, of a square."""
    count = given["pixel_values"].shape[1]
    places = torch.arange(count)
    side = math.isqrt(count)
    return torch.stack([places % side, places // side], dim=-1).repeat(SAMPLES, 1, 1)


def places_of_film(model: Model, given: Inputs) -> int:
    """Patches of a film, each of so many frames."""
    frames = given["pixel_values"].shape[1] // int(model.setting("tubelet_size", "temporal_patch_size") or 1)
    return int(frames * math.prod(places_of(model, given)[0].tolist()))


def masked(*places: int) -> torch.Tensor:
    """Every second place is masked: as many in each sample."""
    return (torch.arange(math.prod(places)) % 2 == 0).reshape(places).expand(SAMPLES, *places).contiguous()
