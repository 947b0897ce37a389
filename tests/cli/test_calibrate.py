"""`calibrate` on steps of a machine that is known to be slower than its profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoparallel.costmodel.parts import correct
from autoparallel.measured import read_measured
from autoparallel.profiles import load_device
from tests.cli.runner import refused, run, save, strategy_toml
from tests.toy_graphs import toy_transformer

SLOWER = 0.8
MICRO = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CSV of steps that a device computing at 0.8 of its profile's rate would take."""
    folder = tmp_path_factory.mktemp("rows")
    graph = save(toy_transformer(layers=4, hidden=1024, heads=8, seq=512), folder / "graph.json")
    lines = ["strategy,step_time_s,model,cluster"]
    for micro in MICRO:
        changes = {"batch.micro": micro, "batch.global": 64}
        (folder / f"micro{micro}.toml").write_text(strategy_toml(changes), encoding="utf-8")
        lines.append(f"micro{micro}.toml,1.0,{graph},1x4")
    path = folder / "rows.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    device = load_device("h100-sxm")
    truth = correct(device, {"products": SLOWER, "passes": SLOWER, "attention": SLOWER}, "truth")
    seconds = [run.predicted_s(truth) for run in read_measured(path, device)]
    lines[1:] = [line.replace(",1.0,", f",{s},") for line, s in zip(lines[1:], seconds, strict=True)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_it_says_what_changed_and_writes_a_profile_that_predicts_the_rows(rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "slower.toml"
    answer = run("calibrate", "h100-sxm", "--measured", rows, "-o", output)
    assert answer.status == 0, answer
    assert "slower than the profile said" in answer.err
    assert "held out" in answer.err
    assert "not told by these steps" in answer.err
    assert "measure next: micro" in answer.err
    device = load_device(str(output))
    assert device.posterior is not None
    assert device.posterior.rows == len(MICRO)
    known = device.provenance["constants.gemm.efficiency.half"]
    assert known.kind == "fitted"
    assert "rows.csv" in known.source
    for measured in read_measured(rows, replace(device, name="h100-sxm")):
        assert measured.predicted_s(device) == pytest.approx(measured.step_time_s, rel=0.07), measured.name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("strategy,step_time_s\n", ["step_time_s", "a row for each run"]),
        ("strategy,step_time_s,speed\na.toml,1,2\n", ["unknown column `speed`"]),
        ("strategy,step_time_s\n{s},1\n{s},2\n", ["row 2", "model"]),
        ("strategy,step_time_s,model,cluster\n{s},fast,{g},1x4\n", ["row 2", "step_time_s", "'fast'"]),
        ("strategy,step_time_s,model,cluster\n{s},1,{g},four\n", ["row 2", "NODESxPER_NODE"]),
        ("strategy,step_time_s,model,cluster\n{s},1,{g},0x4\n", ["row 2", "at least one node"]),
        ("strategy,step_time_s\n{s},1,{g}\n", ["row 2", "each of the 2 columns"]),
        ("strategy,step_time_s\n{s},1\n{s}\n", ["row 3", "each of the 2 columns"]),
    ],
)
def test_a_wrong_table_is_refused_with_its_row_and_column(
    text: str, words: list[str], rows: Path, tmp_path: Path
) -> None:
    strategy, graph = rows.parent / "micro1.toml", rows.parent / "graph.json"
    path = tmp_path / "rows.csv"
    path.write_text(text.format(s=strategy, g=graph), encoding="utf-8")
    refused("calibrate", "h100-sxm", "--measured", path, "-o", tmp_path / "out.toml", words=words)
