"""What a captured graph says: the chain, tied and frozen parameters, leaves, inputs and outputs, dtypes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoparallel.costmodel.graph import ModelGraph, Operator, OpKind
from autoparallel.costmodel.graph_json import graph_hash
from autoparallel.errors import UserError
from autoparallel.planner.capture import capture
from benchmarks.coverage.eager import graph_saved_bytes as saved_bytes
from tests.capture.measured import counted_flops, eager_saved_bytes, show_saved
from tests.capture.models import SAMPLES, SEQ, captured, small


def operators(graph: ModelGraph) -> list[Operator]:
    return [op for link in graph.chain for op in graph.blocks[link.block].operators]


# -- the chain ----------------------------------------------------------------------------------------------------


def test_a_decoder_is_embedding_blocks_and_head() -> None:
    graph = capture(*small("llama", 3), name="llama")
    assert [link.path for link in graph.chain] == [
        "",
        "model.layers.0",
        "model.layers.1",
        "model.layers.2",
        "",
    ]
    assert [link.repeated for link in graph.chain] == [False, True, True, True, False]
    assert len({graph.chain[i].block for i in graph.repeated_positions}) == 1
    assert graph.pipeline_cuts
    assert graph.tokens_per_sample == SEQ
    hidden = graph.chain[1].sends
    assert [[size.at(SAMPLES) for size in spec.shape] for spec in hidden] == [[SAMPLES, SEQ, 32]]


def test_an_encoder_decoder_is_two_runs_of_blocks_and_what_passes_between_them_is_sent() -> None:
    graph = captured("t5")[2]
    paths = [link.path for link in graph.chain if link.repeated]
    assert paths == ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]
    assert graph.pipeline_cuts
    sends = [len(link.sends) for link in graph.chain if link.repeated]
    assert sends[2] > sends[0]  # the decoder's own activation, and the encoder's result


def test_every_value_that_an_operator_reads_is_made_before_it_or_comes_in() -> None:
    for name in ("llama", "gpt2", "t5", "whisper", "deepseek", "resnet"):
        for block in captured(name)[2].blocks:
            known = {f"input:{i}" for i in range(len(block.inputs))}
            known |= {f"param:{p.name}" for p in block.parameters} | {f"buffer:{n}" for n, _ in block.buffers}
            for op in block.operators:
                assert set(op.inputs) <= known, (name, block.name, op)
                known |= {op.name, *(f"{op.name}.{i}" for i in range(1, len(op.outputs)))}
                assert {s.value for s in op.saved} - {""} <= known
            assert set(block.outputs) <= known
            for call in block.calls:
                assert {value for _, value in call.inputs} | set(call.outputs) <= known


def test_linear_layers_say_their_arguments_by_name() -> None:
    block = next(b for b in captured("llama")[2].blocks if b.name == "LlamaDecoderLayer")
    calls = {call.module: call for call in block.calls}
    product = next(op for op in block.operators if op.module == "mlp.down_proj")
    assert calls["mlp.down_proj"].inputs == (("input", product.inputs[0]),)
    assert calls["mlp.down_proj"].outputs == (product.name,)
    assert next(name for name, _ in calls["self_attn"].inputs) == "hidden_states"


# -- parameters ---------------------------------------------------------------------------------------------------


def test_tied_weights_are_named_where_each_is_used_and_counted_once() -> None:
    module, inputs = small("gpt2")
    graph = capture(module, inputs, name="gpt2")
    tied = [
        (link.path, p.name, p.tied)
        for link in graph.chain
        for p in graph.blocks[link.block].parameters
        if p.tied
    ]
    assert tied == [
        ("", "transformer.wte.weight", "transformer.wte.weight"),
        ("", "lm_head.weight", "transformer.wte.weight"),
    ]
    assert graph.parameter_count == sum(p.numel() for p in module.parameters())


class _Shared(nn.Module):
    """One layer that is called three times, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layers[0](x))
        return x


def test_a_module_called_three_times_is_three_links_of_tied_parameters() -> None:
    graph = capture(_Shared(), torch.randn(2, 8), name="x")
    assert [link.path for link in graph.chain if link.repeated] == ["layers.0"] * 3
    assert graph.parameter_count == 72
    assert not graph.pipeline_cuts


def _lora(module: nn.Module) -> nn.Module:
    """All weights frozen; a trainable product of two thin matrices beside each query projection."""

    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.a = nn.Linear(base.in_features, 2, bias=False)
            self.b = nn.Linear(2, base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.base(x) + self.b(self.a(x))
            return result

    module.requires_grad_(False)
    for layer in module.model.layers:  # type: ignore[union-attr]
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
    return module


def test_frozen_weights_have_no_gradients_and_keep_no_activations() -> None:
    module, inputs = small("llama", 5)
    full = capture(module, inputs, name="x")
    graph = capture(_lora(module), inputs, name="x")
    trainable = {p.name for block in graph.blocks for p in block.parameters if p.trainable}
    assert trainable == {"self_attn.q_proj.a.weight", "self_attn.q_proj.b.weight"}
    frozen = [op for op in operators(graph) if op.module.endswith("mlp.down_proj")]
    assert all(kernel.gradient_of == "input" for op in frozen for kernel in op.backward)
    assert saved_bytes(graph, SAMPLES) == eager_saved_bytes(module, inputs), show_saved(graph)
    assert saved_bytes(graph, SAMPLES) < saved_bytes(full, SAMPLES)
    assert graph.model_flops(SAMPLES) == counted_flops(module, inputs)


def test_without_trainable_parameters_there_is_no_backward_pass() -> None:
    module, inputs = small("bert")
    graph = capture(module.requires_grad_(False), inputs, name="x")
    assert all(not op.backward and not op.saved for op in operators(graph))
    assert all(not link.sends for link in graph.chain)
    assert any("a step is a forward pass alone" in said for said in graph.warnings)


# -- what cannot be traced ----------------------------------------------------------------------------------------


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.open, self.closed = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.open(x) if x.sum() > 0 else self.closed(x)
        return result


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"linear": nn.Linear(8, 8), "gate": _Gate()}) for _ in range(5)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["gate"](layer["linear"](x))  # type: ignore[index]
        return x


def test_a_module_that_cannot_be_traced_is_a_priced_leaf_and_the_user_is_told() -> None:
    module = _Gated()
    graph = capture(module, torch.randn(2, 8), name="x")
    leaves = [op for op in operators(graph) if op.kind is OpKind.LEAF]
    assert len(leaves) == 5
    for leaf in leaves:
        assert leaf.forward[0].flops.at(4) == 2 * 4 * 8 * 8
        assert leaf.backward[0].flops.at(4) == 2 * 2 * 4 * 8 * 8
        assert leaf.saved[0].spec.numel(4) == 4 * 8 * 4  # its input, in bytes
        assert len(leaf.shardings) == 1
    (warning,) = graph.warnings
    assert "layers.*.gate" in warning
    assert "values of a tensor" in warning
    assert graph.parameter_count == sum(p.numel() for p in module.parameters())


class _Guarded(nn.Module):
    """As transformers' models, which look whether the ends of a row are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids) * (2.0 if 0 in ids[:, [-1, 0]] else 1.0)


def test_code_that_looks_at_some_of_its_inputs_values_is_traced() -> None:
    graph = capture(_Guarded(), torch.ones(2, 4, dtype=torch.int64), name="x")
    assert not graph.warnings
    assert OpKind.LEAF not in {op.kind for op in operators(graph)}


class _Levels(nn.Module):
    """Fills the sizes of its levels number by number, checks its data, and remembers a table between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    @lru_cache  # noqa: B019
    def table(self, length: int) -> Tensor:
        return torch.arange(length).float()

    @staticmethod
    @lru_cache
    def places(length: int, device: torch.device) -> Tensor:
        return torch.linspace(0.0, 1.0, length, device=device)

    def forward(self, x: Tensor) -> Tensor:
        sizes = torch.empty((2, 2), dtype=torch.int64)
        for level in range(2):
            sizes[level, 0], sizes[level, 1] = 2, level + 1
        first, rest = self.linear(x).split([*sizes.prod(1).tolist(), 2], dim=1)[0], x[:, 2:]
        torch._check_tensor_all(x == x.clone())
        if not self._forward_hooks:  # as code does that collects what its layers return
            self.register_forward_hook(lambda *_: None)
        return torch.cat([first, rest], dim=1) * self.table(8) + self.places(8, x.device)


class _Leveled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.level = _Levels()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.level(self.pad(x))
        return result

    def pad(self, x: Tensor) -> Tensor:
        return torch.cat([x, x[:, :2]], dim=1)


def test_what_a_model_checks_fills_and_remembers_does_not_keep_it_from_being_traced() -> None:
    module = _Leveled()
    graph = capture(module, torch.randn(2, 6), name="x")
    assert not graph.warnings
    assert not module.level._forward_hooks
    _Levels.places(8, torch.device("meta"))  # by somebody else, before
    for found in (graph, capture(module, torch.randn(2, 6), name="x")):
        targets = {op.target for op in operators(found)}
        assert all(any(name in target for target in targets) for name in ("arange", "linspace"))


class _Huge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(40_000, 40_000, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) if x.sum() > 0 else x
        return result


def test_what_can_neither_be_traced_nor_run_here_is_named_with_both_reasons() -> None:
    with pytest.raises(
        UserError, match=r"_Huge cannot be traced .*values of a tensor.*too large \(6.0 GiB\)"
    ):
        capture(_Huge(), torch.randn(2, 40_000), name="x")


def test_the_whole_model_can_be_a_leaf() -> None:
    graph = capture(_Gate(), torch.randn(2, 8), name="x")
    assert [op.kind for op in operators(graph)] == [OpKind.LEAF]
    assert "the whole model" in graph.warnings[0]


class _Areas(nn.Module):
    """Refuses boxes without an area, as detectors do, and goes on by how large they are."""

    def forward(self, boxes: Tensor, lengths: Tensor) -> Tensor:
        assert (boxes[:, 1] > boxes[:, 0]).all()
        assert lengths.min() > 0
        area = (boxes[:, 1] - boxes[:, 0])[:, None]
        return area / area.max() if area.max() > 1 else area


class _Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([_Areas()])
        self.last = nn.Linear(1, 4)

    def forward(self, boxes: Tensor, lengths: Tensor) -> Tensor:
        result: Tensor = self.last(self.heads[0](boxes.sigmoid(), lengths))
        return result


def test_what_runs_on_certain_numbers_alone_runs_on_the_examples_own() -> None:
    boxes, lengths = torch.tensor([[0.0, 1.0], [2.0, 3.0]]), torch.tensor([3, 1])
    direct = capture(_Areas(), (boxes, lengths), name="x")
    within = capture(_Detector(), (boxes, lengths), name="x")
    for graph in (direct, within):
        assert [op.kind for op in operators(graph)] == [OpKind.LEAF]
        assert "the whole model" in graph.warnings[0]
    with pytest.raises(UserError, match=r"_Detector can neither be traced .* nor run on the example inputs"):
        capture(_Detector(), (boxes.flip(1), lengths), name="x")


class _Dropping(nn.Module):
    """Leaves layers out by chance, as recognisers of speech do; some draw a number, others one in a row."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layers, self.shape = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), shape

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(self.shape).item() > 0.1:
                x = layer(x)
        return x


@pytest.mark.parametrize("shape", [(), (1,)])
def test_layers_that_are_left_out_by_chance_are_kept(shape: tuple[int, ...]) -> None:
    graph = capture(_Dropping(shape), torch.randn(2, 8), name="x")
    assert not graph.warnings
    assert sum(op.kind is OpKind.GEMM for op in operators(graph)) == 2


class _Squeezing(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x[ids > 0].squeeze()


def test_a_result_whose_dims_depend_on_values_is_told_so() -> None:
    with pytest.raises(UserError, match="has other dims with other samples"):
        capture(_Squeezing(), (torch.randn(3, 4), torch.tensor([0, 1, 1])), name="x")


def test_an_embedding_with_sparse_gradients_is_captured_as_the_dense_one() -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    sparse, dense = (capture(nn.Embedding(16, 8, sparse=s), ids, name="x") for s in (True, False))
    assert [op.backward for op in operators(sparse)] == [op.backward for op in operators(dense)]


class _Caching(nn.Module):
    """Makes its biases in the first call, and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(8, 8), None
        self.by_width: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            self.bias = torch.arange(8.0) / 8
        if 8 not in self.by_width:
            self.by_width[8] = torch.ones(8) / 2
        result: Tensor = self.linear(x) + self.bias * self.by_width[8]
        return result


def test_what_a_model_keeps_while_it_is_captured_is_not_kept() -> None:
    module = _Caching()
    graph = capture(module, torch.randn(2, 8), name="x")
    assert not graph.warnings
    assert (module.bias, module.by_width) == (None, {})
    assert module(torch.randn(2, 8)).device.type == "cpu"


def test_a_model_that_does_not_run_on_its_example_is_an_error_that_says_where() -> None:
    with pytest.raises(UserError, match=r"shapes|size"):
        capture(nn.Sequential(nn.Linear(8, 8), nn.Linear(4, 4)), torch.randn(2, 8), name="x")


@pytest.mark.parametrize("inputs", [{}, torch.tensor(1.0), torch.zeros(0, 2), {"number": 3}])
def test_example_inputs_without_samples_are_an_error(inputs: Any) -> None:
    with pytest.raises(UserError, match="no tensor with samples"):
        capture(nn.Linear(2, 2), inputs, name="x")


def test_modules_without_sizes_or_code_are_told_what_to_do() -> None:
    with pytest.raises(UserError, match=r"the size of 0\.weight is not known yet: call the module once"):
        capture(nn.Sequential(nn.LazyLinear(3)), torch.zeros(2, 3), name="x")
    with pytest.raises(UserError, match="TorchScript"):
        capture(torch.jit.script(nn.Linear(3, 3)), torch.zeros(2, 3), name="x")


# -- inputs, outputs, dtypes --------------------------------------------------------------------------------------


class _ManyInputs(nn.Module):
    """A float mask, an index and a number go in; two tensors in a dict come out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, ids: Tensor, mask: Tensor, *, power: int = 2) -> dict[str, Tensor]:
        x = self.table(ids) * mask[..., None] * self.scale
        return {"first": self.linear(x) ** power, "second": x.mean()}


def test_several_inputs_and_outputs_of_several_kinds() -> None:
    module = _ManyInputs()
    inputs = {"ids": torch.zeros(3, 5, dtype=torch.int64), "mask": torch.ones(3, 5), "power": 3}
    graph = capture(module, inputs, name="x")
    (block,) = graph.blocks
    assert [[s.at(7) for s in spec.shape] for spec in block.inputs] == [[7, 5], [7, 5]]
    assert len(block.outputs) == 2
    assert [name for name, _ in block.buffers] == ["scale"]
    assert graph.tokens_per_sample == 5


def test_mixed_dtypes_keep_theirs() -> None:
    module = nn.Sequential(nn.Linear(8, 8).bfloat16(), nn.LayerNorm(8).bfloat16())
    graph = capture(module, torch.randn(2, 8, dtype=torch.bfloat16), name="x")
    assert graph.dtype == "bfloat16"
    assert {spec.dtype for op in operators(graph) for spec in op.outputs} == {"bfloat16"}
    statistics = [
        s.spec.dtype for op in operators(graph) if op.kind is OpKind.NORM for s in op.saved if not s.value
    ]
    assert statistics == ["float32", "float32"] or statistics == ["bfloat16", "bfloat16"]


def test_dropout_is_one_operator_with_a_mask_of_bytes() -> None:
    module, inputs = small("gpt2", resid_pdrop=0.1)
    dropouts = [op for op in operators(capture(module, inputs, name="x")) if op.kind is OpKind.DROPOUT]
    assert dropouts
    for op in dropouts:
        assert [s.spec.dtype for s in op.saved if s.value == ""] == ["bool"]


def test_evaluation_mode_drops_nothing_out() -> None:
    module, inputs = small("gpt2", resid_pdrop=0.1)
    assert not [op for op in operators(capture(module.eval(), inputs, name="x")) if op.kind is OpKind.DROPOUT]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_the_hash_is_that_of_the_architecture_whatever_the_dtype_device_batch_and_loss(name: str) -> None:
    module, inputs = small(name)
    expected = graph_hash(capture(module, inputs, name="one"))
    shape = {key: value[:1] for key, value in inputs.items() if key != "labels"}
    assert graph_hash(capture(module, shape, name="two")) == expected
    low = module.to(torch.bfloat16)
    floats = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    assert graph_hash(capture(low, floats, name="three")) == expected
    empty = low.to("meta")
    empty.tie_weights()  # type: ignore[operator]  # .to("meta") makes two of one
    assert graph_hash(capture(empty, floats, name="four")) == expected
    other, its_inputs = small(name, 3)
    assert graph_hash(capture(other, its_inputs, name="one")) != expected


class _ByImage(nn.Module):
    """As models that leave room for images of several sizes: features are a list by sample, joined again."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.text = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("place", torch.tensor([1]))

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        features = list(self.tower(x))
        joined = torch.cat(features, dim=0)
        rows, merge = grid[0].tolist(), torch.as_tensor(2, device=x.device).item()
        mask = torch.vmap(lambda row: row > 0)(torch.arange(rows[0] * merge, device=x.device)[:, None])
        result: Tensor = self.text(joined * mask.sum()).sum()
        return result


def test_samples_that_are_taken_apart_and_joined_are_one_tensor() -> None:
    module, inputs = _ByImage(), {"x": torch.randn(2, 4, 8), "grid": torch.tensor([[2, 3], [2, 3]])}
    graph = capture(module, inputs, name="x")
    assert not [warning for warning in graph.warnings if "traced" in warning], graph.warnings
    assert graph.model_flops(2) == counted_flops(module, inputs)
    assert not {op.name for op in operators(graph)} & {"unbind", "cat"}
