"""A loop over the tokens of a sequence costs what it costs, and is traced a few rounds long."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoparallel.costmodel.graph_json import graph_from_json, graph_to_json
from autoparallel.planner.capture import capture, trace
from autoparallel.planner.capture.nodes import calls
from benchmarks.coverage.eager import graph_saved_bytes as saved_bytes
from tests.capture.measured import counted_flops, eager_saved_bytes, show_saved

STEPS = 48


class Scan(nn.Module):
    """A state that each token changes, as in a state-space model."""

    def __init__(self, width: int = 8, state: int = 4) -> None:
        super().__init__()
        self.into, self.decay = nn.Linear(width, state), nn.Linear(width, state)
        self.mix, self.out = nn.Parameter(torch.randn(state, state)), nn.Linear(state, width)

    def forward(self, x: Tensor) -> Tensor:
        added, decay = self.into(x), torch.sigmoid(self.decay(x))
        state = torch.zeros_like(added[:, 0])
        states = []
        for token in range(x.shape[1]):
            state = torch.tanh(state @ self.mix * decay[:, token] + added[:, token])
            states.append(state)
        return self.out(torch.stack(states, dim=1)).sum()


class Written(nn.Module):
    """As `Scan`, but each step writes its result into one tensor."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.into = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.into(x)
        out, state = torch.zeros_like(keys), torch.zeros_like(keys[:, 0])
        for token in range(x.shape[1]):
            state = torch.maximum(state, keys[:, token]).exp()
            out[:, token] = state * 0.5
        return out.sum()


class Opened(nn.Module):
    """As `Scan`, with casts that change nothing, functions that torch has in Python, and a step in
    the middle that does something else."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.into = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.into(x)
        out, state = [], torch.zeros_like(keys[:, 0])
        for token in range(x.shape[1]):
            state = torch.nn.functional.silu(state.to(torch.float32) + keys[:, token]).unflatten(-1, (2, 4))
            state = state.flip(1).flatten(1).to(keys)
            state = state.sin().mul(2.0) if token == STEPS // 2 else state
            out.append(state)
        return torch.stack(out).sum()


class Unlike(nn.Module):
    """Rounds with a parameter each: layers, not a scan."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width, width) for _ in range(STEPS))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.relu(x @ weight)
        return x.sum()


class Growing(nn.Module):
    """Rounds of other sizes each."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.into = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        return torch.stack([x[:, : token + 1].exp().sum() for token in range(x.shape[1])]).sum()


@pytest.mark.parametrize("kind", [Scan, Written, Opened, Unlike, Growing])
def test_loops_cost_what_they_cost(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module, inputs = kind(), {"x": torch.randn(2, STEPS, 8)}
    graph = capture(module, inputs, name="loop")
    assert graph.model_flops(2) == counted_flops(module, inputs)
    assert saved_bytes(graph, 2) == eager_saved_bytes(module, inputs), show_saved(graph)
    assert graph_from_json(graph_to_json(graph)) == graph
    assert not any("not used" in warning for warning in graph.warnings)


@pytest.mark.parametrize(
    ("kind", "fewer"), [(Scan, True), (Written, True), (Opened, True), (Unlike, False), (Growing, False)]
)
def test_only_equal_rounds_are_counted(kind: type[nn.Module], fewer: bool) -> None:
    graph = trace(kind(), torch.randn(2, STEPS, 8)).graph
    repeated = [call for call in calls(graph) if call.meta.get("rounds", 1) > 1]
    assert bool(repeated) == fewer
    for call in repeated:
        name, frame = call.meta["torch_name"], call.meta["frame"]
        alike = [c for c in calls(graph) if c.meta["torch_name"] == name and c.meta["frame"] is frame]
        assert sum(c.meta.get("rounds", 1) for c in alike) >= STEPS
