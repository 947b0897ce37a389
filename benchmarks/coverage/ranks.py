"""A small model trained for a step by two Gloo processes, by the plan and by strategies drawn for it, against one process."""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from autoparallel import auto_parallelize
from autoparallel.planner.capture.trees import plain, tensors

Result = dict[str, Any]

RANKS, SHARE = 2, 2  # processes, and samples for each of two data-parallel ranks
TOLERANCE = 1e-4
PLAN_LIMIT_S = 10.0
AXES = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
DRAWN = 3


def drawn(key: str) -> list[str]:
    """Strategy files for a model, which leave the rest to the planner: first all of it, then some drawn by its name."""
    order = random.Random(key)
    files = ["schema = 1\n"]
    for axis in order.sample(AXES, DRAWN):
        mesh = "".join(f"{name} = {RANKS if name == axis else 1}\n" for name in AXES)
        zero = order.choice((1, 2, 3)) if axis == "dp_shard" else 0
        mode = order.choice(("none", "selective", "full"))
        micro = order.choice((1, 2))
        files.append(
            f'schema = 1\n[batch]\nmicro = {micro}\n[mesh]\n{mesh}[shard]\nzero = {zero}\n[recompute]\nmode = "{mode}"\n'
        )
    return files


def loss_of(output: Any, _: Any = None) -> Tensor:
    """The model's own loss, or a weighted mean over all that needs a gradient: squares of what was normalised last would add
    up to the same whatever the parameters."""
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    found = [t for t in tensors(plain(output)) if t.requires_grad]
    return torch.stack([_weighted(t if t.dtype == torch.float64 else t.float()) for t in found]).sum()


def _weighted(tensor: Tensor) -> Tensor:
    """A mean in which the entries of a sample count differently, alike in each sample."""
    entries = tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(-1, 1)
    return (entries * torch.sin(torch.arange(1, entries.shape[1] + 1, dtype=tensor.dtype))).mean()


def in_double(module: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """The same in numbers of which rounding is no cause of a difference."""
    double = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, batch)
    return copy.deepcopy(module).double(), double


def part(batch: Any, start: int, stop: int) -> Any:
    """Some of the samples."""
    size = RANKS * SHARE
    return tree_map_only(Tensor, lambda t: t[start:stop] if t.dim() and t.shape[0] == size else t, batch)


def reference(module: nn.Module, batch: Mapping[str, Any], micro: int, seed: int = 0) -> dict[str, Tensor]:
    """Gradients of one process that runs the same micro-batches."""
    module = copy.deepcopy(module)
    count = RANKS * SHARE // micro
    for index in range(count):
        torch.manual_seed(seed)
        (loss_of(module(**part(batch, index * micro, (index + 1) * micro))) / count).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest norm of a difference over the larger of the gradient's norm and a thousandth of the median's."""
    if found.keys() != expected.keys():
        return float("inf")
    floor = (1e-3 * torch.stack([g.norm() for g in expected.values()]).median()).clamp(min=1e-30)
    return max(((found[n] - g).norm() / torch.maximum(g.norm(), floor)).item() for n, g in expected.items())


def run_on_ranks(module: nn.Module, batch: Mapping[str, Any], strategy: str) -> Result:
    """What came of one strategy: `equal`, `refused` before anything started, or `differs`, and why."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "strategy.toml"
        file.write_text(strategy, encoding="utf-8")
        ours, theirs = zip(*(multiprocessing.Pipe(duplex=False) for _ in range(RANKS)), strict=True)
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                _serve(rank, folder, module, batch, str(file), theirs[rank])
            children.append(child)
        for pipe in theirs:
            pipe.close()
        answers = []
        for pipe in ours:
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append({"outcome": "differs", "why": "a process ended"})
        for child in children:
            os.waitpid(child, 0)
    worst = {"equal": 0, "refused": 1, "differs": 2}
    found: Result = max(answers, key=lambda answer: worst[answer["outcome"]])
    return found


def _serve(rank: int, folder: str, module: nn.Module, batch: Any, strategy: str, pipe: Connection) -> None:
    try:
        pipe.send(_trained(rank, folder, module, batch, strategy))
    except BaseException as error:
        pipe.send(
            {"outcome": "differs", "why": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
        )
    finally:
        pipe.close()
        os._exit(0)


def _trained(rank: int, folder: str, module: nn.Module, batch: Any, strategy: str) -> Result:
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=300))
    inputs = part(batch, 0, SHARE)
    try:
        made = auto_parallelize(
            copy.deepcopy(module), inputs, strategy=strategy, cluster=f"cpu-gloo:1x{RANKS}", cache=None,
            global_batch=RANKS * SHARE, time_limit_s=PLAN_LIMIT_S,
        )  # fmt: skip
    except ValueError as error:  # a user's error: before anything has started
        return {"outcome": "refused", "why": str(error).splitlines()[0]}
    chosen: Any = made.strategy
    samples = RANKS * SHARE // chosen.mesh.data_parallel
    first = int(made.data_parallel_rank) * samples  # type: ignore[arg-type]
    torch.manual_seed(0)
    made.step(part(batch, first, first + samples), None, loss_fn=loss_of)  # type: ignore[operator]
    found = made.full_gradients()  # type: ignore[operator]
    if rank:
        return {"outcome": "equal", "why": ""}
    worst = difference(found, reference(module, batch, chosen.batch.micro))
    mesh = chosen.mesh
    axes = [axis for axis in AXES if getattr(mesh, axis) > 1]
    why = "" if worst < TOLERANCE else f"gradients differ by {worst:.1e} with {', '.join(axes) or 'one rank'}"
    return {"outcome": "differs" if why else "equal", "why": why}


def is_deterministic(module: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether two steps of one process are equal whatever the seed, and not all of it zero: where random numbers are drawn,
    a loss was cut off or a sample is too few, nothing can be compared."""
    try:
        first, second = (reference(module, batch, micro=SHARE, seed=seed) for seed in range(2))
        reference(module, batch, micro=1)
    except (ValueError, RuntimeError):  # it cannot be trained so
        return False
    return any(bool(g.any()) for g in first.values()) and all(
        torch.equal(g, second[name]) and bool(g.isfinite().all()) for name, g in first.items()
    )
