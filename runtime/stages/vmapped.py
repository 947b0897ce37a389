"""`torch.vmap` in an exported graph (transformers' masks): the calls that open and close its levels have no users, and go where what is
inside of them goes. The names are private to torch (2.13: `torch._functorch.predispatch`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import fx

_PLACE = "torch._functorch.predispatch"
_LEVELS = ("_vmap_increment_nesting", "_vmap_decrement_nesting")
_INSIDE = ("_add_batch_dim", "_remove_batch_dim")


def is_level(node: fx.Node) -> bool:
    """Whether the node opens or closes a level."""
    return _is_one_of(node, _LEVELS)


def levels_of(nodes: Iterable[fx.Node], wanted: Collection[fx.Node]) -> list[fx.Node]:
    """Of all `nodes` those that open and close levels, if some of the `wanted` ones are inside."""
    return [node for node in nodes if is_level(node)] if any(_is_one_of(n, _INSIDE) for n in wanted) else []


def _is_one_of(node: fx.Node, names: tuple[str, ...]) -> bool:
    called = node.target
    return (
        node.op == "call_function"
        and getattr(called, "__module__", "") == _PLACE
        and getattr(called, "__name__", "") in names
    )
