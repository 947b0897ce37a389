"""Images in front of a text: as many placeholders among the tokens as the model makes of its image."""

from __future__ import annotations

from typing import Any

import torch

from autoparallel.planner.capture.meta_mode import MetaMode
from autoparallel.planner.capture.on_meta import with_batch
from autoparallel.planner.capture.trees import mapped, plain, tensors


def with_images(module: Any, config: Any, inputs: dict[str, Any], images: torch.Tensor) -> dict[str, Any]:
    """`inputs` with one image a sample. As they are, so that idle parameters are warned of, where the model wants more
    than pictures of one size (their places, patches cut out before), goes through the images one by one, or leaves no
    room for text."""
    token = next(
        (
            t
            for key in ("image_token_id", "image_token_index")
            if isinstance(t := getattr(config, key, None), int)
        ),
        None,
    )
    if "input_ids" not in inputs or token is None or not hasattr(module, "get_image_features"):
        return inputs
    try:
        features, _ = _on_meta(module.get_image_features, {"pixel_values": images})
        places = _places(features, images.shape[0], config.get_text_config().hidden_size)
        given = _placed(inputs, images, token, places)
        made = [_on_meta(module, with_batch(given, batch))[1] for batch in (2, 3)]
    except Exception:  # whatever it is that the model wants else
        return inputs
    return given if made[0] == made[1] else inputs


def _on_meta(function: Any, inputs: dict[str, Any]) -> tuple[Any, list[tuple[str, int]]]:
    """What a function returns on the meta device, and the operators that it ran, each with its number of results."""
    ran: list[tuple[str, int]] = []
    mode = MetaMode(lambda func, _args, _kwargs, out: ran.append((str(func), len(tensors(out)))))
    given = mapped(lambda x: mode.to_meta(x) if isinstance(x, torch.Tensor) else x, inputs)
    with torch.no_grad(), mode:
        return function(**given), ran


def _places(features: Any, samples: int, width: int) -> int:
    """How many tokens one image becomes: the rows of the last features as wide as the text's."""
    pooled = getattr(features, "pooler_output", None)
    found = tensors(plain(features if pooled is None else pooled))
    rows = sum(t.numel() // width for t in found if t.shape[-1] == width)
    if not rows or rows % samples:
        raise ValueError("the image's features are not rows of the text's width")
    return rows // samples


def _placed(inputs: dict[str, Any], images: torch.Tensor, token: int, places: int) -> dict[str, Any]:
    ids = inputs["input_ids"].clone()
    if places >= ids.shape[1]:
        raise ValueError("no room for text")
    ids[ids == token] = 0
    ids[:, :places] = token
    labels = {"labels": ids.clone()} if "labels" in inputs else {}
    return inputs | {"input_ids": ids, "pixel_values": images} | labels
