"""Images and sound in front of a text: as many placeholders among the tokens as the model makes of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoparallel.planner.capture.huggingface_images import flattened
from autoparallel.planner.capture.huggingface_model import text_settings
from autoparallel.planner.capture.inputs_tried import Maker, Whole, fitted
from autoparallel.planner.capture.meta_mode import MetaMode
from autoparallel.planner.capture.on_meta import left_as_it_was, with_batch
from autoparallel.planner.capture.samples import matched, runs
from autoparallel.planner.capture.trees import mapped, plain, tensors

Inputs = dict[str, Any]
# The settings that say which token stands for an image, for a sound, for a film.
_OF_IMAGES = ("image_token_id", "image_token_index")
_OF_SOUND = ("audio_token_id", "audio_token_index")
MEDIA_TOKENS = (*_OF_IMAGES, *_OF_SOUND, "video_token_id", "video_token_index")
_TOKENS = ("input_ids", "inputs_embeds")
_KINDS_OF_TOKENS = ("mm_token_type_ids", "token_type_ids")  # what says which tokens are an image's


@dataclass(frozen=True, slots=True)
class _Medium:
    """What is read beside a text: the method that makes rows of the text's width of it, its argument, its token."""

    method: str
    argument: str
    tokens: tuple[str, ...]


_MEDIA = (
    _Medium("get_image_features", "pixel_values", _OF_IMAGES),
    _Medium("get_audio_features", "input_features", _OF_SOUND),
)


class _NoPlaceholderError(LookupError):
    """No token stands for a medium."""


def with_media(
    module: Any, config: Any, inputs: Inputs, makers: Mapping[str, Sequence[Maker]]
) -> tuple[Inputs, list[str]]:
    """`inputs` with one image and one sound a sample, on which the module was seen to run; the `makers` of each argument make
    examples of it. And the arguments of media for which no token stands.

    `inputs` itself, so that idle parameters are warned of, where the model wants something else, or leaves no room for text.
    """
    found, used, otherwise = inputs, 0, []
    for medium in _MEDIA:
        try:
            found, used = _with(medium, module, config, found, makers, used)
        except _NoPlaceholderError:
            otherwise += [medium.argument] if medium.argument in makers else []
        except Exception:  # whatever it is that the model wants else
            continue
    return found, otherwise


def _with(
    medium: _Medium,
    module: Any,
    config: Any,
    inputs: Inputs,
    makers: Mapping[str, Sequence[Maker]],
    used: int,
) -> tuple[Inputs, int]:
    """`inputs` with a medium, and how many tokens then stand for media. Raises, whatever the model raises."""
    settings = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    found = (getattr(of, key, None) for of in settings for key in medium.tokens)
    token = next((number for number in found if isinstance(number, int)), None)
    method = _method(module, medium)
    if token is None or method is None or "input_ids" not in inputs:
        raise _NoPlaceholderError
    given = _given(module, method, medium, inputs, makers)
    features = _on_meta(module, method, _as_taken(given))[0]
    places = _places(features, inputs["input_ids"].shape[0], text_settings(config).hidden_size)
    placed = _placed(inputs, token, slice(used, used + places)) | given
    kinds = (placed["input_ids"] == token).to(torch.int64)
    accepted = inspect.signature(module.forward).parameters
    named = [name for name in _KINDS_OF_TOKENS if name in accepted]
    problem: Exception = ValueError("it does other things with other batches")
    for tried in (placed, *(placed | {name: kinds} for name in named)):
        try:
            fewer, more = (_on_meta(module, module, with_batch(tried, batch))[1] for batch in (2, 4))
        except Exception as error:
            problem = error
            continue
        if matched(runs(more), more, fewer) is not None:
            return tried, used + places
    raise problem


def _method(module: Any, medium: _Medium) -> Callable[..., Any] | None:
    """The method of the module, or of what it wraps, that takes the medium by name."""
    inner = [part for name in ("model", "vlm") if (part := getattr(module, name, None)) is not None]
    for part in (*inner, *(getattr(p, "model", None) for p in inner), module):
        method: Callable[..., Any] | None = getattr(part, medium.method, None)
        if method is not None and medium.argument in inspect.signature(method).parameters:
            return method
    return None


class _Features(torch.nn.Module):
    """The part of a module that reads a medium, as a module."""

    def __init__(self, module: torch.nn.Module, method: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.method = module, method

    def forward(self, **given: Any) -> Any:
        return self.method(**_as_taken(given))


def _given(
    module: Any,
    method: Callable[..., Any],
    medium: _Medium,
    inputs: Inputs,
    makers: Mapping[str, Sequence[Maker]],
) -> Inputs:
    """The arguments of the method: those it must have, and what it turns out to need."""
    asked = inspect.signature(method).parameters
    named = {name: makers[name] for name in asked if name in makers and name not in _TOKENS}
    needed = [name for name in named if asked[name].default is asked[name].empty]
    given: Inputs = {}
    for name in dict.fromkeys((medium.argument, *needed)):
        given[name] = named[name][0](inputs | given)
    return fitted(_Features(module, method), given, named, ())


def _as_taken(inputs: Inputs) -> Inputs:
    """Patches (samples, patches, …) as the inside of a model gets them: of all images one after another."""
    return inputs | flattened(inputs)


def _on_meta(module: Any, function: Any, inputs: Inputs) -> tuple[Any, list[tuple[int, str]]]:
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


def is_traceable(module: Any, inputs: Inputs) -> bool:
    """Whether the module runs on the meta device to its end: without values, and without a part run for real."""
    try:
        _on_meta(module, module, inputs)
    except Exception:  # whatever it is that the model wants else
        return False
    return True


def _places(features: Any, samples: int, width: int) -> int:
    """How many tokens one image becomes: the rows of the last features as wide as the text's."""
    pooled = getattr(features, "pooler_output", None)
    found = tensors(plain(features if pooled is None else pooled))
    rows = sum(t.numel() // width for t in found if t.shape[-1] == width)
    if not rows or rows % samples:
        raise ValueError("the image's features are not rows of the text's width")
    return rows // samples


def _placed(inputs: Inputs, token: int, places: slice) -> Inputs:
    ids = inputs["input_ids"].clone()
    if places.stop >= ids.shape[1]:
        raise ValueError("no room for text")
    ids[ids == token] = 0
    ids[:, places] = token
    labels = {"labels": ids.clone()} if "labels" in inputs else {}
    return inputs | {"input_ids": ids} | labels
