"""Phases with longer sequences, on other meshes, train as one process does on the same samples."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autoparallel import UserError, auto_parallelize
from autoparallel.planner.strategy.types import Batch, Mesh, Phase, Pipeline, Strategy
from autoparallel.runtime.checkpoints.ledger import Ledger
from autoparallel.runtime.monitor.record import read_record
from tests.runtime.harness import Processes
from tests.runtime.models import VOCABULARY, gpt2, language_loss
from tests.runtime.shared import remembered_cuts
from tests.runtime.test_resumed_gradients import Quiet

STRATEGY = Strategy(
    batch=Batch(global_=8, micro=2), mesh=Mesh(dp_replicate=2), pipeline=Pipeline(stage_blocks=(2,)),
    phases=(
        Phase(from_step=3, keys=(("batch.seq_len", 16), ("batch.global", 4), ("batch.micro", 4), ("mesh.dp_replicate", 1),
                                 ("mesh.tp", 2))),
        Phase(from_step=5, keys=(("batch.seq_len", 8), ("batch.micro", 2), ("mesh.tp", 1), ("mesh.pp", 2),
                                 ("pipeline.schedule", "1f1b"), ("pipeline.stage_blocks", (1, 1)))),
    ),
)  # fmt: skip
# Tokens per sequence and sequences of the steps.
STEPS = [(8, 8)] * 2 + [(16, 4)] * 2 + [(8, 4)] * 2


class Texts(torch.utils.data.Dataset[Any]):
    def __init__(self, tokens: int, samples: int) -> None:
        self.tokens, self.samples = tokens, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(self.tokens * 1000 + index)
        ids = torch.randint(0, VOCABULARY, (self.tokens,), generator=generator)
        return {"input_ids": ids}, ids.roll(-1)


DATA = {8: Texts(8, 20), 16: Texts(16, 6)}
LEARN = partial(torch.optim.AdamW, lr=0.01, eps=1e-4)


class Again(Quiet):
    """Goes back to the last checkpoint once, from a phase into the one before it."""

    def _keep(self, *, last: bool) -> bool:
        if self.step == 5 and not hasattr(self, "gone_back"):
            self.gone_back = True
            self._roll_back(leave_out=False)
            return False
        return super()._keep(last=last)


def _model() -> torch.nn.Module:
    torch.manual_seed(3)
    return gpt2(1).module.double()


def _alone() -> list[float]:
    """The losses of one process that trains the plain module."""
    model = _model()
    optimizer = LEARN(model.parameters())
    ledgers = {tokens: Ledger(samples=len(data), seed=7) for tokens, data in DATA.items()}
    losses = []
    for tokens, size in STEPS:
        items = [DATA[tokens][i] for i in ledgers[tokens].batch(size).tolist()]
        ledgers[tokens] = ledgers[tokens].after(size)
        optimizer.zero_grad()
        ids, targets = torch.stack([x["input_ids"] for x, _ in items]), torch.stack([y for _, y in items])
        loss = language_loss(model(input_ids=ids), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    losses = dict[int, float]()
    make = partial(
        Again, optimizer=LEARN, loss_fn=language_loss, cluster="cpu-gloo:1x2", every=3, seed=7,
        global_batch=8, on_step=lambda step: losses.update({step.number: step.loss}),
    )  # fmt: skip
    refused = []
    for data in (DATA[8], {8: DATA[8], 16: Texts(15, 6)}):
        with pytest.raises(UserError) as error:
            make(_model(), data=data, strategy=STRATEGY, folder=Path(folder) / f"refused-{len(refused)}")
        refused.append(str(error.value))
    for end in (3, 6):  # the second goes on in the middle of a phase
        trainer = make(_model(), data=DATA, strategy=STRATEGY, folder=Path(folder) / "run")
        with remembered_cuts("phases of gpt2"):
            trainer.fit(end)
        trainer.close()
        torch.distributed.barrier()
    model = trainer.model
    with pytest.raises(UserError) as error:
        model.step({"input_ids": torch.zeros(2, 16, dtype=torch.int64)}, torch.zeros(2, 16, dtype=torch.int64),
                   loss_fn=language_loss)  # fmt: skip
    refused.append(str(error.value))
    return {
        "losses": [losses[n + 1] for n in range(len(STEPS))],
        "refused": refused,
        "ledger": trainer.ledger.handed_out,
    }


@pytest.mark.distributed
def test_longer_sequences_on_other_meshes_train_as_in_one_process(gloo: Processes, tmp_path: Path) -> None:
    alone = _alone()
    for found in gloo.run(2, trained, folder=str(tmp_path)):
        assert found["losses"] == pytest.approx(alone, rel=1e-9)
        assert found["ledger"] == 8 * 2 + 4 * 2, (
            "steps of eight tokens, in two phases, read on in one dataset"
        )
        none, wrong, fed = found["refused"]
        assert "from step 3: batch.seq_len = 16: Trainer has no data" in none
        assert "from step 3: batch.seq_len = 16: phase_inputs[16] has sequences of 15" in wrong
        assert "sequences of 16 tokens" in fed
        assert "batch.seq_len = 8" in fed
    times = [one.start["predicted"]["step_time_s"] for one in read_record(tmp_path / "run")]
    assert len(set(times)) == 3, f"each phase is predicted with its own sequences: {times}"


def test_a_length_that_the_model_does_not_take_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    file, example = tmp_path / "strategy.toml", gpt2(2)
    file.write_text("[batch]\nglobal = 2\n[[phase]]\nfrom_step = 9\nbatch.seq_len = 64\n")
    before = copy.deepcopy(example.module.state_dict())
    for inputs, words in (
        ({}, "phase_inputs={64: …}"),
        ({64: {"input_ids": torch.zeros(2, 64, dtype=torch.int64)}}, "row 63 of a table of 32 rows"),
    ):
        with pytest.raises(UserError, match=r"from step 9: batch\.seq_len = 64") as error:
            auto_parallelize(
                example.module,
                example.inputs,
                strategy=file,
                cluster="cpu-gloo:1x1",
                cache=None,
                phase_inputs=inputs,
            )
        assert words in str(error.value)
    assert type(example.module).__name__ == "GPT2LMHeadModel"
    torch.testing.assert_close(example.module.state_dict(), before)
