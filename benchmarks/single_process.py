"""Training steps of six real models in one process: predicted against measured.

python benchmarks/single_process.py [--cluster cpu-gloo:1x1] [--steps 12] [--json OUT.json]

A step is zero_grad, forward, backward and AdamW, in fp32, eager, on one thread. Predicted through the same code
as `autoparallel score`. Measured is the least processor time of several steps (with one thread that is the wall
time of an idle machine), so that other work on the machine counts little; a CUDA device is timed by the clock.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from autoparallel.costmodel.prediction import Prediction
from autoparallel.planner.capture import capture
from autoparallel.planner.score import score
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Pipeline, Strategy
from autoparallel.profiles import Cluster, load_cluster
from benchmarks.small_models import MODELS, make

LEARNING_RATE = 1e-4
WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One model: seconds of a step."""

    model: str
    predicted_s: float
    measured_s: float
    breakdown_s: dict[str, float]

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def predict(name: str, cluster: Cluster, samples: int | None = None) -> Prediction:
    """The step of a model on one device, as `score` predicts it."""
    model, inputs = make(name, samples)
    samples = samples or MODELS[name][1]
    graph = capture(model, {key: value[:2] for key, value in inputs.items()}, name=name)
    strategy = Strategy(
        batch=Batch(global_=samples, micro=samples),
        mesh=Mesh(),
        pipeline=Pipeline(stage_blocks=(len(graph.repeated_positions),)),
        execution=Execution(
            dtype="fp32", param_dtype="fp32", master_weights=False, grad_dtype="fp32", kernels="eager"
        ),
    )
    return score(graph, cluster, strategy)


def measure_step_s(name: str, steps: int, samples: int | None = None) -> float:
    """The least seconds of `steps` training steps after the first few."""
    model, inputs = make(name, samples)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock = time.perf_counter if device == "cuda" else time.process_time
    model, inputs = model.to(device), {key: value.to(device) for key, value in inputs.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    times = []
    for _ in range(WARM_UP + steps):
        begin = clock()
        optimizer.zero_grad()
        output = model(**inputs)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - begin)
    return min(times[WARM_UP:])


def compare(names: Sequence[str], cluster: Cluster, steps: int) -> list[Result]:
    """Predicted and measured step of each model."""
    results = []
    for name in names:
        prediction = predict(name, cluster)
        measured_s = measure_step_s(name, steps)
        breakdown = {key: seconds for key, seconds in prediction.breakdown_s if seconds}
        results.append(
            Result(
                model=name,
                predicted_s=prediction.step_time_s,
                measured_s=measured_s,
                breakdown_s=breakdown,
            )
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster", default="cpu-gloo:1x1")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = compare(options.only, load_cluster(options.cluster), options.steps)
    print(f"{'model':10}{'predicted':>12}{'measured':>12}{'error':>9}")
    for r in results:
        print(
            f"{r.model:10}{r.predicted_s * 1e3:9.1f} ms{r.measured_s * 1e3:9.1f} ms{r.error:+9.1%}   "
            + ", ".join(f"{key} {seconds * 1e3:.1f}" for key, seconds in r.breakdown_s.items())
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(r) | {"error": r.error} for r in results], indent=1))


if __name__ == "__main__":
    main()
