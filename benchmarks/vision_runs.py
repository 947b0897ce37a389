"""Predicted against published training steps of timm's models on one RTX 3090: `python -m benchmarks.vision_runs --seed S
--models N`. Needs timm and torchvision.

One constant, `gemm.direct_efficiency`, was decided by 24 of these models, drawn with seed 11 among those with depthwise convolutions; none
other by any of them.

Source: timm's own benchmark under autocast, channels first (benchmarks/published/vision_rows.csv). The device is
`examples/rtx3090.toml`, its data sheet; autocast is priced as weights held in 16 bits beside a copy in 32. Models are drawn; those that the
installed timm has no more, or that cannot be captured in a minute, are told.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import random
import signal
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

from autoparallel.planner.capture import capture
from autoparallel.planner.score import score
from autoparallel.planner.strategy.types import Batch, Execution, Pipeline, Strategy
from autoparallel.profiles import load_cluster

PUBLISHED = Path(__file__).parent / "published" / "vision_rows.csv"
DEVICE = Path(__file__).resolve().parents[1] / "examples" / "rtx3090.toml"
LIMIT_S = 60
EXECUTION = Execution(
    dtype="fp16", param_dtype="fp16", master_weights=True, grad_dtype="fp32", kernels="eager"
)
Row = dict[str, str]


class Training(nn.Module):
    """A classifier with its loss."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.classifier(images).float(), labels)


def rows() -> list[Row]:
    """The published rows."""
    with PUBLISHED.open(encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def predicted_s(row: Row, timm: Any) -> float:
    """Seconds of a row's step."""
    size, batch = int(row["image_size"]), int(row["batch"])
    with torch.device("meta"):
        try:
            classifier = timm.create_model(row["model"], img_size=size)
        except TypeError:  # of any size
            classifier = timm.create_model(row["model"])
        images = torch.empty(2, 3, size, size, dtype=torch.float16)
        labels = torch.zeros(2, dtype=torch.long)
    module = Training(classifier.to(torch.float16)).train()
    graph = capture(module, {"images": images, "labels": labels}, name=row["model"])
    alone = Strategy(batch=Batch(global_=batch, micro=batch), execution=EXECUTION, pipeline=Pipeline())
    return score(graph, load_cluster(f"{DEVICE}:1x1"), alone).step_time_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--models", type=int, default=30)
    arguments = parser.parse_args()
    timm, published = importlib.import_module("timm"), rows()
    random.Random(arguments.seed).shuffle(published)
    errors = []
    signal.signal(signal.SIGALRM, _too_long)
    for row in published[: arguments.models]:
        signal.alarm(LIMIT_S)
        try:
            found_s = predicted_s(row, timm)
        except Exception as error:  # whatever it is, the others are looked at
            print(f"{row['model']:40} not scored: {str(error).splitlines()[0][:100]}", flush=True)
            continue
        finally:
            signal.alarm(0)
        errors.append(found_s / float(row["step_s"]) - 1)
        print(
            f"{row['model']:40}{float(row['step_s']):8.3f} s {found_s:8.3f} s {errors[-1]:+7.1%}", flush=True
        )
    if errors:
        sizes = [abs(error) for error in errors]
        print(
            f"{len(errors)} models, mean error {mean(sizes):.1%}, median {median(sizes):.1%}, bias {mean(errors):+.1%}"
        )


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"no answer in {LIMIT_S} s")


if __name__ == "__main__":
    main()
