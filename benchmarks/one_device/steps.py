"""Runs a drawn case on the accelerator that is here: steps by `auto_parallelize`, and by plain PyTorch."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from autoparallel import auto_parallelize
from autoparallel.planner.strategy.types import Strategy
from autoparallel.runtime.lowering.lower import torch_dtype
from autoparallel.runtime.profiling.timing import device_name
from benchmarks.one_device.cases import DrawnCase, read_cases
from benchmarks.random_problems.capture import load_settings

WARM_UP, STEPS = 3, 6
CASE_LIMIT_S = 100.0  # then the process is stopped, and the next case begins in a new one
LARGEST = 60  # kernels that are written down by name
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-5}),
    "adam": (torch.optim.Adam, {"lr": 1e-5}),
    "sgd": (torch.optim.SGD, {"lr": 1e-5}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 1e-5, "momentum": 0.9}),
}
DEVICE = device_name()
Result = dict[str, Any]


def measure_all(folder: Path, out: Path, limit_s: float) -> None:
    """Every case of the folder that `out` does not have yet, until the time is over; a line of JSON each. A process that
    dies or hangs costs its own case."""
    end, cases = time.monotonic() + limit_s, read_cases(folder)
    for _ in cases:
        left, done = end - time.monotonic(), len(_ids(out))
        if left <= 0 or done == len(cases):
            return
        command = [
            sys.executable,
            "-m",
            "benchmarks.one_device",
            "serve",
            str(folder),
            "-o",
            str(out),
            "--limit-s",
            f"{left:.0f}",
        ]
        child = subprocess.Popen(command)
        while child.poll() is None:
            time.sleep(1)
            if time.monotonic() > end + 20 or time.time() - _last_change(out) > CASE_LIMIT_S:
                child.kill()
        stuck = next((case.id for case in cases if case.id not in _ids(out)), None)
        if stuck is not None and time.monotonic() < end:
            _write(out, {"id": stuck, "error": f"the process ended: {child.returncode}"})


def serve(folder: Path, out: Path, limit_s: float) -> None:
    """The cases that `out` has no line of, in this process."""
    end = time.monotonic() + limit_s
    for case in read_cases(folder):
        if case.id in _ids(out):
            continue
        if time.monotonic() > end:
            return
        out.touch()
        _write(out, measured(folder, case))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measured(folder: Path, case: DrawnCase) -> Result:
    """Seconds and bytes of the case's steps, or why there are none."""
    print(case.id, case.told, flush=True)
    began, result = time.perf_counter(), Result(id=case.id)
    try:
        result |= by_strategy(folder, case)
        result["took_s"] = round(time.perf_counter() - began, 1)
        gc.collect()
        torch.cuda.empty_cache()
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"[:2000]
        result["where"] = traceback.format_exc()[-3000:]
    if _is_plain(case.strategy):
        try:
            result |= by_hand(case)
        except Exception as error:
            result["plain_error"] = f"{type(error).__name__}: {error}"[:2000]
    return result


def by_strategy(folder: Path, case: DrawnCase) -> Result:
    """Steps of the case as the runtime runs it."""
    module, inputs, _ = load_settings(case.settings, case.seq_len, DEVICE)
    e = case.strategy.execution
    batch = with_data(inputs, case.strategy.batch.global_, torch_dtype(e.dtype))
    model = auto_parallelize(
        module, batch, strategy=case.strategy, cache=None, dtype=e.dtype, param_dtype=e.param_dtype,
        grad_dtype=e.grad_dtype, graph=folder / f"{case.id}.graph.json",
    )  # fmt: skip
    kind, options = OPTIMIZERS[e.optimizer]
    optimizer = model.optimizer(kind, **options)  # type: ignore[operator]

    def step() -> Any:
        optimizer.zero_grad()
        loss = model.step(batch)  # type: ignore[operator]
        optimizer.step()
        return loss

    return timed(step)


def by_hand(case: DrawnCase) -> Result:
    """The same without this library: a loop over micro-batches."""
    module, inputs, _ = load_settings(case.settings, case.seq_len, DEVICE)
    e, whole = case.strategy.execution, case.strategy.batch
    wide = torch_dtype(e.param_dtype)
    module = module.to(wide).to_empty(device=DEVICE)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            nn.init.normal_(tensor, std=0.02)
        else:
            tensor.zero_()
    batch = with_data(inputs, whole.global_, wide)
    count = whole.global_ // whole.micro
    parts = [{k: v[i * whole.micro : (i + 1) * whole.micro] for k, v in batch.items()} for i in range(count)]
    kind, options = OPTIMIZERS[e.optimizer]
    optimizer = kind(module.parameters(), **options)  # type: ignore[call-arg]
    torch.backends.cuda.matmul.allow_tf32 = e.dtype == "tf32"

    def step() -> None:
        optimizer.zero_grad()
        for part in parts:
            output = module(**part)
            loss = output if isinstance(output, Tensor) else output.loss
            (loss / count).backward()
        optimizer.step()

    return {f"plain_{key}": value for key, value in timed(step, profiled=False).items()}


def _is_plain(strategy: Strategy) -> bool:
    e, o = strategy.execution, strategy.offload
    same = e.dtype in (e.param_dtype, "tf32") and not e.master_weights and e.grad_dtype == e.param_dtype
    recomputed = strategy.recompute.mode != "none" or any(strategy.recompute.per_stage)
    return same and not recomputed and e.kernels == "eager" and not (o.optimizer or o.activations)


def timed(step: Callable[[], Any], *, profiled: bool = True) -> Result:
    """Seconds of steps, by the clock with the device waited for, the most bytes that they hold, and their kernels."""
    cuda = torch.cuda
    for _ in range(WARM_UP):
        step()
    cuda.synchronize()
    between = cuda.memory_allocated()
    cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    cuda.synchronize()
    free, total = cuda.mem_get_info()
    result = {
        "step_s": median(seconds),
        "least_s": min(seconds),
        "in_a_row_s": (time.perf_counter() - began) / STEPS,
        "peak_bytes": cuda.max_memory_allocated(),
        "reserved_bytes": cuda.max_memory_reserved(),
        "between_bytes": between,  # after the optimizer's step
        "other_bytes": total - free - cuda.memory_reserved(),  # of the context
    }
    if profiled:
        try:
            result |= _kernels(step)
        except Exception as error:
            result["not_profiled"] = f"{type(error).__name__}: {error}"
    return result


def _kernels(step: Callable[[], Any]) -> Result:
    """What the device does in one step: kernels by name, how many and how long."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = found.setdefault(event.name[:160], [0, 0.0])
            entry[0] += 1
            entry[1] += event.self_device_time_total * 1e-6
    order = sorted(found.items(), key=lambda item: -item[1][1])
    return {
        "busy_s": sum(seconds for _, seconds in found.values()),
        "launched": sum(count for count, _ in found.values()),
        "kernels": [[name, count, seconds] for name, (count, seconds) in order[:LARGEST]],
    }


# What whole numbers are below, by the name of the input.
BELOW = {"labels": 1000, "categories": 1000, "input_ids": 30000, "decoder_input_ids": 30000}


def with_data(inputs: Mapping[str, Any], samples: int, dtype: torch.dtype) -> dict[str, Any]:
    """So many samples of random data on the accelerator, shaped as the example inputs."""
    torch.manual_seed(0)

    def drawn(name: str, like: Tensor) -> Tensor:
        shape = (samples, *like.shape[1:])
        if like.is_floating_point():
            return torch.rand(shape, device=DEVICE).to(dtype)
        below = BELOW.get(name, 2) if like.dim() > 1 else 2
        return torch.randint(below, shape, dtype=like.dtype, device=DEVICE)

    return {key: drawn(key, value) for key, value in inputs.items()}


def _ids(out: Path) -> set[str]:
    if not out.exists():
        return set()
    return {json.loads(line)["id"] for line in out.read_text(encoding="utf-8").splitlines() if line}


def _write(out: Path, result: Result) -> None:
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
    shown = {k: v for k, v in result.items() if k not in ("kernels", "where")}
    print(json.dumps(shown), flush=True)


def _last_change(out: Path) -> float:
    return out.stat().st_mtime if out.exists() else time.time()
