"""When buckets of gradients can leave: `python -m benchmarks.ready_times [--models Llama GPT-2] [--bucket-mib 0.5]`.

In the cost model the gradients of a link of the chain become ready evenly over its backward, whose seconds are priced operator by
operator (`costmodel/buckets.py`). Here hooks note when each parameter's gradient has arrived in real backward passes of one process; a
bucket of whole tensors, the last parameters first as the runtime fills them, can start when its last one is there and those before it have
started. Compared is the start of each bucket with the priced time at which as many bytes are ready, as shares of the backward
pass, each of its own: how far the two curves lie apart.

Three profiles are held against it: the one that is given; one whose parts are wrong (matrix products 0.6 times and memory-bound kernels 1.6 times
as fast); and this one once `calibrate` has seen a step time of each of some models. Seconds are the process' own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from autoparallel.costmodel.calibrate import calibrate
from autoparallel.costmodel.graph import ModelGraph
from autoparallel.costmodel.parts import correct
from autoparallel.costmodel.price import Pricer, price_block
from autoparallel.planner.capture import capture
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.score import score
from autoparallel.planner.strategy.types import Batch, Execution, Pipeline, Strategy
from autoparallel.profiles import Cluster, load_cluster
from autoparallel.profiles.hardware import Device
from benchmarks.small_models import MODELS, make

EXECUTION = Execution(
    dtype="fp32", param_dtype="fp32", master_weights=False, grad_dtype="fp32", kernels="eager"
)
WARM_UP, LEARNING_RATE, FP32, MIB = 3, 1e-4, 4, 1 << 20
WRONG = {"products": 0.6, "passes": 1.6}
TEACHERS = ("Llama", "GPT-2", "MLP")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and the quickest of its measured steps: seconds of the step and of its backward, and from the beginning of that until
    each bucket could start; `bytes` that are ready by then."""

    name: str
    graph: ModelGraph
    strategy: Strategy
    step_s: float
    backward_s: float
    bytes: tuple[float, ...]
    starts_s: tuple[float, ...]


def bucket_ends(parameters: Sequence[nn.Parameter], size_bytes: float) -> list[list[nn.Parameter]]:
    """Whole tensors together, the last first, as `runtime/gradients/replicated.py` fills its buckets."""
    buckets: list[list[nn.Parameter]] = []
    filled = float("inf")
    for parameter in reversed(parameters):
        if filled + parameter.numel() * FP32 > size_bytes:
            buckets.append([])
            filled = 0.0
        buckets[-1].append(parameter)
        filled += parameter.numel() * FP32
    return buckets


def measure(name: str, steps: int, bucket_mib: float) -> Case:
    """Train some steps of a model in this process, the clock at every gradient."""
    model, inputs = make(name)
    samples = MODELS[name][1]
    graph = capture(model, {key: value[:2] for key, value in inputs.items()}, name=name)
    strategy = Strategy(
        batch=Batch(global_=samples, micro=samples), execution=EXECUTION, pipeline=Pipeline(stage_blocks=(len(graph.repeated_positions),)),
    )  # fmt: skip
    arrived: dict[nn.Parameter, float] = {}

    def note(parameter: nn.Parameter) -> None:
        arrived[parameter] = time.process_time()

    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(note)
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    buckets = bucket_ends(parameters, bucket_mib * MIB)
    found: list[tuple[float, float, list[float]]] = []
    for _ in range(WARM_UP + steps):
        begin = time.process_time()
        optimizer.zero_grad()
        output: Any = model(**inputs)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        forward = time.process_time()
        loss.backward()
        backward = time.process_time()
        optimizer.step()
        ready = [max(arrived[p] for p in bucket) - forward for bucket in buckets]
        found.append((time.process_time() - begin, backward - forward, list(np.maximum.accumulate(ready))))
    step_s, backward_s, starts = min(found[WARM_UP:])
    sizes = np.cumsum([sum(p.numel() for p in bucket) * FP32 for bucket in buckets])
    return Case(
        name=name, graph=graph, strategy=strategy, step_s=step_s, backward_s=backward_s, bytes=tuple(sizes.tolist()), starts_s=tuple(starts),
    )  # fmt: skip


def priced(case: Case, cluster: Cluster) -> tuple[float, list[float]]:
    """Priced seconds of the backward, and from its beginning until so many bytes of gradients are ready."""
    program = Expander(graph=case.graph, cluster=cluster).program(case.strategy)
    pricer, (stage,) = Pricer(cluster), program.stages
    seconds, ready = [0.0], [0.0]
    for link, block in zip(reversed(case.graph.chain), reversed(stage.links), strict=True):
        cost = price_block(block, program, cluster.groups[0].device, pricer)
        seconds.append(seconds[-1] + sum(cost.backward_input.values()) + sum(cost.backward_weight.values()))
        ready.append(
            ready[-1] + FP32 * sum(p.numel for p in case.graph.blocks[link.block].parameters if p.trainable)
        )
    return seconds[-1], list(np.interp(case.bytes, ready, seconds))


def with_device(cluster: Cluster, device: Device) -> Cluster:
    (group,) = cluster.groups
    return replace(cluster, groups=(replace(group, device=device),))


def show(title: str, cases: Sequence[Case], cluster: Cluster) -> None:
    print(f"\n{title}\n  {'':8}{'buckets':>8}{'step':>9}{'backward':>10}{'apart: mean':>13}{'most':>7}")
    for case in cases:
        step_s = score(case.graph, cluster, case.strategy).step_time_s
        backward_s, starts = priced(case, cluster)
        apart = np.abs(np.array(starts) / backward_s - np.array(case.starts_s) / case.backward_s)
        print(
            f"  {case.name:8}{len(starts):8}{step_s / case.step_s - 1:+9.1%}{backward_s / case.backward_s - 1:+10.1%}{apart.mean():13.1%}"
            f"{apart.max():7.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--cluster", default="cpu-gloo:1x1")
    parser.add_argument("--bucket-mib", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cluster = load_cluster(options.cluster)
    cases = [measure(name, options.steps, options.bucket_mib) for name in options.models]
    show("the profile as it is", cases, cluster)
    wrong = correct(cluster.groups[0].device, WRONG, "made wrong")
    show("made wrong", cases, with_device(cluster, wrong))
    rows = [case for case in cases if case.name in TEACHERS]

    def steps_of(device: Device) -> list[float]:
        return [score(row.graph, with_device(cluster, device), row.strategy).step_time_s for row in rows]

    found = calibrate(wrong, steps_of, [row.step_s for row in rows], source="measured steps")
    show(
        f"calibrated on the steps of {', '.join(row.name for row in rows)}",
        cases,
        with_device(cluster, found.device),
    )


if __name__ == "__main__":
    main()
