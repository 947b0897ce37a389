"""Hashes of a model and of a dataset: a folder keeps them, and another model or dataset is refused there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

# Samples of a dataset that are looked into, evenly spread. Kind: choice; reading all would take an epoch.
_SAMPLES = 16


def model_identity(module: nn.Module) -> str:
    """Of names, shapes and dtypes of parameters and buffers, before `auto_parallelize`: the same under every strategy."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return _digest([[name, list(t.shape), str(t.dtype)] for name, t in sorted(named, key=lambda n: n[0])])


def dataset_identity(dataset: Any) -> str:
    """Of the length and of sixteen samples, or what the dataset says itself (`fingerprint`, as Hugging Face's do)."""
    own = getattr(dataset, "fingerprint", None) or getattr(dataset, "_fingerprint", None)
    if isinstance(own, str):
        return _digest(own)
    length = len(dataset) if isinstance(dataset, Sized) else 0
    places = sorted({i * (length - 1) // max(_SAMPLES - 1, 1) for i in range(min(_SAMPLES, length))})
    state = torch.get_rng_state()  # a dataset that draws must not shift what training draws
    try:
        return _digest([length, *([place, _content(dataset[place])] for place in places)])
    finally:
        torch.set_rng_state(state)


def launch_key(model: str) -> str:
    """Of a model's identity and this launch: what is captured of a model serves the restarts of one launch, as its code may change
    between launches."""
    launch = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return _digest(f"{model} {launch if launch != 'none' else os.getpid()} {torch.__version__}")


def _content(sample: Any) -> list[Any]:
    found = []
    for path, leaf in tree_flatten_with_path(sample)[0]:
        if isinstance(leaf, Tensor):
            content = hashlib.sha256(
                leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
            leaf = [list(leaf.shape), str(leaf.dtype), content.hexdigest()]
        elif not isinstance(leaf, str | int | float | bool | None):
            leaf = type(leaf).__name__  # its text may hold an address
        found.append([str(path), leaf])
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:20]
