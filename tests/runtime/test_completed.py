"""What a strategy leaves open is priced and run alike, however it came in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoparallel import auto_parallelize
from autoparallel.costmodel.graph_json import graph_hash
from autoparallel.dryrun import compare
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.load import keyword_inputs
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.score import completed, program_of, score
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Pipeline, Recompute, Shard, Strategy
from autoparallel.planner.strategy.write import write_strategy
from autoparallel.profiles import load_cluster
from autoparallel.runtime.check.dryrun import dry_run
from tests.runtime.harness import Processes
from tests.runtime.models import EXAMPLES

MODEL, SAMPLES = "llama_with_labels", 8
NORM_BYTES = 512  # sums of norms' gradients are no larger: once a micro-batch where there are replicas, priced once a step
FP32 = Execution(
    dtype="fp32", param_dtype="fp32", grad_dtype="fp32", master_weights=False, kernels="eager", dtensor=True
)
TENSOR_PARALLEL = Strategy(
    batch=Batch(global_=SAMPLES, micro=2),
    mesh=Mesh(tp=2),
    shard=Shard(sequence_parallel=False),
    execution=FP32,
)


@cache
def _expander(devices: int) -> Expander:
    example = EXAMPLES[MODEL](4)
    graph = capture(example.module, keyword_inputs(example.module, example.inputs), name=MODEL)
    return Expander(graph, load_cluster(f"cpu-gloo:1x{devices}"))


def _run(
    rank: int, world_size: int, folder: str, given: Mapping[str, Any]
) -> list[tuple[Strategy, int, int, int]]:
    """Of each source of a strategy: what runs, its parameters' bytes here and as priced, and the priced stages."""
    found = []
    for name, source in given.items():
        example = EXAMPLES[MODEL](SAMPLES)
        strategy: Any = Path(folder) / f"{name}.toml" if source is None else source
        model: Any = auto_parallelize(example.module, example.inputs, strategy=strategy, cache=None)
        held = sum(p.to_local().nbytes for p in dict.fromkeys(model.parameters()))
        priced = sum(stage.parameter_bytes for stage in model.program.stages)
        found.append((model.strategy, held, priced, len(model.program.stages)))
    return found


@pytest.mark.distributed
def test_a_strategy_that_does_not_say_what_is_sharded_runs_as_it_is_priced(
    gloo: Processes, tmp_path: Path
) -> None:
    """As an object, as one that says a part of it, and as a file that says as little."""
    expander = _expander(2)
    whole = completed(expander, TENSOR_PARALLEL)
    assert len(whole.tensor) > 4, whole.tensor
    part = replace(TENSOR_PARALLEL, tensor=whole.tensor[:2])
    example = EXAMPLES[MODEL](SAMPLES)
    hash_ = graph_hash(capture(example.module, keyword_inputs(example.module, example.inputs), name=MODEL))
    write_strategy(
        tmp_path / "file.toml", completed(expander, part), {"model": "x", "graph_hash": hash_}, {}, {}
    )
    text = (tmp_path / "file.toml").read_text()
    (tmp_path / "file.toml").write_text(
        text.split("[[tensor]]")[0].replace("schema = 1", "schema = 1\ntensor = []")
    )
    sources = {"object": TENSOR_PARALLEL, "part": part, "file": None}
    for ranks in gloo.run(2, _run, folder=str(tmp_path), given=sources):
        for name, (strategy, held, priced, stages) in zip(sources, ranks, strict=True):
            assert strategy.tensor == whole.tensor, name
            assert strategy.pipeline.stage_blocks == (2,), name
            assert stages == 1
            assert held == pytest.approx(priced, rel=0.01), name


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    """Small ones, as open as a strategy can be."""
    sizes = st.sampled_from((1, 2))
    mesh = Mesh(pp=draw(sizes), dp_replicate=draw(sizes), dp_shard=draw(sizes), tp=draw(sizes))
    micro = draw(sizes)
    return Strategy(
        batch=Batch(global_=4 * micro * mesh.data_parallel, micro=micro),
        mesh=mesh,
        shard=Shard(
            zero=draw(st.sampled_from((1, 2, 3))) if mesh.dp_shard > 1 else 0,
            sequence_parallel=mesh.tp > 1 and draw(st.booleans()),
        ),
        pipeline=Pipeline(schedule=draw(st.sampled_from(("gpipe", "1f1b"))) if mesh.pp > 1 else "none"),
        recompute=Recompute(mode=draw(st.sampled_from(("none", "full")))),
        execution=replace(FP32, fsdp2=True),
    )


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(strategy=strategies(), told=st.integers(0, 4))
def test_what_is_lowered_of_an_open_strategy_is_what_is_priced(strategy: Strategy, told: int) -> None:
    """Whatever part of its tensor rules it says already; and saying them all changes no price."""
    expander = _expander(strategy.mesh.devices)
    assert not strategy_problems(expander.graph, expander.cluster, strategy)
    whole = completed(expander, strategy)
    part = replace(strategy, tensor=whole.tensor[:told])
    assert completed(expander, part) == whole == completed(expander, whole)
    asked = score(expander.graph, expander.cluster, part, expander)
    assert asked == score(expander.graph, expander.cluster, whole, expander)
    with torch.device("meta"):
        example = EXAMPLES[MODEL](4)
    stages = dry_run(example.module, example.inputs, whole, blocks=example.blocks)
    for rank in compare(whole, program_of(expander, part), stages):
        for kind in ("parameters", "optimizer"):
            held = rank.held_bytes[kind]
            assert held.lowered == pytest.approx(held.predicted, rel=0.01), (kind, rank)
        for message, count in rank.messages.items():
            if message.axis in ("tp", "pp") and message.size_bytes > NORM_BYTES:
                assert count.lowered == count.predicted, (message, rank)
