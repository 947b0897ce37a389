"""Recomputation of operators keeps exactly the bytes that are priced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoparallel.errors import UserError
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.load import keyword_inputs
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.strategy.types import Batch, Execution, Recompute, Strategy
from autoparallel.profiles.load import load_cluster
from autoparallel.runtime.memory.recompute import attention_kernel, is_kept, recompute_blocks
from tests.runtime.expert_models import EXPERT_EXAMPLES
from tests.runtime.models import EXAMPLES

MODELS = ("llama", "qwen3", "gpt2", "vit", "resnet", "mixtral", "deepseek")


class _Kept(TorchDispatchMode):
    """Adds up what operators return whose results are kept."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if is_kept(func):
            tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return output


def _kept_by(block: nn.Module, run: Callable[[], Any]) -> int:
    """Bytes of the block's first input and of what its operators return that are kept."""
    forward, kept, inputs = block.forward, _Kept(), list[int]()

    def watched(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0]
        inputs.append(hidden.numel() * hidden.element_size() if hidden.requires_grad else 0)
        with kept:
            return forward(*args, **kwargs)

    block.forward = watched  # type: ignore[method-assign]
    run()
    return kept.bytes + inputs[0]


@pytest.mark.parametrize("name", MODELS)
def test_what_recomputation_of_operators_keeps_is_what_is_priced(name: str) -> None:
    example = (EXAMPLES | EXPERT_EXAMPLES)[name](2)
    module = example.module.float()
    inputs: Mapping[str, Any] = keyword_inputs(module, example.inputs)
    graph = capture(module, inputs, name=name)
    link = graph.chain[graph.repeated_positions[0]]
    strategy = Strategy(
        batch=Batch(global_=2, micro=2), recompute=Recompute(mode="operators"),
        execution=Execution(dtype="fp32", param_dtype="fp32", master_weights=False, kernels="eager"),
    )  # fmt: skip
    priced = Expander(graph, load_cluster("cpu-gloo:1x1")).work(strategy, link.block, "operators")
    kept = _kept_by(module.get_submodule(link.path), lambda: module(**inputs))
    assert priced.saved_bytes == kept


class _Scaled(nn.Module):
    """Divides what its projection returns in place, or remembers it in what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, memory: _Memory | None = None) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        if memory is not None:
            memory.kept.append(y)
            return torch.cat(memory.kept).sum(0)
        return y.div_(2.0).tanh()


class _Memory:
    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


def test_a_block_that_a_second_run_would_not_repeat_is_named() -> None:
    module = nn.Sequential(_Scaled(), nn.Linear(4, 4))
    recompute_blocks(module, ["0"], mode="full")
    with pytest.raises(UserError, match="use_cache = False"):
        module[0](torch.randn(2, 4, requires_grad=True), _Memory())


def test_a_product_that_something_is_written_into_runs_again() -> None:
    torch.manual_seed(0)
    x, gradients = torch.randn(2, 4, dtype=torch.float64), []
    module = nn.Sequential(_Scaled(), _Scaled()).double()
    for mode in ("none", "operators"):
        module.zero_grad()
        recompute_blocks(module, ["0", "1"], mode=mode)
        module(x).sum().backward()
        gradients.append([p.grad for p in module.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("mode", ["full", "operators"])
def test_batch_norms_count_what_runs_again_once(mode: str) -> None:
    states = []
    for own in ("none", mode):
        torch.manual_seed(0)
        example = EXAMPLES["resnet"](4)
        recompute_blocks(example.module, example.blocks, mode=own)
        for _ in range(2):
            example.module(*example.inputs).square().sum().backward()
        states.append(example.module.state_dict() | {n: p.grad for n, p in example.module.named_parameters()})
    torch.testing.assert_close(*states, rtol=0.0, atol=0.0)


class _Remembers(nn.Module):
    """Weights made by spectral norm, and a table of means that each pass both reads and moves."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("table", torch.randn(4, 6))
        self.register_buffer("bias", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        nearest = torch.cdist(hidden, self.table).argmin(1)
        read = self.table[nearest] + self.bias
        with torch.no_grad():
            self.table = self.table.index_add(0, nearest, 0.1 * (hidden - read))
        return x + hidden * read


@pytest.mark.parametrize("mode", ["full", "operators"])
def test_a_second_run_starts_from_the_buffers_of_the_first(mode: str) -> None:
    """Also where other micro-batches have passed in between, as in pipelines."""
    states = []
    for own in ("none", mode):
        torch.manual_seed(0)
        module = nn.Sequential(_Remembers(), _Remembers())
        recompute_blocks(module, ["0", "1"], mode=own)
        for _ in range(2):
            outputs = [module(torch.randn(5, 6)) for _ in range(3)]
            for output in outputs:
                output.square().sum().backward()
        states.append(module.state_dict() | {n: p.grad for n, p in module.named_parameters()})
    torch.testing.assert_close(*states, rtol=0.0, atol=0.0)


def test_attention_inside_of_torch_s_multi_head_attention_runs_again() -> None:
    length, heads, kept, results = 64, 2, [], []
    hidden = torch.randn(2, length, 8)
    for mode in ("none", "selective"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.TransformerEncoderLayer(8, heads, 8, dropout=0.1, batch_first=True))
        recompute_blocks(module, ["0"], mode=mode, attention="unfused")
        with attention_kernel("unfused"), saved_numels() as numels:
            module(hidden).square().sum().backward()
        kept.append(max(numels))
        results.append([p.grad for p in module.parameters()])
    scores = 2 * heads * length * length
    assert kept[0] == scores > kept[1], kept
    torch.testing.assert_close(*results, rtol=0.0, atol=0.0)


@contextmanager
def saved_numels() -> Iterator[list[int]]:
    """How many numbers each tensor has that autograd keeps."""
    found: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


def test_blocks_whose_multi_head_attention_runs_again_compile_as_one_graph() -> None:
    module = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True))
    recompute_blocks(module, ["0"], mode="selective")
    hidden = torch.randn(2, 4, 8)
    compiled = torch.compile(module[0].forward, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden), module[0](hidden))
