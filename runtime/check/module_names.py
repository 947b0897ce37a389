"""Which module runs, in a forward or a backward pass, by its path: torch's tracker, which a block that runs again is kept from."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.module_tracker import ModuleTracker


class ModuleNames(ModuleTracker):
    """Tracks modules while it is active.

    What a block computes in its second run belongs to the block: torch's hooks on such tensors, of which not all get a
    gradient, would keep what the run saved for ever.
    """

    def _fw_pre_hook(self, mod: nn.Module, input: Any) -> None:
        if not self.is_bw:
            super()._fw_pre_hook(mod, input)

    def _fw_post_hook(self, mod: nn.Module, input: Any, output: Any) -> None:
        if not self.is_bw:
            super()._fw_post_hook(mod, input, output)

    @property
    def innermost(self) -> str:
        """The path of the module that runs now, "" for the whole one."""
        name = max(self.parents, key=lambda path: (path.count("."), path))
        return str(name).partition(".")[2]
