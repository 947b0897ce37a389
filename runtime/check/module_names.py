"""Which module runs, in a forward or a backward pass, by its path: torch's tracker, which a block that runs again is kept from."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from autoparallel.runtime.torch_private import when_gradients_came


class ModuleNames(ModuleTracker):
    """Tracks modules while it is active.

    What a block computes in its second run belongs to the block: hooks on such tensors, of which not all get a
    gradient, would keep what the run saved for ever. Nor are there hooks on leaves, of which `torch.autograd.grad` cannot say
    whether they get one: the module that reads one lasts until the end of the pass. No hook holds a gradient, which would
    count as the model's.
    """

    def _fw_pre_hook(self, mod: nn.Module, input: Any) -> None:
        if not self.is_bw:
            name = self._get_mod_name(mod)
            self._get_append_fn(name, False)()
            self._hooks += when_gradients_came(_made(input), self._get_pop_fn(name, True))

    def _fw_post_hook(self, mod: nn.Module, _: Any, output: Any) -> None:
        if not self.is_bw:
            name = self._get_mod_name(mod)
            self._get_pop_fn(name, False)()
            self._hooks += when_gradients_came(_made(output), self._get_append_fn(name, True))

    @property
    def innermost(self) -> str:
        """The path of the module that runs now, "" for the whole one."""
        name = max(self.parents, key=lambda path: (path.count("."), path))
        return str(name).partition(".")[2]


def _made(values: Any) -> list[Tensor]:
    """The tensors among these that operators made and that want a gradient."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return [tensor for tensor in tensors if tensor.requires_grad and not tensor.is_leaf]
