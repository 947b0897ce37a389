"""A command's process gets ready sooner, and says the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from autoparallel.costmodel.graph_json import graph_to_json
from autoparallel.inputs import Request, check_request, load_graph

MODEL = """
import os
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

def net():
    return Net(), (torch.zeros(1, 64),)

def in_the_first_process():
    if os.getpid() != int(os.environ["FIRST"]):
        os._exit(1)
    return net()

def wrong():
    return 3
"""

# What a command does, in a process that has not imported torch: for each model, whether torch came, and the graph.
COMMAND = """
import json, os, sys
os.environ["FIRST"] = str(os.getpid())
from autoparallel.costmodel.graph_json import graph_to_json
from autoparallel.errors import UserError
from autoparallel.inputs import Request, check_request
from autoparallel.startup import begun_capture, import_planner

found = []
for model in sys.argv[1:]:
    with begun_capture(check_request(Request(model=model, cluster="h100-sxm:1x2"))) as begun:
        import_planner()
        assert "ortools" in sys.modules and "pandas" not in sys.modules
        try:
            text = graph_to_json(begun.wait())
        except UserError as error:
            text = f"UserError: {error}"
    found.append(("torch" in sys.modules, text))
print(json.dumps(found))
"""


def test_a_graph_captured_in_another_process_is_that_of_this_one(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    models = [f"{path}:{name}" for name in ("net", "wrong", "in_the_first_process")]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *models], capture_output=True, text=True, check=True
    )
    captured, wrong, again = json.loads(done.stdout)
    here = graph_to_json(load_graph(check_request(Request(model=models[0], cluster="h100-sxm:1x2"))))
    assert captured == [False, here]
    assert not wrong[0]
    assert wrong[1].startswith(f"UserError: {path}:wrong")  # said where it is waited for
    assert again == [
        True,
        here.replace('"net"', '"in_the_first_process"'),
    ]  # its process died: done again here
