"""Images in front of a text: as many placeholders among the tokens as the model makes of its image."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from autoparallel.planner.capture.inputs_tried import Whole
from autoparallel.planner.capture.meta_mode import MetaMode
from autoparallel.planner.capture.on_meta import left_as_it_was, with_batch
from autoparallel.planner.capture.samples import matched, runs
from autoparallel.planner.capture.trees import mapped, plain, tensors

# The settings that say which token stands for an image, or a film.
IMAGE_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


def with_images(module: Any, config: Any, inputs: dict[str, Any], images: dict[str, Any]) -> dict[str, Any]:
    """`inputs` with one image a sample, given as `images`. As they are, so that idle parameters are warned of, where the
    model wants something else (the places of crops), or leaves no room for text."""
    token = next(
        (t for key in IMAGE_TOKENS if isinstance(t := getattr(config, key, None), int)),
        None,
    )
    if "input_ids" not in inputs or token is None or not hasattr(module, "get_image_features"):
        return inputs
    try:
        features, _ = _on_meta(
            module, module.get_image_features, {name: _in_one_row(t) for name, t in images.items()}
        )
        places = _places(features, inputs["input_ids"].shape[0], config.get_text_config().hidden_size)
        placed = _placed(inputs, token, places) | images
    except Exception:  # whatever it is that the model wants else
        return inputs
    kinds = (placed["input_ids"] == token).to(torch.int64)
    accepted = inspect.signature(module.forward).parameters
    named = [name for name in _KINDS_OF_TOKENS if name in accepted]
    for given in (placed, *(placed | {name: kinds} for name in named)):
        try:
            fewer, more = (_on_meta(module, module, with_batch(given, batch))[1] for batch in (2, 4))
        except Exception:  # the same
            continue
        if matched(runs(more), more, fewer) is not None:
            return given
    return inputs


_KINDS_OF_TOKENS = ("mm_token_type_ids", "token_type_ids")  # what says which tokens are an image's


def _in_one_row(tensor: torch.Tensor) -> torch.Tensor:
    """Patches (samples, patches, numbers) as the inside of a model gets them: of all images one after another."""
    return tensor.flatten(0, 1) if tensor.dim() == 3 else tensor


def _on_meta(module: Any, function: Any, inputs: dict[str, Any]) -> tuple[Any, list[tuple[int, str]]]:
    """What a function returns on the meta device, and the operators that it ran, each with the module that called it."""
    ran: list[tuple[int, str]] = []
    callers = [0]

    def note(func: Any, *_: Any) -> None:
        ran.append((callers[-1], str(func)))

    mode = MetaMode(note)
    given = mapped(lambda x: mode.to_meta(x) if isinstance(x, torch.Tensor) else x, inputs)

    def left(*_: Any) -> None:
        callers.pop()

    hooks = torch.nn.modules.module
    enter = hooks.register_module_forward_pre_hook(lambda part, _: callers.append(id(part)))
    leave = hooks.register_module_forward_hook(left, always_call=True)
    with enter, leave, left_as_it_was(module), torch.no_grad(), mode, Whole(mode):
        return function(**given), ran


def _places(features: Any, samples: int, width: int) -> int:
    """How many tokens one image becomes: the rows of the last features as wide as the text's."""
    pooled = getattr(features, "pooler_output", None)
    found = tensors(plain(features if pooled is None else pooled))
    rows = sum(t.numel() // width for t in found if t.shape[-1] == width)
    if not rows or rows % samples:
        raise ValueError("the image's features are not rows of the text's width")
    return rows // samples


def _placed(inputs: dict[str, Any], token: int, places: int) -> dict[str, Any]:
    ids = inputs["input_ids"].clone()
    if places >= ids.shape[1]:
        raise ValueError("no room for text")
    ids[ids == token] = 0
    ids[:, :places] = token
    labels = {"labels": ids.clone()} if "labels" in inputs else {}
    return inputs | {"input_ids": ids} | labels
