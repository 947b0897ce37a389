"""The MODEL argument: what it may be, and what a mistake in it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autoparallel.errors import UserError
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.load import load_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 128,
}  # fmt: skip

FACTORY = """
import torch
from torch import nn

def model(width: int, depth=2, bias: bool = True, kind: str = "x", scale: float = 1.0, seq_len: int = 7):
    layers = nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(depth)))
    return layers, torch.zeros(2, seq_len, width)

def bare():
    return nn.Linear(2, 2)

def nothing():
    return 3

def broken():
    raise KeyError("oops")

def leaving():
    raise SystemExit(3)

made = nn.Linear(2, 2)
"""


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(FACTORY)
    return path


def config(tmp_path: Path, text: Any = None, **changes: Any) -> str:
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir(exist_ok=True)
    settings = {k: v for k, v in (LLAMA | changes).items() if v is not None}
    path.write_text(json.dumps(settings) if text is None else text)
    return f"hf:{path}"


def test_a_config_is_built_on_the_meta_device_with_labels(tmp_path: Path) -> None:
    model = load_model(config(tmp_path, torch_dtype="bfloat16"), model_args={}, seq_len=9)
    assert model.name == "tiny"
    assert {p.device.type for p in model.module.parameters()} == {"meta"}
    assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16}
    assert {key: tuple(value.shape) for key, value in model.example_inputs.items()} == {
        "input_ids": (2, 9),
        "labels": (2, 9),
    }
    assert model.module.training


def test_a_config_is_called_after_its_folder_even_from_within(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    assert load_model("hf:config.json", model_args={}).name == tmp_path.name


def test_the_folder_of_a_config_will_do(tmp_path: Path) -> None:
    path = Path(config(tmp_path).removeprefix("hf:")).parent
    assert load_model(f"hf:{path}", model_args={}).example_inputs["input_ids"].shape == (2, 128)


def test_without_architectures_an_encoder_and_a_decoder_come_together(tmp_path: Path) -> None:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 16, "vocab_size": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bart", **sizes, **heads}))
    assert type(load_model(f"hf:{path}", model_args={}).module).__name__ == "BartForConditionalGeneration"


def test_without_architectures_the_model_type_decides(tmp_path: Path) -> None:
    model = load_model(config(tmp_path, architectures=None), model_args={}, seq_len=4)
    assert type(model.module).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["NoSuchModel"]}, "NoSuchModel"),
        ({"model_type": "no-such-type"}, "no-such-type"),
        ({"model_type": None}, "model_type"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map"),
        ({"hidden_size": "wide"}, "config.json"),
        ({"architectures": ["AutoModel"]}, "AutoModel"),
    ],
)
def test_a_wrong_config_says_what_is_wrong(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_model(config(tmp_path, **changes), model_args={})
    assert "config.json" in str(caught.value)


def test_a_quantised_config_is_planned_unquantised_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    plain = load_model(f"hf:{path}", model_args={})
    path.write_text(json.dumps({**LLAMA, "quantization_config": {"quant_method": "fp8"}}))
    quantised = load_model(f"hf:{path}", model_args={})
    assert plain.warnings == ()
    (said,) = quantised.warnings
    assert "quantization_config (fp8)" in said
    assert {n: p.dtype for n, p in quantised.module.named_parameters()} == {
        n: p.dtype for n, p in plain.module.named_parameters()
    }


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_malformed_config_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        load_model(config(tmp_path, text), model_args={})


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_model(f"hf:{tmp_path}/nothing", model_args={})


def test_a_learned_table_of_positions_bounds_the_sequence(tmp_path: Path) -> None:
    changes = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "max_position_embeddings": 32,
        "n_embd": 32,
        "n_head": 2,
    }
    with pytest.raises(UserError, match="32"):
        load_model(config(tmp_path, **changes), model_args={}, seq_len=64)


def test_a_file_and_a_name_with_arguments_by_annotation(factory: Path) -> None:
    arguments = {"width": "16", "depth": "3", "bias": "false", "kind": "3", "scale": "2.5"}
    model = load_model(f"{factory}:model", model_args=arguments, seq_len=5)
    assert sum(p.numel() for p in model.module.parameters()) == 3 * 16 * 16
    assert model.example_inputs["input"].shape == (2, 5, 16)


def test_a_module_and_a_name(factory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(factory.parent)
    factory.rename(factory.parent / "some_models_for_this_test.py")
    assert load_model("some_models_for_this_test:model", model_args={"width": "4"}).name == "model"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("modle", {}, "model, bare, nothing, broken"),
        ("model", {}, "--model-arg width=VALUE"),
        ("model", {"width": "wide"}, "not an integer"),
        ("model", {"width": "4", "bias": "maybe"}, "true or false"),
        ("model", {"width": "4", "wdth": "4"}, "takes width"),
        ("bare", {}, "example inputs"),
        ("made", {}, "a module already"),
        ("nothing", {}, "torch.nn.Module"),
        ("broken", {}, "KeyError"),
        ("leaving", {}, r"ended the process \(sys.exit\(3\)\)"),
    ],
)
def test_a_wrong_factory_says_what_to_do(
    factory: Path, name: str, arguments: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_model(f"{factory}:{name}", model_args=arguments)


def test_parameters_that_the_example_inputs_do_not_reach_are_named() -> None:
    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text = torch.nn.Linear(8, 8)
            self.vision = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
            self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.text(x))

    (said,) = capture(Half(), torch.zeros(2, 8), name="half").warnings
    assert said.startswith("144 parameters are not used with the example inputs (vision)")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("llama", "not a model"),
        ("no_such_package.models:model", "no such Python module"),
        ("no_such_file.py:model", "no such file"),
    ],
)
def test_a_wrong_model_says_what_it_may_be(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_model(spec, model_args={})


def test_a_file_that_does_not_import_is_named(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("import no_such_thing_at_all")
    with pytest.raises(UserError, match="no_such_thing_at_all"):
        load_model(f"{path}:model", model_args={})


def test_a_script_that_runs_when_it_is_imported_is_told_of_main(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--data', required=True)\np.parse_args([])"
    )
    with pytest.raises(UserError, match=r"ended the process.*__main__"):
        load_model(f"{path}:model", model_args={})


@pytest.mark.parametrize("length", [10**15, 10**20])
def test_a_sequence_that_no_memory_holds_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(UserError, match=f"no example sequence of {length} tokens"):
        load_model(config(tmp_path), model_args={}, seq_len=length)


def test_a_sequence_of_a_million_tokens_is_captured(tmp_path: Path) -> None:
    length = 2**20
    model = load_model(config(tmp_path), model_args={}, seq_len=length)
    graph = capture(model.module, model.example_inputs, name="long")
    assert graph.tokens_per_sample == length
    assert graph.warnings == ()


class _Branches(torch.nn.Module):
    """Repeated layers, and a forward that branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if float(x.detach().sum()) > 0 else 2 * x


def test_a_model_with_repeated_layers_that_branches_on_values_is_priced_whole() -> None:
    graph = capture(_Branches().to("meta"), {"x": torch.zeros(2, 8)}, name="branches")
    assert len(graph.warnings) == 1
    assert "cannot be traced" in graph.warnings[0]
    assert graph.parameter_count == 4 * 72


class _Loop(torch.nn.Module):
    """A recurrence over the sequence, step by step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x[:, 0]
        for step in range(x.shape[1]):
            state = torch.tanh(state + x[:, step])
        return state


@pytest.mark.parametrize(("length", "warned"), [(8, False), (80, True)])
def test_a_long_loop_in_python_is_named(length: int, warned: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), _Loop()).to("meta")
    graph = capture(model, (torch.zeros(2, length, 4),), name="loop")
    said = [w for w in graph.warnings if "a loop in Python" in w]
    assert len(said) == warned, graph.warnings
    assert all("calls aten." in w and w.startswith("*") for w in said)
