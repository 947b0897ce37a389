from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autoparallel import Strategy, UserError, auto_parallelize
from autoparallel.costmodel.graph_json import graph_hash
from autoparallel.costmodel.program import Program
from autoparallel.planner import plan as search
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.load import keyword_inputs
from autoparallel.planner.outcome import PlanResult
from autoparallel.planner.problem import Problem
from autoparallel.planner.score import score
from autoparallel.planner.strategy.file import read_strategy_file
from autoparallel.planner.strategy.types import Batch, Mesh, Pipeline, Recompute, Shard
from autoparallel.planner.strategy.write import write_strategy
from autoparallel.runtime.capabilities.table import limits
from autoparallel.runtime.limits import on_devices
from tests.runtime.models import Mlp

ROOT = Path(__file__).resolve().parents[2]


def _inputs(samples: int = 4) -> torch.Tensor:
    return torch.randn(samples, 16)


def _alone(global_batch: int = 4) -> Strategy:
    return Strategy(batch=Batch(global_=global_batch, micro=2), pipeline=Pipeline(stage_blocks=(3,)))


def _hash() -> str:
    return graph_hash(capture(Mlp(), keyword_inputs(Mlp(), _inputs()), name="Mlp"))


def test_alone_in_one_process_a_strategy_runs_and_says_its_program() -> None:
    module = Mlp()
    model = auto_parallelize(module, _inputs(), strategy=_alone())
    assert model is module
    loss = model.step(_inputs(), torch.tensor([1, 2, 3, 4]), loss_fn=F.cross_entropy)
    assert torch.isfinite(loss)
    assert all(p.grad is not None for p in model.parameters())
    assert isinstance(model.program, Program)
    assert model.strategy.execution.dtype == "fp32", "taken from the module"
    assert (model.data_parallel_rank, model.data_parallel_size) == (0, 1)


def test_tf32_is_set_where_it_is_asked_for_and_only_there() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        model = auto_parallelize(Mlp(), _inputs(), strategy=_alone())
        assert torch.get_float32_matmul_precision() == before
        model = auto_parallelize(
            Mlp(), _inputs(), strategy=_alone(), cluster="a100-sxm-80gb:1x1", dtype="tf32"
        )
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert model.strategy.execution.dtype == "tf32"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert isinstance(model.program, Program)


def test_a_file_planned_for_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "strategy.toml"
    write_strategy(path, _alone(), {"model": "x", "graph_hash": "0123456789abcdef"}, {}, {})
    with pytest.raises(UserError, match=r"strategy.toml: \[problem\] graph_hash"):
        auto_parallelize(Mlp(), _inputs(), strategy=path)


def test_a_plan_that_cannot_be_kept_is_refused_before_the_search(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cache=None"):
        auto_parallelize(Mlp(), _inputs(), cache=tmp_path / "file" / "cache")


def test_what_no_search_could_meet_is_refused_before_it(tmp_path: Path) -> None:
    path = tmp_path / "strategy.toml"
    path.write_text("[recompute]\nper_stage = [99]\n")
    with pytest.raises(UserError, match="recomputes 99 blocks"):
        auto_parallelize(Mlp(), _inputs(), strategy=path, cache=None)


def test_a_file_planned_for_this_model_runs(tmp_path: Path) -> None:
    path = tmp_path / "strategy.toml"
    write_strategy(path, _alone(), {"model": "x", "graph_hash": _hash()}, {}, {})
    model = auto_parallelize(Mlp(), _inputs(), strategy=path)
    assert replace(model.strategy, execution=_alone().execution) == _alone()


class _Planner:
    """Stands in for the search: answers with one strategy and counts how often it is asked."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def __call__(self, problem: Problem, **_: Any) -> PlanResult:
        self.problems.append(problem)
        strategy = replace(_alone(problem.global_batch), execution=problem.execution)
        return PlanResult(
            strategy=strategy, prediction=score(problem.graph, problem.cluster, strategy), status="optimal",
            lower_bound_s=0.0, gap=0.0, candidates=1, pruned=0, seconds=0.0,
        )  # fmt: skip


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> _Planner:
    stand_in = _Planner()
    monkeypatch.setattr(search, "plan", stand_in, raising=False)
    return stand_in


def test_a_plan_is_kept_and_found_again(tmp_path: Path, planner: _Planner) -> None:
    for _ in range(2):
        model = auto_parallelize(Mlp(), _inputs(), cache=tmp_path / "kept")
    assert len(planner.problems) == 1
    assert model.strategy.batch.global_ == 4
    (kept,) = (tmp_path / "kept").iterdir()
    record = read_strategy_file(kept).problem
    assert record is not None
    assert record.graph_hash == _hash()


@pytest.mark.parametrize(
    "change",
    [{"global_batch": 8}, {"cluster": "h100-sxm:1x1"}, {"allow_lossy": True}, {"param_dtype": "bf16"}],
)
def test_other_inputs_are_planned_anew(tmp_path: Path, planner: _Planner, change: dict[str, Any]) -> None:
    auto_parallelize(Mlp(), _inputs(), cache=tmp_path)
    auto_parallelize(Mlp(), _inputs(), cache=tmp_path, **change)
    assert len(planner.problems) == 2


def test_keys_that_a_file_leaves_out_are_planned(tmp_path: Path, planner: _Planner) -> None:
    path = tmp_path / "partial.toml"
    path.write_text('schema = 1\n[batch]\nglobal = 8\n[recompute]\nmode = "full"\n')
    auto_parallelize(Mlp(), _inputs(), strategy=path, cache=None)
    (problem,) = planner.problems
    assert problem.constraints == {
        "batch.global": 8, "recompute.mode": "full", "offload.optimizer": 0.0, **on_devices({}), **limits({})
    }  # fmt: skip
    assert problem.global_batch == 8


def test_what_a_module_drops_is_priced(tmp_path: Path, planner: _Planner) -> None:
    module = torch.nn.Sequential(Mlp(), torch.nn.Dropout(0.25))
    auto_parallelize(module, _inputs(), cache=None)
    auto_parallelize(torch.nn.Sequential(Mlp(), torch.nn.Dropout(0.25)).eval(), _inputs(), cache=None)
    assert [problem.execution.dropout for problem in planner.problems] == [0.25, 0.0]


def test_a_file_that_wants_optimizer_state_on_the_host_gets_it(tmp_path: Path) -> None:
    path = tmp_path / "partial.toml"
    path.write_text("schema = 1\n[offload]\noptimizer = 1.0\n")
    model = auto_parallelize(Mlp(), _inputs(), strategy=path, cache=None)
    batch = (_inputs(), torch.tensor([1, 2, 3, 4]))
    with pytest.raises(UserError, match=r"make yours with model.optimizer"):
        model.step(*batch, loss_fn=F.cross_entropy)
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.01)
    first = model.step(*batch, loss_fn=F.cross_entropy)
    optimizer.step()
    optimizer.zero_grad()
    assert model.step(*batch, loss_fn=F.cross_entropy) < first
    held = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    scalars = 3 * 2 * 4  # the blocks' scales: their state stays where it is
    assert sum(t.nbytes for t in held) == sum(stage.host_bytes for stage in model.program.stages) - scalars


def _torchrun(processes: int, *strategies: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
        "--no-python", sys.executable, "-m", "tests.runtime.train_mlp", *map(str, strategies),
    ]  # fmt: skip
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.distributed
def test_under_torchrun_another_number_of_processes_is_refused_and_all_ranks_train_the_model_of_rank_0(
    tmp_path: Path,
) -> None:
    strategy = Strategy(
        batch=Batch(global_=8, micro=2),
        mesh=Mesh(dp_shard=2),
        shard=Shard(zero=3),
        pipeline=Pipeline(stage_blocks=(3,)),
        recompute=Recompute(mode="full"),
    )
    of_four = replace(_alone(8), mesh=Mesh(dp_replicate=4), batch=Batch(global_=8, micro=1))
    write_strategy(tmp_path / "four.toml", of_four, {"model": "x"}, {}, {})
    write_strategy(tmp_path / "two.toml", strategy, {"model": "x", "graph_hash": _hash()}, {}, {})
    done = _torchrun(2, tmp_path / "four.toml", tmp_path / "two.toml")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    assert "needs 4 processes but 2 are running" in seen["refused"]
    assert seen["losses"][1] < seen["losses"][0]
    assert seen["last"] < seen["losses"][1], "two steps were made on all samples"
