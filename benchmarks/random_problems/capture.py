"""Captures a drawn model: `python -m benchmarks.random_problems.capture SETTINGS.json GRAPH.json`. Imports torch."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any


def load_settings(
    settings: dict[str, Any], seq_len: int | None, device: str = "meta"
) -> tuple[Any, Any, str]:
    """The module of a Hugging Face config, on the meta device, or of a function of `zoo.py`, on `device`; example inputs; a name."""
    import torch

    from autoparallel.planner.capture.load import keyword_inputs, load_model

    if "hf" in settings:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{settings['hf']['model_type']}.json"
            path.write_text(json.dumps(settings["hf"]), encoding="utf-8")
            loaded = load_model(f"hf:{path}", model_args={}, seq_len=seq_len)
        return loaded.module, loaded.example_inputs, loaded.name
    from benchmarks.random_problems import zoo

    with torch.device(device):
        module, inputs = getattr(zoo, settings["zoo"])(**settings["args"])
    return module, keyword_inputs(module, inputs), settings["zoo"]


def capture_settings(settings: dict[str, Any], seq_len: int | None) -> str:
    """The JSON text of the graph of a drawn model."""
    from autoparallel.costmodel.graph_json import graph_to_json
    from autoparallel.planner.capture import capture

    module, inputs, name = load_settings(settings, seq_len)
    return graph_to_json(capture(module, inputs, name=name))


def main() -> None:
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    drawn = json.loads(source.read_text(encoding="utf-8"))
    out.write_text(capture_settings(drawn["settings"], drawn["seq_len"]), encoding="utf-8")


if __name__ == "__main__":
    main()
