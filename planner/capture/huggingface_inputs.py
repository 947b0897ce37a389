"""Example inputs of a transformers model: what it is made for, by the names that its `forward` gives its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autoparallel.planner.capture.errors import ModelError
from autoparallel.planner.capture.huggingface_examples import MAKERS, Example, examples_of, tokens
from autoparallel.planner.capture.huggingface_images import (
    GRIDS,
    PLACES,
    in_one_row,
    in_patches,
    patches,
    patches_as_they_are,
    patches_colours_last,
)
from autoparallel.planner.capture.huggingface_model import SAMPLES, Model
from autoparallel.planner.capture.inputs_tried import Maker, fitted
from autoparallel.planner.capture.placeholders import is_traceable, with_media

# transformers' tables by what a label is given for: one a sample; one a pixel; or of a form of its own (boxes, masks),
# where the outputs are differentiated instead. All others take one a token.
_ONE_A_SAMPLE = (
    "SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "MULTIPLE_CHOICE",
)  # fmt: skip
_ONE_A_PIXEL = ("SEMANTIC_SEGMENTATION",)
_OTHERWISE = ("OBJECT_DETECTION", "INSTANCE_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "DEPTH_ESTIMATION")

# Arguments of a model that reads tokens alone: they may be left out.
_OF_TOKENS = frozenset(
    {
        "input_ids",
        "attention_mask",
        "token_type_ids",
        "inputs_embeds",
        "decoder_input_ids",
        "decoder_attention_mask",
        "encoder_attention_mask",
        "encoder_hidden_states",
    }
)


def example_inputs(file: Path, module: Any, config: Any, seq_len: int | None) -> dict[str, Any]:
    """Keyword inputs that reach the loss, with labels where `forward` takes them. Raises ModelError where no example
    is known of what the model is fed."""
    model = Model(file, module, config, seq_len)
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
    inputs: dict[str, Any] = {}
    needs_grid = any(name in GRIDS for name in needed)
    if any(name in (*GRIDS, "target_sizes") for name in accepted):
        in_one_row(module)
    for name in dict.fromkeys(needed):
        if needs_grid and name in ("hidden_states", "pixel_values"):
            inputs[name] = patches(model, inputs)
        elif name == "pixel_values" and any(name in PLACES for name in needed):
            inputs[name] = in_patches(model)
        else:
            inputs[name] = _made(model, name, inputs)
    inputs |= {"return_loss": True} if "return_loss" in accepted else {}
    if "labels" in accepted:
        inputs |= _labels(model, inputs)
        if "next_sentence_label" in accepted:
            inputs["next_sentence_label"] = torch.zeros(SAMPLES, dtype=torch.int64)
    elif "input_ids" in inputs and config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens(model)
    makers = _makers(model, list(accepted))
    placed, otherwise = with_media(module, config, inputs, makers)
    inputs = _fitted(module, inputs, makers) if placed is inputs else placed
    for name in otherwise:  # read beside the text, not in the place of tokens
        if name not in inputs:
            more = fitted(module, inputs | {name: makers[name][0](inputs)}, makers, ())
            inputs = more if is_traceable(module, more) else inputs
    return inputs


def _made(model: Model, name: str, given: Mapping[str, Any]) -> Any:
    if name in MAKERS:
        return MAKERS[name](model)
    if examples := examples_of(name):
        return _example(model, name, examples[0], given)
    raise ModelError(
        f"{model.file}: {type(model.module).__name__} is fed {name}, for which no example is known; build it in a "
        "file of your own and pass FILE.py:NAME"
    )


def _fitted(module: Any, inputs: dict[str, Any], makers: Mapping[str, Sequence[Maker]]) -> dict[str, Any]:
    """`inputs` with what else the model turns out to need."""
    return fitted(module, inputs, makers, [name for name in ("labels", "return_loss") if name in inputs])


def _makers(model: Model, accepted: Sequence[str]) -> dict[str, list[Maker]]:
    """Of each argument of which examples are known, what makes them."""
    examples = {name: examples_of(name) for name in accepted}
    if any(name in GRIDS for name in accepted) and "pixel_values" in examples:
        examples["pixel_values"] = (patches, patches_as_they_are, patches_colours_last)
    if any(name in PLACES for name in accepted):
        examples["pixel_values"] = (lambda model, _: in_patches(model),)
    return {
        name: [partial(_example, model, name, example) for example in made]
        for name, made in examples.items()
        if made
    }


def _example(model: Model, name: str, example: Example, given: Mapping[str, Any]) -> Any:
    """An example of an argument: of flags where `forward` says that it takes these."""
    found = example(model, given)
    takes = str(inspect.signature(model.module.forward).parameters[name].annotation)
    return found.bool() if "BoolTensor" in takes and not found.is_floating_point() else found


def _labels(model: Model, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
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
    text = Model(model.file, model.module, model.config, length)
    return {"labels": tokens(text)}


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
