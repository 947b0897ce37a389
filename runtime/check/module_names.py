"""Which module runs, in a forward or a backward pass, by its path: torch's tracker, which a block that runs again is kept from."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker


class ModuleNames(ModuleTracker):
    """Tracks modules while it is active.

    What a block computes in its second run belongs to the block: torch's hooks on such tensors, of which not all get a
    gradient, would keep what the run saved for ever. Nor are there hooks on leaves, of which `torch.autograd.grad` cannot say
    whether they get one: the module that reads one lasts until the end of the pass.
    """

    def _fw_pre_hook(self, mod: nn.Module, input: Any) -> None:
        if not self.is_bw:
            made = [t for t in tree_leaves(input) if isinstance(t, Tensor) and not t.is_leaf]
            super()._fw_pre_hook(mod, made)

    def _fw_post_hook(self, mod: nn.Module, input: Any, output: Any) -> None:
        if not self.is_bw:
            made = [t for t in tree_leaves(output) if isinstance(t, Tensor) and not t.is_leaf]
            super()._fw_post_hook(mod, input, made)

    @property
    def innermost(self) -> str:
        """The path of the module that runs now, "" for the whole one."""
        name = max(self.parents, key=lambda path: (path.count("."), path))
        return str(name).partition(".")[2]
