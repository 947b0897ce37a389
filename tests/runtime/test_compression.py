from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.costmodel.compression import WEIGHTS, wire_bytes
from autoparallel.errors import UserError
from autoparallel.planner.strategy.types import GradSync, Pipeline
from autoparallel.runtime.check.messages import sent_bytes
from autoparallel.runtime.check.traffic import TrafficRecorder
from autoparallel.runtime.gradients.exchanges import Exchange
from autoparallel.runtime.gradients.feedback import Memory
from autoparallel.runtime.gradients.gathered import UnitGather
from autoparallel.runtime.gradients.reductions import Reducer, ScatterReducer, make_reducer
from autoparallel.runtime.gradients.sharded import ShardWire, UnitScatter
from autoparallel.runtime.lowering.parallel_module import gather_full
from autoparallel.runtime.ranks.levels import method_between
from autoparallel.runtime.start import parallelize
from benchmarks.compressed_training import final_loss, source_entropy
from tests.runtime.compare import build, part, run_strategy, strategy_of
from tests.runtime.harness import Processes
from tests.runtime.shared import no_program

pytestmark = pytest.mark.distributed

# Largest error of a mean of numbers of at most about three, sent twice.
EXACT = {"none": 1e-6, "fp16": 0.004, "bf16": 0.03, "fp8": 1.0, "int8": 0.1, "int4": 1.5, "int2": 5.0}
BIASED = ("sign", "topk:0.05", "topk:0.02-0.2", "powersgd:2")
SIZE = 1024  # for two and four ranks whole groups of 128


def _numbers(rank: int, step: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * step + rank))


@dataclass(frozen=True)
class Mean:
    found: Tensor
    error: float
    sent: float  # bytes


def _means(rank: int, world_size: int) -> dict[str, Mean]:
    """What each method makes of the mean over all ranks."""
    found = {}
    for method in (*EXACT, *BIASED):
        buffer, exact = _numbers(rank, 0), _numbers(rank, 0)
        dist.all_reduce(exact)
        recorder = TrafficRecorder({dist.group.WORLD.group_name: "dp_replicate"})
        with recorder:
            make_reducer(dist.group.WORLD, method).start(buffer, Memory()).wait()
        sizes = {"dp_replicate": world_size}
        sent = sum(count * sent_bytes(message, sizes) for message, count in recorder.found.items())
        found[method] = Mean(buffer, (buffer - exact / world_size).abs().max().item(), sent)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_gets_the_same_mean_and_sends_the_bytes_that_are_priced(
    gloo: Processes, ranks: int
) -> None:
    results = gloo.run(ranks, _means)
    for method in (*EXACT, *BIASED):
        first = results[0][method]
        for result in results:
            assert torch.equal(result[method].found, first.found), method
        assert first.error <= EXACT.get(method, 8.0), method
        priced = 2 * (ranks - 1) / ranks * wire_bytes(method, 4 * SIZE, 4)
        if method == "topk:0.02-0.2":  # priced at its most, begun with its least; two squares beside
            assert first.sent < priced / 4
        else:  # top-k keeps a whole number of each part
            assert abs(first.sent - priced) <= 2 * (ranks - 1) * 8 * method.startswith("topk"), method


def _delivered(rank: int, world_size: int, steps: int) -> dict[str, tuple[float, float]]:
    """Of the sum of the means over some steps: what is missing, and what is missing beyond what is owed; relative."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([0, 2]), dist.new_group([1, 3])]
    inside, across = pairs[0][rank // 2], pairs[1][rank % 2]
    world = dist.group.WORLD
    reducers: dict[str, Reducer] = {method: make_reducer(world, method) for method in BIASED}
    for near, far in (("none", "topk:0.05"), ("sign", "none"), ("topk:0.1", "sign"), ("int8", "powersgd:1")):
        reducers[f"{near}, {far}"] = ScatterReducer(Exchange(inside, near), make_reducer(across, far), 2)
    found = {}
    for name, reducer in reducers.items():
        memory, exact, total = Memory(), torch.zeros(SIZE), torch.zeros(SIZE)
        for step in range(steps):
            buffer = _numbers(rank, step)
            mean = buffer.clone()
            dist.all_reduce(mean)
            exact += mean / world_size
            reducer.start(buffer, memory).wait()
            total += buffer
        owed = reducer.owed(buffer, memory)
        dist.all_reduce(owed)
        found[name] = _missing(exact, total, owed)
    order = (0, 2, 1, 3)
    wires = {method: ShardWire(method=method) for method in BIASED} | {
        "sharded, topk:0.1, sign": ShardWire(inside=Exchange(inside, "topk:0.1"), across=Exchange(across, "sign"), order=order)
    }  # fmt: skip
    for name, wire in wires.items():
        for op, dtype in ((dist.ReduceOp.AVG, torch.float32), (dist.ReduceOp.SUM, torch.float64)):
            scatter, mine = (
                UnitScatter(wire),
                slice(rank * SIZE // world_size, (rank + 1) * SIZE // world_size),
            )
            exact, total = torch.zeros(SIZE, dtype=dtype), torch.zeros(SIZE // world_size, dtype=dtype)
            before = 1.0 if op == dist.ReduceOp.AVG else 2.0  # as FSDP2 divides by four in float64
            for step in range(steps):
                mean = _numbers(rank, step).to(dtype)
                output = torch.empty(SIZE // world_size, dtype=dtype)
                scatter(output, mean / before, world, op)
                total += output / (1.0 if op == dist.ReduceOp.AVG else 2.0)
                dist.all_reduce(mean)
                exact += mean / world_size
            owed = scatter.owed()
            assert owed is not None
            found[f"sharded, {name}, {dtype}"] = _missing(exact[mine], total, owed)
            if step == steps - 1 and name == "sign":  # what is given to another is sent
                other = UnitScatter(ShardWire(method="int8"))
                other.give(owed)
                other(output, torch.zeros(SIZE, dtype=dtype), world, op)
                came = output / (1.0 if op == dist.ReduceOp.AVG else 2.0)
                found[f"given, {dtype}"] = (1.0, ((came - owed).norm() / owed.norm()).item() / 1000)
    return found


def _missing(exact: Tensor, total: Tensor, owed: Tensor) -> tuple[float, float]:
    return ((exact - total).norm() / exact.norm()).item(), (
        (exact - total - owed).norm() / exact.norm()
    ).item()


def test_what_is_left_out_is_owed_to_the_last_digit(gloo: Processes) -> None:
    """Over any number of steps, what has come and what is owed are together the sum of the exact means: at once, level by
    level, and over ranks that shard. Unbiased methods beside them owe nothing, and err."""
    for result in gloo.run(4, _delivered, steps=6):
        for name, (missing, lost) in result.items():
            assert missing > 0.05, name
            assert lost < (0.02 if "int8" in name else 1e-5), name


@dataclass(frozen=True)
class Gathered:
    found: Tensor
    error: float  # relative to the whole
    sent: float  # bytes


def _gathers(rank: int, world_size: int) -> dict[str, Gathered]:
    """What each method makes of the numbers of all ranks, gathered as FSDP2 does: the own part stands in the output."""
    found, whole = {}, torch.cat([_numbers(r, 0) for r in range(world_size)])
    for method in WEIGHTS:
        output = torch.zeros(world_size * SIZE)
        own = output[rank * SIZE : (rank + 1) * SIZE].copy_(_numbers(rank, 0))
        recorder = TrafficRecorder({dist.group.WORLD.group_name: "dp_shard"})
        with recorder:
            UnitGather(method)(output, own, dist.group.WORLD)
        sent = sum(n * sent_bytes(message, {"dp_shard": world_size}) for message, n in recorder.found.items())
        found[method] = Gathered(output, ((output - whole).norm() / whole.norm()).item(), sent)
    bits = torch.arange(8 * world_size).to(torch.uint8)  # several dtypes, as bytes
    output = bits.clone().zero_()
    output[8 * rank : 8 * rank + 8] = bits[8 * rank : 8 * rank + 8]
    UnitGather("int8")(output, output[8 * rank : 8 * rank + 8], dist.group.WORLD)
    assert torch.equal(output, bits)
    return found


def test_every_rank_computes_with_the_same_parameters_and_sends_the_bytes_that_are_priced(
    gloo: Processes,
) -> None:
    errors = {"none": 0.0, "fp16": 3e-4, "bf16": 3e-3, "fp8": 0.04, "int8": 0.01, "int4": 0.15}
    results = gloo.run(4, _gathers)
    for method in WEIGHTS:
        first = results[0][method]
        assert all(torch.equal(result[method].found, first.found) for result in results), method
        assert errors[method] / 4 <= first.error <= errors[method], (method, first.error)
        assert first.sent == 3 * wire_bytes(method, 4 * SIZE, 4), method


def _regathered(rank: int, world_size: int) -> tuple[float, float, float]:
    """Relative difference of gradients from those of plain gathers, with `grad_sync.weights` and after it is taken back;
    and the largest difference of what the optimizer holds, for which nothing may change."""
    example = build("llama", 4, torch.float32)
    share = part(example.inputs, 2 * rank, 2 * rank + 2), part(example.targets, 2 * rank, 2 * rank + 2)
    strategy = strategy_of(example, micro=1, micro_batches=2, dp_shard=2, zero=3)
    model = parallelize(example.module, share[0], strategy, blocks=example.blocks, program=no_program)
    held = [p.detach().to_local().clone() for p in model.parameters()]

    def gradients(weights: str) -> Tensor:
        model.synchronise_by(GradSync(weights=weights))
        model.zero_grad()
        model.step(*share, loss_fn=example.loss_fn)
        return torch.cat([p.grad.to_local().reshape(-1) for p in model.parameters()])

    plain, coded, back = gradients("none"), gradients("int8"), gradients("none")
    after = [p.detach().to_local() for p in model.parameters()]
    moved = max((a - b).abs().max().item() for a, b in zip(held, after, strict=True) if a.numel())
    with pytest.raises(UserError, match="weights"):
        model.synchronise_by(GradSync(weights="sign"))
    return (
        ((coded - plain).norm() / plain.norm()).item(),
        ((back - plain).norm() / plain.norm()).item(),
        moved,
    )


def test_gathers_are_compressed_and_plain_again_between_steps(gloo: Processes) -> None:
    for off, back, moved in gloo.run(2, _regathered):
        assert 1e-5 < off < 0.1
        assert back < 1e-6
        assert moved == 0.0


@pytest.fixture(scope="module")
def exact(gloo: Processes) -> float:
    """The loss after as many steps without compression, the same at every level of ZeRO."""
    loss: float = gloo.run(2, final_loss, method="none", zero=0, steps=150)[0]
    assert loss < 1.15 * source_entropy(), "it has learnt what there is to learn"
    return loss


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("method", "zero", "weights"), [("int4", 3, "none"), ("topk:0.1", 0, "none"), ("none", 3, "int8")]
)
def test_a_small_llama_reaches_the_uncompressed_loss(
    gloo: Processes, exact: float, method: str, zero: int, weights: str
) -> None:
    """All methods: benchmarks/compressed_training.py."""
    found = gloo.run(2, final_loss, method=method, zero=zero, steps=150, weights=weights)[0]
    assert found < 1.01 * exact


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline, zero 2": (4, {"pp": 2, "dp_shard": 2, "zero": 2}),
    "tensors, replicas": (4, {"tp": 2, "dp_replicate": 2}),
    "tensors, zero 2": (4, {"tp": 2, "dp_shard": 2, "zero": 2}),
    "shards and replicas": (4, {"dp_replicate": 2, "dp_shard": 2, "zero": 3}),
    "zero 1": (2, {"dp_shard": 2, "zero": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_near_those_of_one_process_under(gloo: Processes, case: str) -> None:
    ranks, options = CASES[case]
    pipeline = options | {"micro_batches": 2, "compression": ("fp8", "fp8")}
    strategy = strategy_of(build("llama", 1, torch.float32), **pipeline)
    if strategy.mesh.pp > 1:
        strategy = replace(strategy, pipeline=Pipeline(schedule="1f1b", stage_blocks=(1, 1)))
    found = gloo.run(ranks, run_strategy, name="llama", strategy=strategy)[0]
    assert 1e-4 < found.gradient < 0.15, "eight bits, of which three are a number's own"
    assert found.loss < 1e-3


def _moved(rank: int, world_size: int) -> tuple[float, float]:
    """Three steps of top-k over replicas; what they owe, loaded by ranks that shard and by one rank's worth of AdamW
    without compression: relative difference of what is owed there, and of the sum that comes."""
    example = build("llama", 4, torch.float32)
    share = part(example.inputs, 2 * rank, 2 * rank + 2), part(example.targets, 2 * rank, 2 * rank + 2)

    def made(**options: Any) -> tuple[Any, Any]:
        fresh = build("llama", 4, torch.float32)
        strategy = strategy_of(fresh, micro=2, **options)
        model = parallelize(fresh.module, share[0], strategy, blocks=fresh.blocks, program=no_program)
        return model, model.optimizer(torch.optim.SGD, lr=0.0)

    def step(model: Any, optimizer: Any) -> dict[str, Tensor]:
        optimizer.zero_grad()
        model.step(*share, loss_fn=example.loss_fn)
        optimizer.step()
        gradients: dict[str, Tensor] = model.full_gradients()
        return gradients

    def whole(optimizer: Any) -> Tensor:
        state = optimizer.state_dict()
        found = gather_full({name: state[f"state.{name}.residual"] for name in names}, 0)
        return torch.cat([found[name].reshape(-1) for name in names])

    names = [name for name, _ in example.module.named_parameters()]
    model, optimizer = made(dp_replicate=2, compression=("topk:0.05",))
    for _ in range(3):
        step(model, optimizer)
    saved, owed = optimizer.state_dict(), whole(optimizer)
    _, other = made(dp_shard=2, zero=2, compression=("sign",))
    other.load_state_dict({k: v.clone() if isinstance(v, Tensor) else v for k, v in saved.items()})
    kept = whole(other)
    plain, last = made(dp_shard=2, zero=2)
    exact = step(plain, last)
    last.load_state_dict(saved)
    paid = step(plain, last)
    came = torch.cat([(paid[n] - exact[n]).reshape(-1) for n in names]) if rank == 0 else owed
    return ((kept - owed).norm() / owed.norm()).item(), ((came - owed).norm() / owed.norm()).item()


def test_what_is_owed_goes_along_to_another_strategy(gloo: Processes) -> None:
    """Saved over replicas, loaded by ranks that shard and compress otherwise, and by ones that do not compress."""
    for kept, came in gloo.run(2, _moved):
        assert kept < 1e-6
        assert came < 1e-4


def _switched(rank: int, world_size: int, options: dict[str, Any]) -> tuple[float, float, str]:
    """Losses after gradients are synchronised otherwise: without a restart, and by way of a checkpoint; largest difference,
    and how far gradients are from each other when a step without compression is repeated."""
    example = build("llama", 4, torch.float32)
    share = part(example.inputs, 2 * rank, 2 * rank + 2), part(example.targets, 2 * rank, 2 * rank + 2)
    after = GradSync(compression=("sign",), bucket_mib=0.02)

    def made(sync: GradSync) -> tuple[Any, Any]:
        fresh = build("llama", 4, torch.float32)
        strategy = replace(strategy_of(fresh, micro=2, **options), grad_sync=sync)
        model = parallelize(fresh.module, share[0], strategy, blocks=fresh.blocks, program=no_program)
        return model, model.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)

    def run(model: Any, optimizer: Any, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(model.step(*share, loss_fn=example.loss_fn).item())
            optimizer.step()
        return losses

    def gradients(model: Any, optimizer: Any) -> dict[str, Tensor]:
        optimizer.zero_grad()
        model.step(*share, loss_fn=example.loss_fn)
        found: dict[str, Tensor] = model.full_gradients()
        return found

    model, optimizer = made(GradSync(compression=("topk:0.1",), bucket_mib=0.01))
    run(model, optimizer, 3)
    saved = {name: _copy(value) for name, value in model.state_dict().items()}
    state = {name: _copy(value) for name, value in optimizer.state_dict().items()}
    restarted, other = made(after)
    restarted.load_state_dict(saved)
    other.load_state_dict(state)
    model.synchronise_by(after)
    pairs = zip(run(model, optimizer, 4), run(restarted, other, 4), strict=True)
    worst = max(abs(one - two) / two for one, two in pairs)
    model.synchronise_by(GradSync())
    run(model, optimizer, 1)  # what was owed is paid
    once, again = gradients(model, optimizer), gradients(model, optimizer)
    same = max((((once[n] - g).norm() / g.norm()).item() for n, g in again.items()), default=0.0)
    with pytest.raises(UserError, match="int3"):
        model.synchronise_by(GradSync(compression=("int3",)))
    return worst, same, model.strategy.grad_sync.algorithm


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("options", [{"dp_replicate": 2}, {"dp_shard": 2, "zero": 2}])
def test_switching_between_steps_equals_checkpoint_and_restart(
    gloo: Processes, options: dict[str, Any]
) -> None:
    for worst, same, algorithm in gloo.run(2, _switched, options=options):
        assert worst < 1e-5
        assert same < 1e-6, "no method is left over"
        assert algorithm == "auto"


def test_the_method_is_that_of_the_outermost_level_between_the_ranks() -> None:
    levels, methods = (4, 16), ("none", "bf16")
    assert method_between([0, 1, 2], methods, levels) == "none"
    assert method_between([3, 4], methods, levels) == "bf16"
    assert method_between([0, 16], methods, levels) == "bf16"
    assert method_between([0, 1], (), levels) == "none"
    assert method_between([0, 1], methods, ()) == "bf16"
