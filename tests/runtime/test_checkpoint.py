"""A run that changes its strategy after every step, by way of checkpoints, has the losses of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from autoparallel.errors import UserError
from autoparallel.runtime.start import parallelize
from tests.runtime.compare import part, reference_step
from tests.runtime.harness import Processes
from tests.runtime.pipelines import deep, pipeline_strategy
from tests.runtime.shared import no_program, remembered_cuts

pytestmark = pytest.mark.distributed

SAMPLES, RATE = 8, 0.01
EVEN, IN_A_V = {"schedule": "1f1b", "stage_blocks": (2, 2)}, {"schedule": "zbv", "stage_blocks": (1,) * 4}
Case = tuple[dict[str, Any], dict[str, Any]]  # options of `strategy_of`, the pipeline
ON_TWO: dict[str, Case] = {
    "zero 3": ({"dp_shard": 2, "zero": 3}, {}),
    "pipeline": ({"pp": 2}, EVEN),
    "tensors, state on the host": ({"tp": 2, "optimizer_offloaded": 1.0}, {}),
    "pipeline in a V, state on the host": (
        {"pp": 2, "optimizer_offloaded": 1.0},
        {**IN_A_V, "virtual_stages": 2},
    ),
    "zero 1, half on the host": ({"dp_shard": 2, "zero": 1, "optimizer_offloaded": 0.5}, {}),
    "replicas": ({"dp_replicate": 2}, {}),
}
ON_FOUR: dict[str, Case] = {
    "pipeline, zero 3, state on the host": (
        {"pp": 2, "dp_shard": 2, "zero": 3, "optimizer_offloaded": 1.0},
        EVEN,
    ),
    "pipeline of tensors": ({"pp": 2, "tp": 2, "without": "lm_head"}, EVEN),
    "tensors, zero 2, state on the host": (
        {"tp": 2, "dp_shard": 2, "zero": 2, "optimizer_offloaded": 1.0},
        {},
    ),
}


def _made(case: Case, name: str, *, own: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model under a strategy, its optimizer (torch's `own`, or the model's), and what takes one step of both."""
    example = deep(name, SAMPLES, torch.float64)
    ranks = case[0].get("dp_shard", 1) * case[0].get("dp_replicate", 1)
    share = SAMPLES // ranks
    strategy = pipeline_strategy(example, case[1], {"micro": share // 2, "micro_batches": 2, **case[0]})
    with torch.no_grad():
        for parameter in example.module.parameters():
            parameter.zero_()  # what is not loaded shows
    with remembered_cuts(name, len(example.blocks), "float64", strategy.batch.micro):
        model = parallelize(
            example.module,
            part(example.inputs, 0, share),
            strategy,
            blocks=example.blocks,
            program=no_program,
        )
    if own:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    else:
        optimizer = model.optimizer(torch.optim.AdamW, lr=0.7 * RATE)  # the rate is loaded, too
    first = model.data_parallel_rank * share
    batch = [part(b, first, first + share) for b in (example.inputs, example.targets)]

    def step() -> float:
        optimizer.zero_grad()
        loss: float = model.step(*batch, loss_fn=example.loss_fn).item()
        optimizer.step()
        return loss

    return model, optimizer, step


def _one_process(name: str, steps: int, folder: str) -> list[float]:
    """Losses of torch's own AdamW; the checkpoint is of what it begins with."""
    example = deep(name, SAMPLES, torch.float64)
    alone = deep(name, SAMPLES, torch.float64)
    dcp.save({"model": example.module}, checkpoint_id=folder, no_dist=True)
    optimizer = torch.optim.AdamW(alone.module.parameters(), lr=RATE)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(reference_step(alone.module, example, SAMPLES // 4, 4))
        optimizer.step()
    return losses


def changing(rank: int, world_size: int, name: str, cases: dict[str, Case], folder: str) -> list[float]:
    """The loss of one step under each strategy, every one going on from the checkpoint of the one before."""
    losses = []
    for index, case in enumerate(cases.values()):
        model, optimizer, step = _made(case, name)
        begun = {"model": model} if index == 0 else {"model": model, "optimizer": optimizer}
        dcp.load(begun, checkpoint_id=f"{folder}/{index}")
        for group in optimizer.param_groups if index == 0 else ():
            group["lr"] = RATE
        losses.append(step())
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=f"{folder}/{index + 1}")
    return losses


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("ranks", "name"), [(2, "mlp"), (4, "gpt2")])
def test_a_run_goes_on_under_other_strategies(gloo: Processes, tmp_path: Path, ranks: int, name: str) -> None:
    cases = ON_TWO if ranks == 2 else ON_FOUR
    straight = _one_process(name, len(cases), f"{tmp_path}/0")
    for losses in gloo.run(ranks, changing, name=name, cases=cases, folder=str(tmp_path)):
        found = dict(zip(cases, losses, strict=True))
        assert found == pytest.approx(dict(zip(cases, straight, strict=True)), rel=1e-9)


def kept_by_torch(rank: int, world_size: int, folder: str) -> tuple[float, list[float]]:
    """The loss after a checkpoint that torch's own functions wrote: without a break, and under other strategies."""
    model, optimizer, step = _made(ON_TWO["zero 3"], "mlp", own=True)
    dcp.load({"model": model}, checkpoint_id=f"{folder}/0")
    step()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state, optimizer_state = get_state_dict(model, optimizer, options=flat)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/1")
    straight, losses = step(), []
    for case in ("tensors, state on the host", "pipeline"):
        model, optimizer, step = _made(ON_TWO[case], "mlp")
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=f"{folder}/1")
        losses.append(step())
    model, optimizer, step = _made(ON_TWO["replicas"], "mlp", own=True)
    state, optimizer_state = get_state_dict(model, optimizer, options=flat)
    dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/1")
    set_state_dict(
        model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state, options=flat
    )  # fmt: skip
    return straight, [*losses, step()]


def test_what_torch_keeps_by_names_is_loaded(gloo: Processes, tmp_path: Path) -> None:
    _one_process("mlp", 0, f"{tmp_path}/0")
    for straight, losses in gloo.run(2, kept_by_torch, folder=str(tmp_path)):
        assert losses == pytest.approx([straight] * len(losses), rel=1e-9)


def refusals(rank: int, world_size: int) -> list[str]:
    """What a step without the model's optimizer, and a state of another one, are refused with."""
    found = []
    _, _, step = _made(ON_TWO["zero 1, half on the host"], "mlp", own=True)
    _, optimizer, _ = _made(ON_TWO["replicas"], "mlp")
    state = optimizer.state_dict()
    for refused in (
        step,
        lambda: optimizer.load_state_dict({k: v for k, v in state.items() if "exp_avg_sq" not in k}),
    ):
        try:
            refused()
        except UserError as error:
            found.append(str(error))
    return found


def test_state_in_the_wrong_place_and_state_that_is_missing_are_refused(gloo: Processes) -> None:
    place, missing = gloo.run(2, refusals)[0]
    assert "make yours with model.optimizer(torch.optim.AdamW, lr=...), or set it to 0" in place
    assert "nothing for state.blocks.0." in missing
