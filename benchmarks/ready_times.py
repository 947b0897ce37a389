"""When buckets of gradients can leave: `python -m benchmarks.ready_times [--models Llama GPT-2] [--bucket-mib 0.5]`.

In the cost model the gradients of a link of the chain become ready evenly over its backward, whose seconds are priced operator by
operator (`costmodel/buckets.py`). Here hooks note when each parameter's gradient has arrived in real backward passes of one process; a
bucket of whole tensors can start when its last one is there and those before it have started. Compared, for buckets that are filled with the
last parameters first, as in the runtime's first step, and in the order in which gradients come, as in all others, is the start of each bucket with the priced time at which as many bytes are ready, as shares of the backward
pass, each of its own: how far the two curves lie apart.

Three profiles are held against it: the one that is given; one whose parts are wrong (matrix products 0.6 times and memory-bound kernels 1.6 times
as fast); and this one once `calibrate` has seen a step time of each of some models. Seconds are the process' own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
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
from autoparallel.runtime.gradients.buckets import filled
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
    each bucket could start, with the bytes that are ready by then (`curve`)."""

    name: str
    graph: ModelGraph
    strategy: Strategy
    step_s: float
    backward_s: float
    registered: tuple[tuple[float, ...], tuple[float, ...]]
    in_order: tuple[tuple[float, ...], tuple[float, ...]]


def curve(
    order: Sequence[nn.Parameter], arrived_s: Mapping[nn.Parameter, float], size_bytes: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of buckets that are filled in an order: bytes of all up to each, and when it could start."""
    buckets = filled(order, torch.float32, size_bytes)
    sizes = np.cumsum([sum(p.numel() for p in bucket.parameters) * FP32 for bucket in buckets])
    ready = [max(arrived_s[p] for p in bucket.parameters) for bucket in buckets]
    return tuple(sizes.tolist()), tuple(np.maximum.accumulate(ready).tolist())


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
    found: list[tuple[float, float, int, dict[nn.Parameter, float]]] = []
    for _ in range(WARM_UP + steps):
        begin = time.process_time()
        optimizer.zero_grad()
        output: Any = model(**inputs)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        forward = time.process_time()
        loss.backward()
        backward = time.process_time()
        optimizer.step()
        since = {parameter: at - forward for parameter, at in arrived.items()}
        found.append((time.process_time() - begin, backward - forward, len(found), since))
    step_s, backward_s, _, ready = min(found[WARM_UP:])
    trained = [parameter for parameter in parameters if parameter in ready]
    return Case(
        name=name, graph=graph, strategy=strategy, step_s=step_s, backward_s=backward_s,
        registered=curve(trained[::-1], ready, bucket_mib * MIB),
        in_order=curve(sorted(trained, key=ready.__getitem__), ready, bucket_mib * MIB),
    )  # fmt: skip


def priced(case: Case, cluster: Cluster) -> tuple[list[float], list[float]]:
    """Bytes of gradients that are ready at the end of each link's backward, and its priced seconds. Tied ones are when the first module
    that has them is done."""
    program = Expander(graph=case.graph, cluster=cluster).program(case.strategy)
    pricer, (stage,) = Pricer(cluster), program.stages
    tied: set[str] = set()
    sizes = []
    for link in case.graph.chain:
        own = [p for p in case.graph.blocks[link.block].parameters if p.trainable and p.tied not in tied]
        tied |= {p.tied for p in own if p.tied}
        sizes.append(FP32 * sum(p.numel for p in own))
    seconds, ready = [0.0], [0.0]
    for size, block in zip(reversed(sizes), reversed(stage.links), strict=True):
        cost = price_block(block, program, cluster.groups[0].device, pricer)
        seconds.append(seconds[-1] + sum(cost.backward_input.values()) + sum(cost.backward_weight.values()))
        ready.append(ready[-1] + size)
    return ready, seconds


def with_device(cluster: Cluster, device: Device) -> Cluster:
    (group,) = cluster.groups
    return replace(cluster, groups=(replace(group, device=device),))


def show(title: str, cases: Sequence[Case], cluster: Cluster) -> None:
    head = f"{'':8}{'step':>8}{'backward':>10}{'first step: buckets':>21}{'apart':>7}{'most':>6}{'others: buckets':>17}{'apart':>7}{'most':>6}"
    print(f"\n{title}\n  {head}")
    for case in cases:
        step_s = score(case.graph, cluster, case.strategy).step_time_s
        ready, seconds = priced(case, cluster)
        row = f"{case.name:8}{step_s / case.step_s - 1:+8.0%}{seconds[-1] / case.backward_s - 1:+10.0%}"
        for wide, (sizes, starts_s) in ((21, case.registered), (17, case.in_order)):
            apart = np.abs(
                np.interp(sizes, ready, seconds) / seconds[-1] - np.array(starts_s) / case.backward_s
            )
            row += f"{len(sizes):{wide}}{apart.mean():7.1%}{apart.max():6.0%}"
        print(f"  {row}", flush=True)


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
