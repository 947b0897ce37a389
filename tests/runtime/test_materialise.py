from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoparallel.errors import UserError
from autoparallel.runtime.start import parallelize
from tests.runtime.compare import strategy_of
from tests.runtime.harness import Processes
from tests.runtime.models import EXAMPLES
from tests.runtime.shared import no_program

pytestmark = pytest.mark.distributed


def _initial_state(
    rank: int, world_size: int, name: str, options: dict[str, Any]
) -> tuple[dict[str, Any], Any]:
    """Rank 0's full state of a model built on the meta device, and the bytes of this rank's parameters."""
    torch.manual_seed(3 + rank)  # only rank 0's generator may count
    with torch.device("meta"):
        module = EXAMPLES[name](1).module
    example = EXAMPLES[name](1)
    strategy = strategy_of(example, **options)
    model = parallelize(module, example.inputs, strategy, blocks=example.blocks, program=no_program)
    held = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    state = model.full_state_dict()
    model.step(*(_repeat(x, strategy) for x in (example.inputs, example.targets)), loss_fn=example.loss_fn)
    assert all(p.grad is not None for p in model.parameters())
    return state, sum(part.numel() for part in held)


def _repeat(batch: Any, strategy: Any) -> Any:
    count = strategy.batch.micro * strategy.micro_batches
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: torch.cat([t] * count), batch)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mlp", "resnet"])
def test_a_model_built_on_meta_starts_the_same_under_every_strategy(gloo: Processes, name: str) -> None:
    alone, whole = gloo.run(1, _initial_state, name=name, options={})[0]
    for options in ({"dp_shard": 2, "zero": 3}, {"tp": 2}, {"dp_replicate": 2}):
        results = gloo.run(2, _initial_state, name=name, options=options)
        state = results[0][0]
        assert state.keys() == alone.keys()
        for key, value in alone.items():
            assert torch.equal(state[key], value), (options, key)
        if "dp_shard" in options:
            assert max(held for _, held in results) <= whole / 2 + 64


def test_a_model_on_meta_is_initialised_the_way_its_library_does(gloo: Processes) -> None:
    state, _ = gloo.run(1, _initial_state, name="llama", options={})[0]
    assert torch.all(state["model.norm.weight"] == 1)
    assert 0.015 < state["model.layers.0.mlp.up_proj.weight"].std() < 0.025  # initializer_range 0.02


class _Uninitialisable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device="meta"))


def test_a_meta_parameter_that_nothing_initialises_is_refused_by_name() -> None:
    example = EXAMPLES["mlp"](1)
    with pytest.raises(UserError, match="weight on the meta device"):
        parallelize(_Uninitialisable(), torch.ones(1), strategy_of(example), blocks=[], program=no_program)


def test_shares_cut_by_two_axes_along_the_same_dim_are_the_whole(gloo: Processes) -> None:
    alone, _ = gloo.run(1, _initial_state, name="llama", options={})[0]
    state, _ = gloo.run(4, _initial_state, name="llama", options={"dp_shard": 2, "tp": 2, "zero": 3})[0]
    assert all(torch.equal(state[key], value) for key, value in alone.items())
