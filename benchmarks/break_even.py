"""Break-even bandwidths against real links: `python -m benchmarks.break_even` (root; iproute2).

`plan --explain` says below which bandwidth a method of compression pays (`planner/explain/break_even.py`). Here two nodes are network
namespaces of this machine (`shaped_cluster.py`). The benchmark profiles them, asks that function about plain data parallelism over
them, and then trains with and without each method at every rate of a list: all strategies of a launch are there at once and take turns, a
few steps each, so that what else the machine does meets them alike. Shown is the gain of a method, by how much steps without it are longer: the median
over rounds of the ratio of a round's quickest steps, and its quartiles. Only ratios within a launch are compared.

A method is confirmed where it gains at the rates of the list below its break-even, and loses at those above; where zero lies between the
quartiles nothing is said.
"""

from __future__ import annotations

import argparse
import json
import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

from autoparallel.planner.capture import capture
from autoparallel.planner.explain.break_even import break_evens, seconds_at
from autoparallel.planner.problem import Problem
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles import Cluster
from benchmarks.measured_plans import EXECUTION, trained
from benchmarks.shaped_cluster import METHODS, Links, Shape, missing_means, profiled, rivals
from benchmarks.small_models import MODELS, make

WARM_UP, STEPS = 2, 3
PLAIN = "plain DDP"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a method gains at a rate (Mbit/s), as shares of its own step."""

    rate: float
    predicted: float
    quartiles: tuple[float, float, float]

    @property
    def told(self) -> bool:
        """Whether most rounds agree on its sign."""
        return self.quartiles[0] > 0 or self.quartiles[2] < 0


def serve(folder: Path) -> None:
    """On a rank: all strategies in turns; rank 0 writes the quickest step of each in each round."""
    torch.set_num_threads(1)
    name, strategies, cluster, rounds = pickle.loads((folder / "job.pickle").read_bytes())
    dist.init_process_group("gloo")
    step_of = [trained(name, strategy, cluster) for strategy in strategies]
    for step in step_of:
        for _ in range(WARM_UP):
            step()
    found = [[min(step() for _ in range(STEPS)) for step in step_of] for _ in range(rounds)]
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def gains(
    links: Links, name: str, strategies: Sequence[Strategy], cluster: Cluster, rounds: int
) -> list[list[float]]:
    """Seconds of each strategy's quickest step, by round."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "job.pickle").write_bytes(pickle.dumps((name, list(strategies), cluster, rounds)))
        links.launch("-m", "benchmarks.break_even", "--serve", str(folder))
        found = json.loads((folder / "found.json").read_text())
    return [list(row) for row in found]


def compare(
    links: Links, name: str, cluster: Cluster, methods: Sequence[str], rates: Sequence[float], rounds: int
) -> dict[str, Any]:
    """A table of a model: the break-even bandwidth of each method, and its gains at each rate."""
    samples = MODELS[name][1] * links.shape.ranks
    model, inputs = make(name, 2)
    graph = capture(model, inputs, name=name)
    both = rivals(links.shape, samples)
    problem = Problem(
        graph=graph, cluster=cluster, global_batch=samples, execution=EXECUTION, allow_lossy=True, lossy=tuple(methods)
    )  # fmt: skip
    known = {one.method: one.bytes_per_s * 8e-6 for one in break_evens(problem, both[PLAIN])}
    level, now = len(cluster.levels) - 1, cluster.levels[-1].bytes_per_s * 8e-6
    table: dict[str, list[Gain]] = {method: [] for method in methods}
    for rate in rates:
        links.reshape(rate)
        measured = gains(links, name, [both[one] for one in (PLAIN, *methods)], cluster, rounds)
        plain_s = seconds_at(problem, both[PLAIN], level, rate / now)
        print(
            f"  {name} at {rate:g} Mbit/s: plain {plain_s:.3g} s predicted, {median(row[0] for row in measured):.3g} s measured",
            flush=True,
        )
        for number, method in enumerate(methods, 1):
            row = [round_[0] / round_[number] - 1 for round_ in measured]
            coded_s = seconds_at(problem, both[method], level, rate / now)
            low, middle, high = quantiles(row, n=4)
            table[method].append(
                Gain(rate=rate, predicted=plain_s / coded_s - 1, quartiles=(low, middle, high))
            )
    print(
        f"\n{name} on {links.shape.label.split(',')[0]}, rates in Mbit/s: gain predicted / measured (quartiles)"
    )
    for method, row in table.items():
        said = "; ".join(
            f"{g.rate:g}: {g.predicted:+.0%} / {g.quartiles[1]:+.0%} ({g.quartiles[0]:+.0%} to {g.quartiles[2]:+.0%})"
            for g in row
        )
        agree = sum((g.rate < known[method]) == (g.quartiles[1] > 0) for g in row if g.told)
        print(
            f"  {method:10} pays below {known[method]:.0f}: {said}; {agree} of {sum(g.told for g in row)} signs as predicted",
            flush=True,
        )
    plain = {
        m: [{"rate": g.rate, "predicted": g.predicted, "quartiles": g.quartiles} for g in row]
        for m, row in table.items()
    }
    return {"model": name, "break_even_mbit": known, "gains": plain}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["MLP"])
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=["bf16", "int8", "int4", "topk:0.01", "sign"]
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[100.0, 300.0, 1000.0, 3000.0, 10000.0], metavar="MBIT"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write all that was found here")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    if why := missing_means():
        print(f"skipped: {why}")
        return
    shape = Shape(nodes=2, per_node=1, rates=(1000.0,))
    with tempfile.TemporaryDirectory() as folder, Links(shape) as links:
        cluster = profiled(links, Path(folder))
        found = [
            compare(links, name, cluster, options.methods, options.rates, options.rounds)
            for name in options.models
        ]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
