"""`profile` writes a device that other commands take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoparallel.cli_profile import busy_words, disturbed_words
from autoparallel.costmodel.fit_collectives import OverlapSample
from autoparallel.costmodel.kernel_table import read_kernel_table
from autoparallel.profiles import load_cluster, load_device
from autoparallel.runtime.profiling import measure
from autoparallel.runtime.profiling.measure import all_cases
from tests.cli.runner import refused, run, save
from tests.toy_graphs import toy_transformer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the cases picked are a CPU's")
QUICK = ("product 256x256x256 fp32", "tiny kernels", "bare kernels", "norm 512x384", "tensors of 65536")


def test_what_it_writes_can_be_planned_for_and_says_where_each_figure_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [case for case in all_cases() if any(word in case.label for word in QUICK)]
    monkeypatch.setattr(measure, "all_cases", lambda _: few)
    path, table = tmp_path / "here.toml", tmp_path / "kernels.csv"
    answer = run("profile", "-o", path, "--quick", "--save-kernels", table)
    assert answer.status == 0, answer
    assert "matmul" in {row.op for row in read_kernel_table(table)}
    again = run("profile", "--kernels", table, "--like", path, "-o", tmp_path / "again.toml")
    assert again.status == 0, again
    known = load_device(str(tmp_path / "again.toml")).provenance["constants.gemm.efficiency.full"]
    assert "kernels.csv" in known.source
    assert "how well the fit says it" in answer.err
    device, base = load_device(str(path)), load_device("cpu-gloo")
    assert device.name == "here"
    assert device.constants.keys() == base.constants.keys()
    assert device.provenance["constants.memory.efficiency.norm"].kind == "fitted"
    assert device.provenance["constants.kernel.start_s"].kind == "measured"
    assert "autoparallel profile on 1 thread of" in device.provenance["peak_flops.fp32"].source
    assert 0 < device.residuals["gemm.fp32"].mean_absolute_error < 1
    assert load_cluster(f"{path}:1x2").devices == 2
    graph = save(toy_transformer(layers=2, hidden=64, heads=4, seq=32), tmp_path / "graph.json")
    settings = [word for key in ("dtype", "param_dtype") for word in ("--set", f"execution.{key}=fp32")]
    scored = run("score", graph, "--cluster", f"{path}:1x1", "--global-batch", "1", *settings, "--json")
    assert scored.status == 0, scored
    assert scored.json["confidence"]["step_time_low_s"] < scored.json["step_time_s"]


def test_an_unknown_base_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    refused("profile", "-o", tmp_path / "p.toml", "--like", "h100-sxn", words=["h100-sxn", "did you mean"])


def test_other_work_on_the_machine_is_told_of() -> None:
    assert "busy" in busy_words(3.0, 2)
    assert not busy_words(0.1, 2)
    disturbed = OverlapSample(compute_s=1.0, collective_s=1.5, compute_beside_s=1.4, both_s=3.0)
    assert "comm_slowdown" in disturbed_words(disturbed)
    assert not disturbed_words(
        OverlapSample(compute_s=1.0, collective_s=1.5, compute_beside_s=1.4, both_s=2.5)
    )


def test_a_table_of_an_unknown_card_needs_a_base(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("gpu,op,m,n,k,batch,seconds\nAcme X1,matmul,8,8,8,1,1e-5\n")
    refused("profile", "--kernels", table, "-o", tmp_path / "p.toml", words=["Acme X1", "--like"])
