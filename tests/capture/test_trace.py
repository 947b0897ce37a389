"""The traced step is the module's own step: its graph computes what the module does, forward and backward."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autoparallel.planner.capture import capture, trace
from autoparallel.planner.capture.nodes import Role, calls, gradients, tensor, tensor_outputs
from autoparallel.planner.capture.traced import forward_half
from autoparallel.planner.capture.trees import plain, tensors
from tests.capture.measured import eager_saved_bytes, loss_of
from tests.capture.models import EXAMPLES, NAMES, any_small

# On the meta device, as on an accelerator, these count the tokens of each expert by a kernel that no CPU has.
NOT_ON_A_CPU = {"mixtral", "deepseek"}


def run(module: nn.Module, inputs: Any) -> Any:
    return module(**inputs) if isinstance(inputs, dict) else module(inputs)


@pytest.mark.parametrize("name", sorted({*NAMES, *EXAMPLES} - NOT_ON_A_CPU))
def test_the_forward_half_computes_what_the_module_computes(name: str) -> None:
    module, inputs = any_small(name)
    forward = forward_half(trace(module, inputs), torch.device("cpu"))
    expected = tensors(plain(run(module, inputs)))
    for own, made in zip(expected, forward(*tensors(inputs)), strict=True):
        torch.testing.assert_close(made, own)


class _Step(fx.Interpreter):
    """Runs a whole traced step: what autograd keeps in the forward half is what the backward half finds kept."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.saved: dict[fx.Node, list[Tensor]] = defaultdict(list)

    def run_node(self, n: fx.Node) -> Any:
        if n.meta.get("role") is Role.KEPT:
            call, position = n.args
            assert isinstance(call, fx.Node)
            assert isinstance(position, int)
            return self.saved[call][position].detach()

        def keep(saved: Tensor) -> Tensor:
            self.saved[n].append(saved)
            return saved

        backward = n.meta.get("role") is Role.BACKWARD
        with (
            torch.set_grad_enabled(not backward),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        ):
            return super().run_node(n)


class _Small(nn.Module):
    """Views, a write in place, several results, a tied weight and a reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(6, 12, bias=False)
        self.last.weight = self.first.weight
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first(x).chunk(2, dim=-1)
        y = torch.zeros_like(left)
        y[:, :3] = left[:, :3] * torch.sigmoid(right[:, :3])
        return self.last(self.norm(y)).view(-1, 3).pow(2).mean()


@pytest.mark.parametrize("name", ["small", "mlp", "resnet"])
def test_the_backward_half_computes_the_gradients(name: str) -> None:
    module, inputs = (_Small(), torch.randn(3, 6)) if name == "small" else any_small(name)
    traced = trace(module, inputs)
    found = _Step(traced).run(*tensors(inputs))["gradients"]
    loss_of(run(module, inputs)).backward()
    assert set(found) == {name for name, _ in module.named_parameters()}, traced.code
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize("name", [*NAMES, *EXAMPLES])
def test_every_parameter_has_its_gradient_and_every_tensor_a_shape(name: str) -> None:
    module, inputs = any_small(name)
    traced = trace(module, inputs)
    traced.graph.lint()
    found = gradients(traced.graph)
    for parameter_name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        assert tensor(found[parameter_name]).shape == parameter.shape
        assert found[parameter_name].meta["gradient_of"] == parameter_name
    assert all("tensor_meta" in node.meta for call in calls(traced.graph) for node in tensor_outputs(call))


@pytest.mark.parametrize("name", ["llama", "gpt2", "resnet", "bert"])
def test_the_storages_on_the_nodes_are_those_that_autograd_keeps(name: str) -> None:
    module, inputs = any_small(name)
    graph = trace(module, inputs).graph
    held = {tensor(node).storage for node in graph.nodes if node.op == "get_attr"}
    kept = {s.storage: s.storage_bytes for call in calls(graph) for s in call.meta["saved"]}
    assert sum(size for key, size in kept.items() if key not in held) == eager_saved_bytes(module, inputs)


def test_nodes_say_where_they_come_from() -> None:
    module, inputs = any_small("llama")
    graph = trace(module, inputs).graph
    product = next(c for c in calls(graph) if c.meta["frame"].path == "model.layers.1.mlp.down_proj")
    assert list(product.meta["nn_module_stack"])[1:] == [
        "model", "model.layers.1", "model.layers.1.mlp", "model.layers.1.mlp.down_proj",
    ]  # fmt: skip
    assert [node.meta["of"] for node in product.meta["backward"]] == [product] * len(product.meta["backward"])
    weight = gradients(graph)["model.layers.1.mlp.down_proj.weight"]
    assert weight.meta["of"] is product
    assert tensor(tensor_outputs(product)[0]).shape == (2, 16, 32)


def test_views_alias_and_writes_in_place_make_a_new_version() -> None:
    traced = trace(_Small(), torch.randn(3, 6))
    by_name = {node.name: node for node in traced.graph.nodes}
    assert tensor(by_name["getitem"]).storage == tensor(by_name["getitem_1"]).storage  # the two chunks
    (written,) = (n for n in traced.graph.nodes if n.name.startswith("after"))
    assert written.meta["call"].name.startswith("setitem")
    assert tensor(written).storage == tensor(by_name["zeros_like"]).storage
    norm = next(c for c in calls(traced.graph) if c.meta["torch_name"] == "layer_norm")
    assert norm.meta["inputs"][0] is written, traced.code


def test_it_prints_as_code() -> None:
    code = trace(*any_small("mlp")).code
    assert "relu = torch.relu(linear)" in code, code
    assert "linear_1 = torch._C._nn.linear(relu, layers_0_linear_weight, layers_0_linear_bias)" in code, code
    assert "torch.ops.aten.mm.default" in code, code


def test_the_module_is_left_as_it_was() -> None:
    module, inputs = any_small("llama")
    before = {name: p.data_ptr() for name, p in module.named_parameters()}
    traced = trace(module, inputs)
    assert {name: p.data_ptr() for name, p in module.named_parameters()} == before
    assert dict(traced.named_parameters())["model.embed_tokens.weight"] is module.get_parameter(
        "model.embed_tokens.weight"
    )


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (2.0 if x.sum().item() > 0 else 3.0)


class _Unusual(nn.Module):
    """Its backward pass looks at values, or its forward pass takes a derivative."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layers = kind, nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "force":
            x.requires_grad_(True)
        out = x
        for layer in self.layers:
            out = torch.tanh(layer(out)) if self.kind == "force" else _Doubled.apply(layer(out))
        if self.kind == "force":
            (force,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return force.square().sum()
        return out.square().sum()


def test_a_backward_pass_that_looks_at_values_has_the_model_priced_whole() -> None:
    graph = capture(_Unusual("values"), torch.randn(4, 8), name="values")
    assert any("in its backward pass" in warning and "priced whole" in warning for warning in graph.warnings)
    assert graph.parameter_count == 3 * 72


def test_a_model_that_takes_derivatives_is_not_cut_into_stages() -> None:
    graph = capture(_Unusual("force"), torch.randn(4, 8), name="force")
    assert not graph.pipeline_cuts
    assert len(graph.repeated_positions) == 3
    assert any("takes derivatives" in warning for warning in graph.warnings)
