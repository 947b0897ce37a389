from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from autoparallel.errors import UserError
from autoparallel.planner.strategy.types import Pipeline
from autoparallel.runtime.loading.weights import find_weights, share_ranges
from autoparallel.runtime.start import parallelize
from tests.runtime.compare import strategy_of
from tests.runtime.harness import Processes
from tests.runtime.models import EXAMPLES, Mlp
from tests.runtime.shared import no_program

CASES: dict[str, tuple[int, dict[str, Any], int]] = {
    "alone": (1, {}, 0),
    "zero 3 of columns and rows": (4, {"tp": 2, "dp_shard": 2, "zero": 3}, 0),
    "two stages, of which both hold the tied weight": (2, {"pp": 2}, 1),
}


def _saved(folder: Path, name: str) -> dict[str, Tensor]:
    """A checkpoint as transformers writes it, in several files, and what it holds."""
    module = EXAMPLES[name](1).module
    module.save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return {n: t.clone() for n, t in module.state_dict().items()}


def _loaded(
    rank: int, world_size: int, name: str, folder: Path, options: dict[str, Any], stages: int
) -> tuple[dict[str, Any], int]:
    torch.manual_seed(100 + rank)
    with torch.device("meta"):
        module = EXAMPLES[name](1).module
    example = EXAMPLES[name](2)
    strategy = strategy_of(example, **options)
    if stages:
        pipeline = Pipeline(schedule="gpipe", stage_blocks=(1, 1))
        strategy = replace(strategy, pipeline=pipeline)
    model = parallelize(
        module, example.inputs, strategy, blocks=example.blocks, program=no_program, weights=folder
    )
    read = sum(
        int(torch.tensor([sum(b - a for a, b in own) for own in share_ranges(p)]).prod())
        for p in model.parameters()
    )
    return model.full_state_dict(), read


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_checkpoint_is_read_share_by_share_under_every_strategy(
    gloo: Processes, tmp_path: Path, name: str
) -> None:
    wanted = _saved(tmp_path, name)
    numbers = sum(t.numel() for n, t in wanted.items() if n != "lm_head.weight")
    for ranks, options, stages in CASES.values():
        results = gloo.run(ranks, _loaded, name=name, folder=tmp_path, options=options, stages=stages)
        state = results[0][0]
        assert state.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(state[key], value), (options, key)
        if "tp" in options:
            assert max(read for _, read in results) < 0.8 * numbers / 2, "no rank reads more than its share"


def test_tensors_that_are_not_there_are_named(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    save_file({"blocks.0.up.weight": torch.zeros(32, 16)}, path)
    with pytest.raises(UserError, match=r"blocks\.0\.scale.*the files hold blocks\.0\.up\.weight"):
        find_weights(path, Mlp(depth=1))


def test_another_shape_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    module = nn.Linear(3, 2, device="meta")
    save_file({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, path)
    with pytest.raises(UserError, match=r"\[3, 2\] but the module's weight has \[2, 3\]"):
        parallelize(
            module,
            torch.ones(1, 3),
            strategy_of(EXAMPLES["mlp"](1)),
            blocks=[],
            program=no_program,
            weights=path,
        )
    assert module.weight.is_meta


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("no tensors")
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UserError, match="or a folder with model"):
            find_weights(path, Mlp())
