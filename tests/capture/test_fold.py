"""Folding: the graph of a deep model is that of all its layers, at the cost of a few."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.costmodel.graph_json import graph_hash
from autoparallel.planner.capture import capture, model_graph
from autoparallel.planner.capture.alike import alike
from autoparallel.planner.capture.fit import Fit
from autoparallel.planner.capture.fold import FoldPlan
from autoparallel.planner.capture.links import links
from autoparallel.planner.capture.load import load_model
from autoparallel.planner.capture.on_meta import on_meta
from autoparallel.planner.capture.passes import PASSES, Context
from autoparallel.planner.capture.rules import Rules
from autoparallel.planner.capture.step import trace_step
from benchmarks.coverage.eager import graph_saved_bytes as saved_bytes
from tests.capture.models import EXAMPLES, NAMES, any_small
from tests.work import calls

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


ALIKE = ("mistral", "qwen2")  # fold as llama and qwen3 do


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", [name for name in (*NAMES, *EXAMPLES) if name not in ALIKE])
def test_folded_capture_equals_the_full_one(name: str) -> None:
    module, inputs = any_small(name, layers=10)  # of fewer, what does not fold at first sight is not folded
    folded, full = (capture(module, inputs, name=name, fold=fold) for fold in (True, False))
    assert folded.parameter_count == full.parameter_count == sum(p.numel() for p in module.parameters())
    assert folded.model_flops(3) == full.model_flops(3)
    assert saved_bytes(folded, 3) == saved_bytes(full, 3)
    assert folded == full


def test_folding_leaves_the_module_as_it_was() -> None:
    module, inputs = any_small("llama", layers=6)
    before = {name: p.data_ptr() for name, p in module.named_parameters()}
    capture(module, inputs, name="x")
    assert {name: p.data_ptr() for name, p in module.named_parameters()} == before
    assert all("forward" not in vars(m) for m in module.modules())
    assert module(**inputs).loss.requires_grad


class _Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return torch.relu(x) if self.index == 3 else torch.tanh(torch.tanh(x)) if self.index == 5 else x


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(i) for i in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_that_do_different_things_are_traced_whole() -> None:
    # The last does something else than the second, so nothing proves what those between do: all must run.
    graph = capture(_Layers(), torch.randn(2, 8), name="x")
    kinds = [[op.target for op in graph.blocks[link.block].operators] for link in graph.chain]
    assert kinds[3] == ["aten.linear", "aten.relu"]
    assert kinds[5] == ["aten.linear", "aten.tanh", "aten.tanh"]


class _LastApart(_Layers):
    """Whose last layer alone does something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(3 if i == 11 else 7) for i in range(12))


class _Told(nn.Module):
    """Layers of two kinds, called with their position; every third holds one inside, of which one part is shared by all."""

    def __init__(self, length: int) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.layers = nn.ModuleList(
            _Around(_Inner(i), shared) if i % 3 == 1 else _Inner(i) for i in range(length)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x
        for index, layer in enumerate(self.layers):
            x = layer(x, first, index)
        return x.square().sum()


class _Inner(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.linear = index, nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, first: torch.Tensor, index: int, cache: dict[int, Any] | None = None
    ) -> Any:
        if cache is not None:
            cache[index] = x
        return torch.tanh(self.linear(x))


class _Around(nn.Module):
    def __init__(self, inner: nn.Module, shared: nn.Module) -> None:
        super().__init__()
        self.inner, self.shared = inner, shared

    def forward(self, x: torch.Tensor, first: torch.Tensor, index: int) -> Any:
        return self.inner(x + self.shared(x * first), first, index)


def test_layers_that_are_told_their_position_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[FoldPlan] = []
    monkeypatch.setattr(model_graph, "trace_step", lambda *a: plans.append(a[3]) or trace_step(*a))
    module, x = _Told(19), torch.randn(2, 8)
    folded = capture(module, x, name="x")
    assert plans[-1].told
    assert len(plans[-1].run) == 4 + 4  # of either kind three, and the last
    assert folded == capture(module, x, name="x", fold=False)


class _First(_Layer):
    """The first does something else; the others ask whether they are it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return torch.relu(x) if self.index == 0 else torch.tanh(x) if self.index > 0 else x


def test_layers_that_ask_whether_they_are_the_first_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[FoldPlan] = []
    monkeypatch.setattr(model_graph, "trace_step", lambda *a: plans.append(a[3]) or trace_step(*a))
    module, x = _Layers(), torch.randn(2, 8)
    module.layers = nn.ModuleList(_First(i) for i in range(9))
    folded = capture(module, x, name="x")
    assert plans[-1].run == ("layers.0", "layers.1", "layers.8")
    assert folded == capture(module, x, name="x", fold=False)


def _alternating(length: int) -> nn.Module:
    def layer(i: int) -> nn.Module:
        return nn.Linear(8, 8, bias=bool(i % 2))

    return nn.Sequential(*(layer(i) for i in range(length)))


def test_a_last_layer_that_does_something_else_stands_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[FoldPlan] = []
    original = model_graph.trace_step

    def noted(module: Any, example: Any, batch: int, plan: FoldPlan, *rest: Any) -> Any:
        plans.append(plan)
        return original(module, example, batch, plan, *rest)

    monkeypatch.setattr(model_graph, "trace_step", noted)
    module = _LastApart()
    folded = capture(module, torch.randn(2, 8), name="x")
    assert len(plans[-1].stood_in) == 8
    assert folded == capture(module, torch.randn(2, 8), name="x", fold=False)


def test_alternating_kinds_are_two_blocks() -> None:
    graph = capture(_alternating(12), torch.randn(2, 8), name="x")
    assert [link.block for link in graph.chain][4:10] == [2, 1, 2, 1, 2, 1] or len(graph.blocks) <= 4
    assert graph.parameter_count == 12 * 64 + 6 * 8


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


def _dictionary(width: int) -> nn.Module:
    return nn.ModuleDict({
        "norm": nn.LayerNorm(width), "attention": _Attention(width), "mlp": nn.Linear(width, width),
    })  # fmt: skip


def _holder(width: int) -> nn.Module:
    holder = nn.Module()
    for name, child in _dictionary(width).named_children():
        holder.add_module(name, child)
    return holder


class _Held(nn.Module):
    """The model's own loop calls what its layers hold: no layer is ever called."""

    def __init__(self, layers: int, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(8) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer.get_submodule("attention")(layer.get_submodule("norm")(x))
            x = x + torch.relu(layer.get_submodule("mlp")(x))
        return x.sum()


@pytest.mark.parametrize("make", [_dictionary, _holder], ids=["dictionary", "bare module"])
def test_layers_that_only_hold_modules_are_folded_module_by_module(
    make: Callable[[int], nn.Module],
) -> None:
    module, inputs = _Held(9, make), torch.randn(2, 4, 8)
    folded, full = (capture(module, inputs, name="x", fold=fold) for fold in (True, False))
    assert folded == full
    assert [link.path for link in folded.chain if link.repeated][3:6] == [
        "layers.1.norm", "layers.1.attention", "layers.1.mlp",
    ]  # fmt: skip
    names = [block.name for block in folded.blocks]
    assert [names.count(name) for name in ("LayerNorm", "_Attention", "Linear")] == [1, 1, 1], names
    assert folded.pipeline_cuts
    traced = capture(_Held(40, make), inputs, name="x")
    assert traced.parameter_count == 40 * sum(p.numel() for p in make(8).parameters())
    assert len(traced.blocks) == len(folded.blocks)


def _first_of_its_kind(name: str, layers: int) -> list[tuple[str, bool]]:
    """Of each link, its path and whether it is the first of its structure, nothing folded."""
    module, inputs = any_small(name, layers)
    with on_meta(module):
        graph = trace_step(module, inputs, 2, FoldPlan()).graph
    context = Context(module=module, plan=FoldPlan(), fit=Fit((2,)), rules=Rules())
    graph = alike([graph])
    for each in PASSES[: [p.name.split(":")[0] for p in PASSES].index("costs")]:
        graph = each.run(graph, context)
        each.check(graph)
    return [(link.path, link.same is None) for link in links(graph)]


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("llama", ["model.layers.0"]),
        ("deepseek", ["model.layers.0", "model.layers.1"]),  # dense, then experts
        # The last layer of a decoder is the first to send gradients to the encoder: it has nothing to add them to.
        ("whisper", ["model.encoder.layers.0", "model.decoder.layers.0", "model.decoder.layers.3"]),
    ],
)
def test_repetition_is_found_by_structure_in_a_whole_trace(name: str, first: list[str]) -> None:
    found = _first_of_its_kind(name, 4)
    assert [path for path, is_first in found if path and is_first] == first, found


def _captured(layers: int) -> ModelGraph:
    model = load_model(f"hf:{CONFIGS / 'llama-3.1-405b.json'}", model_args={}, seq_len=512)
    if layers < 126:
        model.module.model.layers = model.module.model.layers[:layers]  # type: ignore[union-attr,index]
    return capture(model.module, model.example_inputs, name="llama")


def test_llama_405b_takes_at_most_three_times_its_two_layer_version() -> None:
    _captured(2)  # what is imported and remembered is not counted
    graphs: list[ModelGraph] = []
    shallow, deep = calls(lambda: _captured(2)), calls(lambda: graphs.append(_captured(126)))
    assert len(graphs[0].repeated_positions) == 126
    assert deep <= 3 * shallow, f"{deep:,} calls against {shallow:,}"


def test_depth_changes_the_hash() -> None:
    hashes = {graph_hash(capture(*any_small("llama", layers=n), name="x")) for n in (4, 5, 6)}
    assert len(hashes) == 3


class _Aside(nn.Module):
    """Leaves a second result in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.aside = nn.Linear(8, 8), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        self.aside = y.square().mean()  # type: ignore[assignment]
        return torch.tanh(y)


class _ReadsAside(nn.Module):
    """Adds up what its layers left, where they left anything."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layers, self.read = nn.ModuleList(_Aside() for _ in range(10)), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean() + sum(self.read(layer.aside) for layer in self.layers)


@pytest.mark.parametrize("read", [lambda one: one, lambda one: 0 if one is None else one])
def test_what_layers_leave_in_attributes_is_read_of_all_of_them(read: Callable[[Any], Any]) -> None:
    module = _ReadsAside(read)
    folded, full = (capture(module, torch.randn(2, 8), name="aside", fold=fold) for fold in (True, False))
    assert folded == full
    assert len(folded.repeated_positions) == 10
    assert not folded.pipeline_cuts
    assert any("layers.0 leaves in its attributes" in warning for warning in folded.warnings)
