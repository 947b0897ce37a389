"""The configurations in examples/ against the published sizes of the models."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoparallel.costmodel.graph import OpKind
from autoparallel.costmodel.graph_json import graph_from_json, graph_to_json
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.load import load_model

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"

# Parameters as the checkpoints on the Hugging Face hub count them, tied ones once. DeepSeek-V3 is without its
# multi-token-prediction layer, as its report counts it.
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "gpt2": 124_439_808,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "gemma-2-9b": 9_241_705_984,
    "deepseek-v3": 671_026_404_352,
    "bert-base": 109_514_298,
    "t5-base": 222_903_552,
    "vit-base": 86_567_656,
    "whisper-small": 241_734_912,
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_model_has_its_published_size(name: str) -> None:
    model = load_model(f"hf:{CONFIGS / f'{name}.json'}", model_args={}, seq_len=64)
    graph = capture(model.module, model.example_inputs, name=model.name)
    assert graph.parameter_count == PARAMETERS[name]
    assert graph.has_loss
    assert not graph.warnings
    assert graph_from_json(graph_to_json(graph)) == graph


def test_the_flops_of_llama_8b_are_six_a_parameter_and_token_and_those_of_attention() -> None:
    seq_len = 1024
    model = load_model(f"hf:{CONFIGS / 'llama-3.1-8b.json'}", model_args={}, seq_len=seq_len)
    graph = capture(model.module, model.example_inputs, name=model.name)
    multiplied = (
        8_030_261_248 - 128256 * 4096 - 65 * 4096
    )  # without the table that is looked up and the norms
    attention = 32 * 3 * 2 * 2 * 4096 * seq_len**2  # layers · (forward + 2) · two products · 2 · width · s²
    assert graph.model_flops(1) == 6 * multiplied * seq_len + attention


def test_resnet_50_has_its_published_size_and_flops() -> None:
    path = CONFIGS.parent / "resnet.py"
    model = load_model(f"{path}:resnet50", model_args={}, seq_len=None)
    graph = capture(model.module, model.example_inputs, name=model.name)
    assert graph.parameter_count == 25_557_032  # torchvision
    forward = sum(
        kernel.flops.per_sample
        for link in graph.chain
        for op in graph.blocks[link.block].operators
        if op.kind in {OpKind.CONV, OpKind.GEMM}
        for kernel in op.forward
    )
    assert forward / 2 == pytest.approx(
        4.09e9, rel=0.005
    )  # torchvision's table: 4.09 GFLOPS, a multiply-add as one
