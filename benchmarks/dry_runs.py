"""Dry runs of strategies drawn at random: what is lowered against what is priced, on models of `examples/configs`.

    python -m benchmarks.dry_runs --seed 1 --cases 20 [--only 7] [--model gpt2] [--json out.json]

Each case has a model (a configuration with fewer layers), a mesh of 1 to 16 devices, and a complete strategy that the runtime
runs, as `benchmarks.random_problems` draws them. What differs is printed; the last line says how many cases agree.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.dryrun import DryRun, dry_run_of
from autoparallel.errors import UserError
from autoparallel.inputs import computed_in
from autoparallel.planner.problem import Problem
from autoparallel.planner.strategy.stacks import OWN_STACK, STACK, told
from autoparallel.planner.strategy.types import Execution, Strategy
from autoparallel.profiles import load_cluster
from autoparallel.runtime.capabilities.table import limits
from autoparallel.runtime.limits import graph_limits, refuser
from benchmarks.random_problems.choices import ALL
from benchmarks.random_problems.draw import draw_strategy

CONFIGS = Path(__file__).parent.parent / "examples" / "configs"
DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)
WITHOUT_LENGTH = ("vit-base", "whisper-small")
DTYPES: tuple[Mapping[str, object], ...] = (
    {},
    {"dtype": "fp32", "param_dtype": "fp32", "master_weights": False},
    {"dtype": "bf16", "param_dtype": "fp32", "master_weights": False},
    {"grad_dtype": "bf16"},
    {"grad_dtype": "bf16", "master_weights": False},
)
CHOICES = replace(ALL, most_virtual=3)


def settings_of(rng: Random, name: str) -> dict[str, Any]:
    """The configuration with 2 to 8 layers, and the model's own width."""
    settings: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    layers = rng.choice((2, 3, 4, 4, 6, 8))
    settings |= {key: layers for key in DEPTHS if key in settings}
    if "layer_types" in settings:
        settings["layer_types"] = settings["layer_types"][:layers]
    if "first_k_dense_replace" in settings:
        settings["first_k_dense_replace"] = 1
        settings["n_routed_experts"] = 16
    if rng.random() < 0.5 and "vocab_size" in settings:  # so that the rest counts for something
        least = max(
            (v + 1 for k, v in settings.items() if k.endswith("token_id") and isinstance(v, int)), default=0
        )
        settings["vocab_size"] = 2048 if least <= 2048 else settings["vocab_size"]
    return settings


def drawn_execution(rng: Random) -> dict[str, object]:
    """What is fixed of it."""
    found: dict[str, object] = {STACK: OWN_STACK}
    found |= {f"execution.{key}": value for key, value in rng.choice(DTYPES).items()}
    if rng.random() < 0.2:
        found["execution.attention"] = "unfused"
    if rng.random() < 0.3:
        found["execution.optimizer"] = rng.choice(("adam", "sgd", "sgd-momentum"))
    return found


def drawn(rng: Random, graph: ModelGraph, constraints: dict[str, object]) -> Strategy | None:
    """A complete strategy that the runtime runs."""
    devices = rng.choice((1, 2, 4, 4, 8, 8, 8, 16))
    cluster = load_cluster(f"h100-sxm:{max(devices // 8, 1)}x{min(devices, 8)}")
    constraints |= {key: value for key, value in limits(constraints).items() if key != "embedding"}
    execution = told(Execution(), constraints)
    for _ in range(30):
        problem = Problem(
            graph=graph, cluster=cluster, global_batch=devices * rng.choice((1, 2, 4, 8)),
            constraints={**graph_limits(graph), **constraints}, execution=execution,
        )  # fmt: skip
        strategy = draw_strategy(problem, rng, CHOICES)
        if strategy is not None and refuser(graph, cluster)(strategy) is None:
            return strategy
    return None


def run_case(seed: int, index: int, only_model: str | None) -> tuple[str, DryRun | Exception | None, float]:
    """What was drawn, in words, and what came of it."""
    from autoparallel.labels import strategy_label
    from autoparallel.planner.capture import capture
    from autoparallel.planner.capture.load import load_model

    rng = Random(f"{seed}:{index}")
    names = [only_model] if only_model else sorted(path.stem for path in CONFIGS.glob("*.json"))
    name = rng.choice(names)
    settings, length = settings_of(rng, name), rng.choice((32, 64, 128, 256))
    said = f"{index}: {name} {next(settings[k] for k in DEPTHS if k in settings)} layers"
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        seq_len = None if name in WITHOUT_LENGTH else length
        try:
            loaded = load_model(f"hf:{folder}", model_args={}, seq_len=seq_len)
            execution = drawn_execution(rng)
            graph = capture(loaded.module, loaded.example_inputs, name=name, dtype=computed_in(execution))
            execution["execution.dropout"] = graph.dropout
        except UserError as error:
            return said, error, time.perf_counter() - began
        strategy = drawn(rng, graph, execution)
        if strategy is None:
            return said, None, time.perf_counter() - began
        e, o = strategy.execution, strategy.offload
        said += (
            f" s{length}, {strategy_label(strategy)}, batch {strategy.batch.global_}/{strategy.batch.micro},"
            f" zero {strategy.shard.zero} sp {strategy.shard.sequence_parallel} ep {strategy.mesh.ep} blocks {strategy.pipeline.stage_blocks}"
            f" recompute {strategy.recompute.mode} {strategy.recompute.per_stage}, {e.dtype}/{e.param_dtype}/{e.grad_dtype}"
            f" master {e.master_weights} {e.attention} {e.optimizer} dropout {e.dropout}, offload {o.optimizer}/{o.activations},"
            f" {strategy.grad_sync.algorithm} {strategy.grad_sync.bucket_mib}"
        )
        devices = strategy.mesh.devices
        cluster = load_cluster(f"h100-sxm:{max(devices // 8, 1)}x{min(devices, 8)}")
        try:
            found: DryRun | Exception = dry_run_of(
                loaded.module, loaded.example_inputs, graph, cluster, strategy
            )
        except Exception as error:
            found = error
    return said, found, time.perf_counter() - began


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--only", type=int, action="append")
    parser.add_argument("--model")
    parser.add_argument("--messages", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    agree, tried, rows = 0, 0, []
    for index in given.only or range(given.cases):
        said, found, seconds = run_case(given.seed, index, given.model)
        print(f"{said} ({seconds:.1f} s)", flush=True)
        if found is None:
            print("   nothing drawn")
            continue
        if isinstance(found, UserError):
            print(f"   refused: {found}")
            rows.append({"case": said, "refused": str(found)})
            continue
        tried += 1
        if isinstance(found, Exception):
            print(f"   CRASH {type(found).__name__}: {found}")
            if given.only:
                traceback.print_exception(found, file=sys.stdout)
            rows.append({"case": said, "crash": f"{type(found).__name__}: {found}"})
            continue
        agree += not found.findings
        for one in found.findings:
            print(f"   {one.text}")
        if given.messages:
            for rank in found.ranks:
                print(
                    rank.rank,
                    {k: (v.lowered, v.predicted) for k, v in rank.held_bytes.items()},
                    rank.peak,
                    rank.predicted_peak_bytes,
                )
                for m, pair in rank.messages.items():
                    if pair.lowered != pair.predicted:
                        print("     ", m.axis, m.op, m.size_bytes, pair.lowered, pair.predicted)
        rows.append({"case": said, "differences": [one.text for one in found.findings]})
    print(f"{agree} of {tried} agree")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
