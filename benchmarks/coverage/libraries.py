"""Models of torchvision, timm and diffusers, where they are installed: one of each architecture, with what it is fed.

torchvision's own operators are missing where its wheel and torch's are of different builds: then its models are left out
(timm imports it too).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autoparallel.planner.capture.inputs_tried import fitted

SAMPLES, IMAGE_SIZE, LENGTH = 2, 224, 64
Made = tuple[nn.Module, dict[str, Any]]


def names() -> Iterator[tuple[str, str]]:
    """(library, model): of timm one of each of its files, of torchvision the classifiers, of diffusers every network."""
    if _imports("torchvision"):
        models = importlib.import_module("torchvision.models")
        yield from (("torchvision", name) for name in models.list_models(module=models))
    if _imports("timm"):
        timm = importlib.import_module("timm")
        for module in sorted(timm.list_modules()):
            found = timm.list_models(module=module)
            yield from (("timm", name) for name in found[:1])
    if _imports("diffusers"):
        networks = importlib.import_module("diffusers.models")
        kind = networks.modeling_utils.ModelMixin
        for name in sorted(n for n in dir(networks) if not n.startswith("_")):
            found = getattr(networks, name, None)
            if (
                inspect.isclass(found)
                and issubclass(found, kind)
                and found is not kind
                and _builds_alone(found)
            ):
                yield "diffusers", name


def make(library: str, name: str, *, device: str) -> Made:
    """A model as its library builds it without arguments, with an example of what it is fed (on the meta device)."""
    try:
        with torch.device(device):
            module = _built(library, name)
    except (NotImplementedError, RuntimeError):  # it looks at its numbers
        module = _built(library, name)
    return module.train(), _inputs(module, library)


def _built(library: str, name: str) -> nn.Module:
    if library == "torchvision":
        module = importlib.import_module("torchvision.models").get_model(name)
    elif library == "timm":
        module = importlib.import_module("timm").create_model(name)
    else:
        module = getattr(importlib.import_module("diffusers.models"), name)()
    assert isinstance(module, nn.Module)
    return module


def _imports(library: str) -> bool:
    if importlib.util.find_spec(library) is None:
        return False
    try:
        importlib.import_module(library)
    except (ImportError, RuntimeError):
        return False
    return True


def _builds_alone(kind: type) -> bool:
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    return all(p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)


def _inputs(module: nn.Module, library: str) -> dict[str, Any]:
    if library == "timm":
        channels, *size = module.default_cfg["input_size"]  # type: ignore[index,misc]
        return {next(iter(inspect.signature(module.forward).parameters)): _floats(channels, *size)}
    if library == "torchvision":
        size = 299 if "Inception" in type(module).__name__ else IMAGE_SIZE
        return {"x": _floats(3, size, size)}
    return _of_diffusion(module)


def _floats(*shape: int) -> Tensor:
    return torch.empty((SAMPLES, *shape), device="meta")


def _of_diffusion(module: Any) -> dict[str, Any]:
    """A noisy image or film, or its patches, the time, and a text, by the names of diffusers' arguments."""
    config = module.config
    channels = config.get("in_channels") or config.get("num_channels") or 3
    side = config.get("sample_size") or 32
    side = side if isinstance(side, int) else side[0]
    widths = [
        config[key]
        for key in (
            "cross_attention_dim",
            "joint_attention_dim",
            "caption_channels",
            "text_embed_dim",
            "caption_projection_dim",
        )
        if isinstance(config.get(key), int)
    ]
    text = widths[0] if widths else 768
    patches = LENGTH * LENGTH // 16
    makers: dict[str, list[Callable[[dict[str, Any]], Any]]] = {
        "sample": [
            lambda _: _floats(channels, side, side),
            lambda _: _floats(channels, 8, side, side),
            lambda _: _floats(channels, 64, 64),
        ],
        "hidden_states": [
            lambda _: _floats(channels, side, side),
            lambda _: _floats(channels, 5, side, side),
            lambda _: _floats(patches, channels),
        ],
        "timestep": [lambda _: torch.zeros(SAMPLES), lambda _: torch.zeros(SAMPLES, dtype=torch.int64)],
        "encoder_hidden_states": [lambda _: _floats(LENGTH, text)],
        "encoder_attention_mask": [lambda _: torch.ones(SAMPLES, LENGTH)],
        "class_labels": [lambda _: torch.zeros(SAMPLES, dtype=torch.int64)],
        "pooled_projections": [lambda _: _floats(config.get("pooled_projection_dim") or 768)],
        "img_ids": [lambda _: torch.zeros(patches, 3)],
        "txt_ids": [lambda _: torch.zeros(LENGTH, 3)],
        "guidance": [lambda _: torch.zeros(SAMPLES)],
        "x": [lambda _: _floats(channels, side, side)],
    }  # fmt: skip
    accepted = inspect.signature(module.forward).parameters
    needed = [n for n, p in accepted.items() if p.default is p.empty and n in makers]
    inputs = {name: makers[name][0]({}) for name in needed}
    return fitted(module, inputs, {n: makers[n] for n in accepted if n in makers}, [])
