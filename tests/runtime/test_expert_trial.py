from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autoparallel.runtime.experts.modules import expert_modules
from autoparallel.runtime.experts.trial import Trial
from autoparallel.runtime.limits import graph_limits
from autoparallel.runtime.ranks.accelerator import CPU
from autoparallel.runtime.torch_private import shard_in_parts
from tests.capture.models import captured
from tests.runtime.expert_models import EXPERT_EXAMPLES, LoopedExperts


@pytest.mark.parametrize(
    ("gate_and_up", "down", "result"),
    [
        (shard_in_parts(1, 2), Shard(2), Partial()),  # columns of each, then rows
        (Replicate(), Replicate(), Replicate()),
        (Replicate(), Shard(1), None),  # half as wide as what comes in
        (Shard(1), Shard(2), None),  # gate on one rank, up on the other
        (shard_in_parts(1, 2), Replicate(), None),
    ],
)
def test_a_trial_says_what_the_results_of_shares_are_to_each_other(
    gate_and_up: Placement, down: Placement, result: Placement | None
) -> None:
    with torch.device("meta"):
        example = EXPERT_EXAMPLES["mixtral"](1)
    layer = example.experts[0]
    trial = Trial(example.module.get_submodule(layer.path), layer, CPU)
    counts = trial.counts()
    assert counts == (("", "num_experts"),)
    assert trial.over({"gate_up_proj": gate_and_up, "down_proj": down}, 2, counts) == result


def test_a_trial_leaves_the_layer_as_it_was() -> None:
    example = EXPERT_EXAMPLES["routed"](1)
    layer = example.experts[0]
    owner = example.module.get_submodule(layer.path)
    before = dict(owner.named_parameters())
    assert Trial(owner, layer, CPU).counts() == (("", "count"),)
    assert all(parameter is before[name] for name, parameter in owner.named_parameters())
    assert (owner.count, owner.training) == (8, True)


@pytest.mark.parametrize("name", ["mixtral", "deepseek", "llama"])
def test_layers_of_experts_are_known_by_how_they_are_called(name: str) -> None:
    module, _, graph = captured(name)
    found = expert_modules(graph)
    assert found is not None
    assert [layer.path for layer in found] == [
        path for path, inner in module.named_modules() if "Experts" in type(inner).__name__
    ]
    assert graph_limits(graph) == {}
    for layer in found:
        assert (layer.hidden, layer.index, layer.weights) == ("hidden_states", "top_k_index", "top_k_weights")
        assert (layer.width, layer.choices, layer.experts) == (32, 2, 4)


def test_a_layer_that_is_called_otherwise_takes_ep_and_cp_out_of_a_search() -> None:
    graph = captured("mixtral")[2]
    blocks = [
        replace(
            block,
            calls=tuple(
                replace(call, inputs=call.inputs[:1]) if call.module == "mlp.experts" else call
                for call in block.calls
            ),
        )
        for block in graph.blocks
    ]
    other = replace(graph, blocks=tuple(blocks))
    assert expert_modules(other) is None
    assert graph_limits(other) == {"mesh.ep": 1, "mesh.cp": 1}


def _renamed(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def run(self: nn.Module, rows: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
        return forward(self, rows, weights, picked)

    return run


class _Decorated(LoopedExperts):
    forward = _renamed(LoopedExperts.forward)


def test_a_layer_whose_decorator_has_other_names_for_its_arguments_is_tried_out_all_the_same() -> None:
    layer = EXPERT_EXAMPLES["routed"](1).experts[0]
    assert Trial(_Decorated(8, 8), layer, CPU).counts() is not None
