"""What is asked of one model."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from autoparallel.costmodel.graph import ModelGraph, OpKind
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.huggingface_images import GRIDS, in_one_row
from autoparallel.planner.capture.on_meta import with_batch
from autoparallel.planner.outcome import InfeasiblePlan
from autoparallel.planner.plan import plan
from autoparallel.planner.problem import Problem
from autoparallel.profiles import load_cluster
from benchmarks.coverage import ranks
from benchmarks.coverage.composed import Composed
from benchmarks.coverage.defaults import with_proof
from benchmarks.coverage.eager import (
    counted_flops,
    graph_saved_bytes,
    library_flops,
    saved_bytes,
    with_numbers,
)
from benchmarks.coverage.libraries import make
from benchmarks.coverage.models import SIZES, Entry, Smaller, full_settings, load, loaded, smaller

Result = dict[str, Any]

SAMPLES, SMALL_SEQ_LEN = 2, 32
MOST_PARAMETERS = 300_000_000  # of a model that is run here
CLUSTERS = {8: "h100-sxm:1x8", 64: "h100-sxm:8x8"}
PLAN_LIMIT_S = 20.0


def captured(entry: Entry) -> Result:
    """Capture of the default configuration, at its full depth and its own sequence length. Where that fails, whether the model
    runs with its defaults at all (`fails_itself`)."""
    started_s = time.process_time()
    module, inputs = loaded(entry)
    try:
        return _captured(entry, module, inputs, started_s)[0]
    except Exception as error:
        return with_proof(entry, module, inputs, error)


def _captured(entry: Entry, module: nn.Module, inputs: Any, started_s: float) -> tuple[Result, ModelGraph]:
    loaded_s = time.process_time() - started_s
    graph = capture(module, inputs, name=entry.name)
    seconds = time.process_time() - started_s
    expected = sum(p.numel() for p in module.parameters())
    found = graph.parameter_count
    is_whole = any(op.kind is OpKind.LEAF for block in graph.blocks for op in block.operators)
    why = "parts of it are run for real" if is_whole else ""
    return {
        "ok": found == expected and not is_whole,
        "why": why if found == expected else f"{found:,} parameters, not {expected:,}",
        "load_s": round(loaded_s, 2),
        "capture_s": round(seconds, 2),
        "parameters": expected,
        "blocks": len(graph.blocks),
        "repeated": len(graph.repeated_positions),
        "operators": sum(len(block.operators) for block in graph.blocks),
        "inputs": {k: list(v.shape) for k, v in inputs.items() if isinstance(v, torch.Tensor)},
        "warnings": list(graph.warnings),
    }, graph


def planned(entry: Entry) -> Result:
    """Plans of the default configuration on 8 and on 64 devices, each with a time limit."""
    started_s = time.process_time()
    result, graph = _captured(entry, *loaded(entry), started_s)
    found: Result = {}
    for devices, cluster in CLUSTERS.items():
        started_s = time.process_time()
        problem = Problem(graph=graph, cluster=load_cluster(cluster), global_batch=4 * devices)
        try:
            best = plan(problem, time_limit_s=PLAN_LIMIT_S, advise=False)
            found[f"step_s_{devices}"] = best.prediction.step_time_s
        except InfeasiblePlan:
            found[f"step_s_{devices}"] = "nothing fits"
        found[f"plan_s_{devices}"] = round(time.process_time() - started_s, 2)
    return {"ok": True, "capture_s": result["capture_s"], **found}


def ranked(entry: Entry) -> Result:
    """One step of a small model on two Gloo processes, by the plan and by three strategies drawn for it, against one
    process."""
    try:
        module, inputs, real, _ = small_model(entry)
    except ValueError as error:
        return {"ok": False, "ran": False, "why": str(error)}
    del module
    batch = with_numbers(with_batch(inputs, ranks.RANKS * ranks.SHARE, numbers=True))
    if not ranks.is_deterministic(real, batch):
        return {
            "ok": False,
            "ran": False,
            "why": "draws random numbers, cannot be trained with one sample, or its gradients are zero or not finite",
        }
    found = [_on_ranks(real, batch, strategy) for strategy in ranks.drawn(entry.key)]
    outcomes = [each["outcome"] for each in found]
    return {
        "ok": "differs" not in outcomes,
        "ran": True,
        "why": "; ".join(each["why"] for each in found if each["outcome"] == "differs"),
        "outcomes": outcomes,
        "refused": [each["why"] for each in found if each["outcome"] == "refused"],
    }


def _on_ranks(real: nn.Module, batch: Any, strategy: str) -> Result:
    """What came of a strategy. Gradients that differ are computed again in double precision, where that runs: what batch norms
    let cancel is rounding otherwise."""
    found = ranks.run_on_ranks(real, batch, strategy)
    if not found["why"].startswith("gradients differ"):
        return found
    again = ranks.run_on_ranks(*ranks.in_double(real, batch), strategy)
    return again if again["outcome"] != "differs" or again["why"].startswith("gradients differ") else found


def small_model(entry: Entry) -> tuple[nn.Module, Any, nn.Module, Any]:
    """The smallest model of the architecture that runs: on the meta device with its example inputs, and on the CPU with
    numbers. Raises ValueError, in the words of the model, where none runs."""
    if entry.library != "transformers":
        return _of_library(entry)
    full, last = full_settings(entry), ""
    for by in SIZES:
        try:
            made = _small(full, by)
        except Exception as error:
            last = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            continue
        if made is not None:
            return made
        last = f"more than {MOST_PARAMETERS:,} parameters"
    raise ValueError(f"no small model runs: {last}")


def _of_library(entry: Entry) -> tuple[nn.Module, Any, nn.Module, Any]:
    module, inputs = loaded(entry)
    if sum(p.numel() for p in module.parameters()) > MOST_PARAMETERS:
        raise ValueError(f"no small model runs: more than {MOST_PARAMETERS:,} parameters")
    torch.manual_seed(0)
    real, _ = make(entry.library, entry.name, device="cpu")
    _without_dropout(real, module)
    numbers = with_numbers(inputs)
    with torch.no_grad():
        real(**numbers)
    return module, inputs, real, numbers


def _without_dropout(*modules: nn.Module) -> None:
    for module in modules:
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            elif type(part).__name__ in ("DropPath", "StochasticDepth"):
                part.eval()


def _small(full: dict[str, Any], by: Smaller) -> tuple[nn.Module, Any, nn.Module, Any] | None:
    small = load(smaller(full, by), SMALL_SEQ_LEN)
    if sum(p.numel() for p in small.module.parameters()) > MOST_PARAMETERS:
        return None
    torch.manual_seed(0)
    real = type(small.module)._from_config(small.module.config).float()  # type: ignore[attr-defined]
    real.train()
    _without_dropout(real, small.module)
    if any(name in small.example_inputs for name in GRIDS):
        in_one_row(real)  # as it was loaded
    numbers = with_numbers(small.example_inputs)
    with torch.no_grad():
        real(**numbers)
    return small.module, small.example_inputs, real, numbers


def exact(entry: Entry) -> Result:
    """FLOPs and saved bytes of a small model against what torch counts of the same model on the CPU. Where that has other
    kernels than those that are priced (`composed.py`), the bytes of its own are told, too."""
    try:
        module, inputs, real, numbers = small_model(entry)
    except ValueError as error:
        return {"ok": False, "ran": False, "why": str(error)}
    graph = capture(module, inputs, name=entry.name)
    # torch's counter does not know products of experts, nor other libraries' kernels.
    flops = graph.model_flops(SAMPLES) - _grouped_flops(graph) - library_flops(graph, SAMPLES)
    expected_flops = counted_flops(real, numbers)
    mode = Composed(fused=True)
    saved, expected_saved = graph_saved_bytes(graph, SAMPLES), saved_bytes(real, numbers, mode)
    apart = {"composed": sorted(mode.replaced), "saved_on_cpu": saved_bytes(real, numbers)}
    return {
        "ok": flops == expected_flops and saved == expected_saved,
        "ran": True,
        "why": "; ".join(
            f"{name} {ours / theirs - 1:+.3%}" if theirs else f"{name} {ours:,}, not 0"
            for name, ours, theirs in (("FLOPs", flops, expected_flops), ("saved", saved, expected_saved))
            if ours != theirs
        ),
        "flops": [flops, expected_flops],
        "saved": [saved, expected_saved],
        **(apart if mode.replaced else {}),
        "parameters": sum(p.numel() for p in real.parameters()),
    }


def _grouped_flops(graph: ModelGraph) -> int:
    operators = [op for link in graph.chain for op in graph.blocks[link.block].operators]
    kernels = [k for op in operators for k in (*op.forward, *op.backward) if k.kind is OpKind.GROUPED_GEMM]
    return sum(kernel.flops.at(SAMPLES) for kernel in kernels)
