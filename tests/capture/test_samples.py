"""A model that goes through its samples one by one costs what it costs at every micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoparallel.costmodel.graph import OpKind
from autoparallel.costmodel.graph_json import graph_from_json, graph_to_json
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.samples import matched, runs
from benchmarks.coverage.eager import graph_saved_bytes as saved_bytes
from tests.capture.measured import counted_flops, eager_saved_bytes, show_saved

WIDTH, HEADS, PLACES = 8, 2, 6


class EachImage(nn.Module):
    """Attention within each image of a row of images, `windows` of it apart."""

    def __init__(self, windows: int = 1) -> None:
        super().__init__()
        self.qkv, self.out, self.windows = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), windows

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        q, k, v = self.qkv(rows).reshape(len(rows), 3, HEADS, -1).permute(1, 2, 0, 3).unbind(0)
        lengths = [x.shape[1] // self.windows] * (len(x) * self.windows)
        parts = [torch.split(t[None], lengths, dim=2) for t in (q, k, v)]
        attended = [
            F.scaled_dot_product_attention(*each).transpose(1, 2) for each in zip(*parts, strict=True)
        ]
        return self.out(torch.cat(attended, dim=1).reshape(len(rows), WIDTH)).square().sum()


class EachSample(nn.Module):
    """Layers that run once for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for index in range(len(x)):
            sample = x[index]
            for layer in self.layers:
                sample = torch.tanh(layer(sample))
            found.append(sample)
        return torch.stack(found).square().sum()


class ManyWindows(EachImage):
    """More windows than rounds of a loop are traced, side by side first."""

    def __init__(self) -> None:
        super().__init__(windows=12)

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat_interleave(4, dim=1)
        pieces = x.flatten(0, 1).split([x.shape[1] // self.windows] * (len(x) * self.windows))
        return super().forward(nn.utils.rnn.pad_sequence(pieces, batch_first=True).view(x.shape))


class Filled(EachSample):
    """Points of each sample that pass a threshold, written into a row of their own and scaled."""

    def forward(self, x: Tensor) -> Tensor:
        found = [sample[tuple((sample.detach() > 0.5).nonzero().t())] for sample in self.layers[0](x)]
        room = torch.zeros(len(x), max(map(len, found)))
        for index, points in enumerate(found):
            room[index, : len(points)] = points
        return (room[..., None] / torch.tensor([2.0, 4.0])).square().sum()


class Returned(EachImage):
    """Loss and features, apart for each image."""

    def forward(self, x: Tensor) -> Any:
        features = self.out(x.flatten(0, 1))
        return features.square().sum(), torch.split(features, [x.shape[1]] * len(x))


MODELS = {
    "images": EachImage,
    "windows": lambda: EachImage(windows=PLACES // 2),
    "samples": EachSample,
    "many windows": ManyWindows,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [1, 4, 7])
def test_flops_and_saved_bytes_are_those_of_all_samples(name: str, batch: int) -> None:
    module, inputs = MODELS[name](), {"x": torch.randn(batch, PLACES, WIDTH)}
    graph = capture(module, {"x": torch.randn(2, PLACES, WIDTH)}, name=name)
    assert graph_from_json(graph_to_json(graph)) == graph
    assert graph.model_flops(batch) == counted_flops(module, inputs)
    assert saved_bytes(graph, batch) == eager_saved_bytes(module, inputs), show_saved(graph)


def test_half_of_the_entries_of_each_sample_pass_a_threshold() -> None:
    graph = capture(Filled(), {"x": torch.randn(2, PLACES, WIDTH)}, name="filled")
    assert [warning for warning in graph.warnings if "what its data choose" in warning], graph.warnings
    assert not [op for block in graph.blocks for op in block.operators if op.kind is OpKind.LEAF]
    sizes = {
        spec.numel(3)
        for block in graph.blocks
        for op in block.operators
        for spec in (s.spec for s in op.saved)
    }
    assert 3 * PLACES * WIDTH // 2 * 2 in sizes, show_saved(graph)  # the points, each scaled twice


def test_what_is_returned_for_each_sample_is_one_output() -> None:
    graph = capture(Returned(), {"x": torch.randn(2, PLACES, WIDTH)}, name="returned")
    whole = capture(EachImage().out, (torch.randn(2 * PLACES, WIDTH),), name="whole")
    assert graph.model_flops(4) == whole.model_flops(4 * PLACES)


def test_a_sequence_is_read_by_the_rounds_of_a_longer_one() -> None:
    long = "a bc bc bc bc dd e"
    pattern = runs(long)
    assert [(long[r.start : r.start + r.period], r.rounds) for r in pattern if r.rounds > 1] == [
        (" bc", 4),
        ("d", 2),
    ]
    assert [r.rounds for r in matched(pattern, long, "a bc bc dd e") or ()] == [1, 2, 1, 2, 1, 1]
    assert matched(pattern, long, "a bc bd dd e") is None


def test_a_run_takes_no_more_rounds_than_leave_the_rest() -> None:
    # three times alike by name, of which the third is another call: lengths by numbers, in the longer one
    pattern = runs("xababABcdcdcde")
    of = "xabababcdcdcde"
    assert [r.rounds for r in pattern if r.rounds > 1] == [2, 3]
    assert [r.rounds for r in matched(pattern, of, "xabababcde") or () if r.period > 1] == [2, 1]
    assert matched(pattern, of, "xababce") is None
