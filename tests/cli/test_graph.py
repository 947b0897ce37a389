"""`graph`: what was captured, as a table, JSON, code, a page and a drawing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from autoparallel.costmodel.graph import ModelGraph
from tests.cli.runner import refused, run, save
from tests.toy_graphs import toy_transformer

EXAMPLES = Path(__file__).parents[2] / "examples"
MLP = f"{EXAMPLES / 'mlp.py'}:mlp"


@pytest.fixture
def graph() -> ModelGraph:
    return toy_transformer()


@pytest.fixture
def saved(graph: ModelGraph, tmp_path: Path) -> Path:
    return save(graph, tmp_path / "graph.json")


def test_the_table_has_a_line_for_each_distinct_block(graph: ModelGraph, saved: Path) -> None:
    answer = run("graph", saved)
    assert answer.status == 0, answer.err
    assert answer.out == ""
    lines = answer.err.splitlines()
    for index in {link.block for link in graph.chain}:
        assert sum(line.startswith(f"{graph.blocks[index].name} ") for line in lines) == 1, answer.err


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_the_totals_are_those_of_the_model(graph: ModelGraph, saved: Path, micro_batch: int) -> None:
    answer = run("graph", saved, "--json", "--micro-batch", str(micro_batch)).json
    total = answer["total"]
    assert total["forward_flops"] + total["backward_flops"] == graph.model_flops(micro_batch)
    assert answer["model"]["parameters"] == graph.parameter_count
    for key in total:
        assert sum(block[key] * block["times"] for block in answer["blocks"]) == total[key]
    assert sum(block["times"] for block in answer["blocks"]) == len(graph.chain)


def test_the_page_shows_every_operator_of_every_distinct_block(
    graph: ModelGraph, saved: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    answer = run("graph", saved, "--html", page)
    assert answer.status == 0, answer.err
    text = page.read_text()
    assert "://" not in text  # it stands alone
    assert text.count("<tr><td>") >= sum(
        len(graph.blocks[b].operators) for b in {c.block for c in graph.chain}
    )
    assert "saved activations" in text


def test_the_drawing_has_a_cluster_for_each_block_and_arrows_between_known_nodes(saved: Path) -> None:
    text = run("graph", saved, "--dot").out
    assert text.count("subgraph cluster_") == 3, text
    assert text.count("{") == text.count("}")
    nodes = set(re.findall(r'^ +"?(\w+)"? \[', text, re.MULTILINE))
    for before, after in re.findall(r'^ +"(\w+)" -> "(\w+)"', text, re.MULTILINE):
        assert {before, after} <= nodes, text


def test_code_is_forward_and_backward_with_shapes_by_module() -> None:
    answer = run("graph", MLP, "--model-arg", "depth=2", "--model-arg", "width=16", "--code")
    assert answer.status == 0, answer.err
    ast.parse(answer.out)
    lines = [line.strip() for line in answer.out.splitlines()]
    at = lines.index("# layers.0.linear")
    assert lines[at + 1].startswith('layers_0_linear_weight: "f32[16, 16]" = '), answer.out
    assert lines[at + 3].startswith('linear_1: "f32[1, 16]" = torch._C._nn.linear(relu, '), answer.out
    assert "# backward of layers.0.linear" in lines
    assert lines[-1].startswith("return {'outputs': ("), answer.out


def test_what_does_not_go_together_is_refused(saved: Path, tmp_path: Path) -> None:
    refused("graph", saved, "--code", words=["a saved graph has no code"])
    refused("graph", saved, "--dot", "--json", words=["choose one"])
    refused("graph", saved, "--seq-len", "8", words=["--seq-len", "mean nothing"])
    refused("graph", tmp_path / "none.json", words=["no such graph file"])
    refused("graph", saved, "--html", saved, words=["graph.json"])
