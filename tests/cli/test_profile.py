"""`profile` writes a device that other commands take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
    path = tmp_path / "here.toml"
    answer = run("profile", "-o", path, "--quick")
    assert answer.status == 0, answer
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
