"""Models of the user's own: what they raise reaches the user in their words, and what they are fed is called what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.runner import refused, run
from tests.report.test_page import Page

FAILING = """
import torch
from torch import nn

class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no words")

class Model(nn.Module):
    def __init__(self, how, where):
        super().__init__()
        self.linear, self.how, self.where = nn.Linear(8, 8), how, where

    def fail(self):
        if self.how == "exit":
            raise SystemExit("bye")
        if self.how == "silent":
            raise Silent
        raise {"key": KeyError("rope"), "bare": AssertionError(), "value": ValueError("set width to 64")}[self.how]

    def forward(self, x):
        if self.where == "forward":
            self.fail()
        y = self.linear(x)
        y.register_hook(lambda gradient: self.fail())
        return y

def model(how: str, where: str):
    return Model(how, where), torch.randn(4, 8, device="meta")

def anything(**arguments):
    return nn.Linear(arguments["seq_len"], 8), torch.randn(4, arguments["seq_len"], device="meta")
"""


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "failing.py"
    path.write_text(FAILING)
    return path


@pytest.mark.parametrize(
    ("where", "how", "words"),
    [
        ("forward", "value", ["ValueError: set width to 64"]),
        ("forward", "exit", ["ended the process by SystemExit: bye", "failing.py:", "in fail"]),
        ("forward", "silent", ["no words", "failing.py:"]),
        ("backward", "value", ["the model's own code raised ValueError: set width to 64", "in fail"]),
        ("backward", "bare", ["raised AssertionError (", "failing.py:"]),
        ("backward", "silent", ["Silent: (which cannot say what it is about)"]),
    ],
)
def test_what_a_model_raises_is_told_in_its_words(
    failing: Path, where: str, how: str, words: list[str]
) -> None:
    arguments = ("--model-arg", f"how={how}", "--model-arg", f"where={where}")
    refused("plan", f"{failing}:model", "--cluster", "h100-sxm:1x2", *arguments, words=words)


def test_a_config_that_the_model_refuses_is_told_in_the_models_words(tmp_path: Path) -> None:
    config = json.loads(Path("examples/configs/gpt2.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": 1, "n_head": 7}))
    words = ["divisible by num_heads"]
    refused("plan", f"hf:{tmp_path}", "--cluster", "h100-sxm:1x2", "--seq-len", "32", words=words)


def test_a_length_that_the_model_does_not_take_is_refused(failing: Path) -> None:
    mlp = ("plan", "examples/mlp.py:mlp", "--cluster", "h100-sxm:1x2")
    refused(
        *mlp, "--seq-len", "64", words=["mlp takes no argument seq_len", "--seq-len would change nothing"]
    )
    config = "hf:examples/configs/vit-base.json"
    words = ["--seq-len 64", "a sample of vit-base is one image", "leave it out"]
    refused("plan", config, "--cluster", "h100-sxm:1x2", "--seq-len", "64", words=words)
    answer = run("plan", f"{failing}:anything", "--cluster", "h100-sxm:1x2", "--seq-len", "64")
    assert "seq_len" not in answer.err  # it takes any argument, and got this one


def test_images_are_counted_as_images(tmp_path: Path) -> None:
    path, page = tmp_path / "s.toml", tmp_path / "r.html"
    fixed = ("--set", "mesh.tp=1", "--set", "recompute.mode=none")
    model = ("examples/resnet.py:resnet_small", "--cluster", "h100-sxm:1x2", "--global-batch", "64", *fixed)
    answer = run("plan", *model, "-o", path, "--json")
    assert answer.status == 0, answer
    assert answer.json["sample"] == "image"
    assert "for 64 images" in answer.err
    assert "images/s per device" in answer.err
    assert "token" not in answer.err
    assert run("report", path, "-o", page).status == 0
    shown = Page(page.read_text()).text
    assert "images per second and device" in shown
    assert "64 images per optimizer step" in shown
    assert (
        run("plan", "examples/mlp.py:mlp", "--cluster", "h100-sxm:1x2", "--json").json["sample"] == "sample"
    )
    refused("export", path, "--to", "megatron", words=["no sequence", "accelerate or deepspeed"])
    compared = run("whatif", *model, "-o", tmp_path / "w.html")
    assert "images/s" in compared.err
    assert "64 images" in Page((tmp_path / "w.html").read_text()).text


def test_members_that_a_parallel_model_has_are_refused_before_a_plan_that_is_to_run(tmp_path: Path) -> None:
    path = tmp_path / "counted.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\nclass Counted(nn.Linear):\n    def __init__(self):\n        super().__init__(8, 8)\n"
        "        self.register_buffer('step', torch.zeros(()))\n\ndef model():\n    return Counted(), torch.randn(4, 8)\n"
    )
    asked = ("plan", f"{path}:model", "--cluster", "h100-sxm:1x2")
    refused(
        *asked, "--runnable", words=["Counted already has step", "rename it, or put the model into a module"]
    )
    planned = run(*asked)
    assert planned.status == 0
    assert "warning: Counted already has step" in planned.err


def test_flat_indices_with_offsets_are_refused_where_they_are_inputs(tmp_path: Path) -> None:
    path = tmp_path / "bags.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\nclass Bags(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.bag, self.head = nn.EmbeddingBag(100, 8), nn.Linear(8, 2)\n\n"
        "    def forward(self, words, offsets=None):\n        return self.head(self.bag(words, offsets))\n\n"
        "def flat():\n    return Bags(), (torch.zeros(20, dtype=torch.long), torch.arange(0, 20, 5))\n\n"
        "def rows():\n    return Bags(), (torch.zeros(4, 5, dtype=torch.long),)\n"
    )
    words = [
        "bag: an EmbeddingBag",
        "the input offsets",
        "do not stand along dim 0",
        "(samples, indices of a sample)",
    ]
    refused("plan", f"{path}:flat", "--cluster", "h100-sxm:1x2", words=words)
    assert run("plan", f"{path}:rows", "--cluster", "h100-sxm:1x2", "--set", "mesh.dp_shard=2").status == 0


def test_parameters_that_a_forward_pass_writes_are_told_of_and_run_on_one_device_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "flow.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\nclass Flow(nn.Linear):\n    def __init__(self, way):\n        super().__init__(8, 8)\n"
        "        self.way, self.ready, self.tables = way, False, 4\n        self.shift = nn.Parameter(torch.zeros(8))\n\n"
        "    def forward(self, x):\n        if not self.ready:\n            with torch.no_grad():\n"
        "                if self.way == 'data':\n                    self.shift.data = -x.mean(0)\n"
        "                elif self.way == 'own':\n                    self.weight.div_(self.weight.norm())\n"
        "                else:\n                    self.shift.copy_(-x.mean(0))\n            self.ready = self.way != 'own'\n"
        "        return (super().forward(x) + self.shift).square().mean()\n\n"
        "def model(way='copy', ready='no'):\n    made, x = Flow(way), torch.randn(4, 8)\n    if ready == 'yes':\n        made(x)\n"
        "    return made, x\n"
    )
    asked = ("plan", f"{path}:model", "--cluster", "h100-sxm:1x2", "--runnable")
    words = [
        "writes to shift what it makes of its samples",
        "call the model once",
        "on every rank",
    ]
    for way in ("copy", "data"):
        refused(*asked, "--model-arg", f"way={way}", words=words)
    planned = run(*asked[:-1])
    assert planned.status == 0
    assert "warning: its forward pass writes to shift" in planned.err
    ready = run(*asked, "--model-arg", "ready=yes")
    assert (ready.status, "writes to" in ready.err) == (0, False)
    own = run(*asked, "--model-arg", "way=own", "--json")
    assert own.status == 0
    assert own.json["strategy"]["mesh"]["dp_replicate"] == 2
    assert "writes to weight: a rank that holds a share" in own.err
