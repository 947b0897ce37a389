"""`torch.vmap` of what a model computes (ensembles, gradients of each sample): one call, with the kernels that its operators
become. Inside of it tensors have a dim less than their storages, and no function of torch's can be noted by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch._functorch.apis


@contextmanager
def maps_followed(tracer: Any) -> Iterator[None]:
    """While inside, `tracer` is told of every `torch.vmap` that the model's code calls."""
    place: Any = torch._functorch.apis
    own = place.vmap_impl

    def followed(*args: Any, **kwargs: Any) -> Any:
        return tracer.as_one("vmap", lambda: own(*args, **kwargs))

    place.vmap_impl = followed
    try:
        yield
    finally:
        place.vmap_impl = own
