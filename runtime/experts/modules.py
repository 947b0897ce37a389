"""Which modules of a model are layers of experts that can be shared over ep, as its graph says. Imports no torch.

A layer is a module whose parameters have one slice per expert, and which is called with the tokens' activations
[tokens, width], the experts chosen for each [tokens, choices] and their weights [tokens, choices], and returns
what the tokens get [tokens, width]. That is what a router outside of it makes possible: other ranks' experts are
reached by sending them the tokens that chose them.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoparallel.costmodel.block_index import FLOATING, BlockIndex, index_block
from autoparallel.costmodel.graph import ModelGraph, ModuleCall, OpKind
from autoparallel.planner.sharding.experts import ExpertLayer, expert_layers

_INTEGERS = ("int64", "int32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertModule:
    """One layer: its module's path, its number of experts, its parameters (names relative to the module), and how
    it is called: the names of the arguments, and the width of a token and the choices that each makes."""

    path: str
    experts: int
    parameters: tuple[str, ...]
    hidden: str
    index: str
    weights: str
    width: int
    choices: int


def expert_modules(graph: ModelGraph) -> tuple[ExpertModule, ...] | None:
    """Every layer of experts of the model, in model order; None where one is called in a way that is not known."""
    found: dict[str, ExpertModule] = {}
    for link in graph.chain:
        block = graph.blocks[link.block]
        if not any(op.kind is OpKind.GROUPED_GEMM for op in block.operators):
            continue
        index = index_block(block, carried=(), dropout=True)
        for layer in expert_layers(index):
            path = f"{link.path}.{layer.module}" if link.path else layer.module
            calls = [call for call in block.calls if call.module == layer.module]
            made = _expert_module(path, layer, calls[0], index) if len(calls) == 1 else None
            if made is None or found.get(path, made) != made:
                return None
            found[path] = made
    return tuple(found.values())


def _expert_module(path: str, layer: ExpertLayer, call: ModuleCall, index: BlockIndex) -> ExpertModule | None:
    specs = {name: index.specs[value] for name, value in call.inputs}
    results = [index.specs[value] for value in call.outputs]
    chosen = [name for name, spec in specs.items() if spec.dtype in _INTEGERS]
    if len(specs) != 3 or len(chosen) != 1 or len(results) != 1:
        return None
    shape = specs[chosen[0]].shape
    others = [name for name in specs if name != chosen[0] and specs[name].dtype in FLOATING]
    weights = [name for name in others if specs[name].shape == shape]
    hidden = [name for name in others if specs[name].shape == results[0].shape]
    if (
        len(weights) != 1
        or len(hidden) != 1
        or weights == hidden
        or specs[hidden[0]].shape[:-1] != shape[:-1]
    ):
        return None
    return ExpertModule(
        path=path, experts=layer.experts,
        parameters=tuple(name.removeprefix(f"{layer.module}.") for name in layer.params),
        hidden=hidden[0], index=chosen[0], weights=weights[0],
        width=specs[hidden[0]].shape[-1].at(1), choices=shape[-1].at(1),
    )  # fmt: skip
