from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from autoparallel.errors import UserError
from autoparallel.runtime.lowering.micro_batches import as_call
from autoparallel.runtime.stages.cut import StageModule, cut, release

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 16, "use_cache": False,
}  # fmt: skip
BERT_LIKE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
Made = tuple[nn.Module, Any, list[str]]  # module, inputs, paths of the blocks


def _tokens(batch: int = 4) -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (batch, 8))
    return {"input_ids": ids, "labels": ids.clone()}


def _decoder(kind: str, **more: Any) -> Made:
    config = hf.AutoConfig.for_model(kind, **SMALL, **more)
    module = hf.AutoModelForCausalLM.from_config(config)
    return module, _tokens(), [f"model.layers.{i}" for i in range(4)]


def _gpt2(**more: Any) -> Made:
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **more}
    config = hf.GPT2Config(
        n_embd=32, n_layer=4, n_head=4, vocab_size=64, n_positions=16, use_cache=False, **options
    )
    return hf.GPT2LMHeadModel(config), _tokens(), [f"transformer.h.{i}" for i in range(4)]


def _bert() -> Made:
    module = hf.BertForMaskedLM(hf.BertConfig(**BERT_LIKE, vocab_size=64, max_position_embeddings=16))
    mask = torch.ones(4, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    inputs = _tokens() | {"attention_mask": mask}
    return module, inputs, [f"bert.encoder.layer.{i}" for i in range(4)]


def _vit() -> Made:
    config = hf.ViTConfig(**BERT_LIKE, image_size=16, patch_size=4, num_labels=5)
    inputs = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(0, 5, (4,))}
    return hf.ViTForImageClassification(config), inputs, [f"vit.layers.{i}" for i in range(4)]


def _t5() -> Made:
    config = hf.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64, use_cache=False,
        decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    paths = [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(2)]
    return hf.T5ForConditionalGeneration(config), _tokens(), paths


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = (
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(self.relu(x)))


def _resnet() -> Made:
    body = nn.Sequential(*(Residual() for _ in range(4)))
    stem = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8))
    module = nn.Sequential(*stem, body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return module, (torch.randn(4, 3, 8, 8),), [f"2.{i}" for i in range(4)]


def _mlp() -> Made:
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Linear(6, 16), *layers, nn.Linear(16, 3)), torch.randn(4, 6), list("1234")


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor, seen: list[Tensor]) -> Tensor:
        return x + y + 0 * len(seen)


class Waves(nn.Module):
    """Fills a tensor of its own half by half, by places that it is given."""

    def forward(self, places: Tensor, like: Tensor) -> Tensor:
        filled = torch.zeros((places.shape[0], 8), dtype=like.dtype)
        filled[:, :4], filled[:, 4:] = torch.sin(places * 0.5), torch.cos(places * 0.5)
        return filled[None].expand(like.shape[0], -1, -1)


class Skips(nn.Module):
    """Uses a bare parameter, an early activation late (given to a module twice), a buffer, an in-place write and a
    module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm, self.sum, self.waves = nn.LayerNorm(8), Sum(), Waves()
        self.position = nn.Parameter(torch.randn(6, 8))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = x + self.position + self.waves(torch.arange(6).unsqueeze(1) + 1, x)
        shifted = x.new_zeros(x.shape)
        shifted[:, 1:] = x[:, :-1] * self.scale
        y = self.norm(self.blocks[0](first))
        y = self.blocks[1](y + shifted)
        y = self.norm(self.sum(self.blocks[2](y), first, [first]))
        return self.blocks[3](y) * self.scale + shifted


def _skips() -> Made:
    return Skips(), torch.randn(4, 6, 8), [f"blocks.{i}" for i in range(4)]


class Wrapper(nn.Module):
    """Around a model, whose arguments it does not know: as those that add adapters to one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def _wrapped() -> Made:
    module, inputs, paths = _gpt2()
    return Wrapper(module), inputs, [f"model.{path}" for path in paths]


MODELS: dict[str, Callable[[], Made]] = {
    "llama": lambda: _decoder("llama", tie_word_embeddings=True),
    "qwen3": lambda: _decoder("qwen3", head_dim=8),
    "gemma2": lambda: _decoder("gemma2", head_dim=8, sliding_window=4),
    "mixtral": lambda: _decoder("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "gpt2": _gpt2,
    "bert": _bert,
    "vit": _vit,
    "t5": _t5,
    "resnet": _resnet,
    "mlp": _mlp,
    "skips": _skips,
    "wrapped": _wrapped,
}
SINGLE = ("mixtral",)  # torch's grouped product has no float64


def _make(name: str) -> Made:
    torch.manual_seed(0)
    module, inputs, paths = MODELS[name]()
    if name in SINGLE:
        return module.train(), inputs, paths
    double = torch.utils._pytree.tree_map_only(
        Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs
    )
    return module.double().train(), double, paths


def _chain(stages: tuple[StageModule, ...], inputs: Any) -> Any:
    handed: Any = ()
    for stage in stages:
        handed = stage(handed, inputs)
    return handed


def _loss(output: Any) -> Tensor:
    return output.loss if hasattr(output, "loss") else output.square().mean()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", MODELS)
def test_chained_stages_compute_the_loss_and_gradients_and_hold_the_state_of_the_whole(name: str) -> None:
    module, inputs, paths = _make(name)
    whole = copy.deepcopy(module)
    stages = cut(module, inputs, repeated_paths=paths, stage_blocks=(1, 2, 1))
    _check_state(module, stages)
    output = _chain(stages, inputs)
    args, kwargs = as_call(inputs)
    expected = whole(*args, **kwargs)
    assert type(output) is type(expected)
    _loss(output).backward()
    _loss(expected).backward()
    tolerance = 1e-6 if name in SINGLE else 1e-12
    torch.testing.assert_close(_loss(output), _loss(expected), rtol=tolerance, atol=0)
    parameters = dict(module.named_parameters())
    for path, reference in whole.named_parameters():
        assert (parameters[path].grad is None) == (reference.grad is None), path
        if reference.grad is not None:
            difference = (parameters[path].grad - reference.grad).norm()
            assert difference <= tolerance * max(float(reference.grad.norm()), 1e-3), path
    for path, buffer in whole.named_buffers():
        torch.testing.assert_close(module.get_buffer(path), buffer, msg=path)


def _check_state(module: nn.Module, stages: tuple[StageModule, ...]) -> None:
    every = dict(module.state_dict(keep_vars=True))
    assert {key for stage in stages for key in stage.state_dict()} <= set(every)
    tensors = {id(p) for stage in stages for p in (*stage.parameters(), *stage.buffers())}
    assert not {key for key, tensor in every.items() if id(tensor) not in tensors}


def test_stages_without_blocks_and_unused_parameters_keep_the_whole_state() -> None:
    for name in ("skips", "mlp"):
        module, inputs, paths = _make(name)
        stages = cut(module, inputs, repeated_paths=paths, stage_blocks=(0, 4, 0))
        _check_state(module, stages)
        args, kwargs = as_call(inputs)
        torch.testing.assert_close(_chain(stages, inputs), module(*args, **kwargs))


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y, y.tanh()


class _Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Pair() for _ in range(2))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x, side = layer(x)
        return (x + side).flatten() @ target.view(-1)


def test_what_the_last_block_returns_is_taken_apart_where_it_ran() -> None:
    module, inputs = _Pairs(), (torch.randn(1, 4), torch.randn(1, 4))  # and a batch of one may be viewed
    stages = cut(module, inputs, repeated_paths=["layers.0", "layers.1"], stage_blocks=(1, 1, 0))
    torch.testing.assert_close(_chain(stages, inputs), module(*inputs))


class _Above(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0.0]


class _Picks(nn.Module):
    """Keeps of each sample what is above zero, side by side as long as the longest (as SuperPoint does with its points)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.above = _Above()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        kept = [self.above(sample) for sample in x]
        found = torch.zeros(len(x), max(part.shape[0] for part in kept))
        for row, part in enumerate(kept):
            found[row, : part.shape[0]] = part
        return found


def test_calls_of_one_submodule_may_return_other_sizes() -> None:
    torch.manual_seed(0)
    module = _Picks()
    stages = cut(module, torch.randn(3, 6), repeated_paths=["layers.0", "layers.1"], stage_blocks=(1, 1))
    for _ in range(4):
        other = torch.randn(3, 6)
        torch.testing.assert_close(_chain(stages, other), module(other))


def test_a_batch_of_another_size_and_of_one_run_through_the_same_cut() -> None:
    module, inputs, paths = _make("llama")
    for example in (inputs, {key: value[:1] for key, value in inputs.items()}):
        stages = cut(module, example, repeated_paths=paths, stage_blocks=(2, 2))
        for batch in (1, 3):
            other = {key: value[:batch] for key, value in inputs.items()}
            torch.testing.assert_close(_chain(stages, other).loss, module(**other).loss)


def test_only_what_depends_on_parameters_is_sent() -> None:
    module, inputs, paths = _make("llama")
    stages = cut(module, inputs, repeated_paths=paths, stage_blocks=(2, 2))
    assert [len(stage.stage_cut.sent) for stage in stages] == [1, 0]
    module, inputs, paths = _make("skips")
    stages = cut(module, inputs, repeated_paths=paths, stage_blocks=(1, 1, 2))
    sent = [set(stage.stage_cut.sent) for stage in stages]
    assert [len(values) for values in sent] == [2, 2, 0]
    assert len(sent[0] & sent[1]) == 1  # the early activation passes through the middle stage


def test_tied_parameters_are_found_with_their_name_on_each_stage() -> None:
    module, inputs, paths = _make("llama")
    stages = cut(module, inputs, repeated_paths=paths, stage_blocks=(2, 2), stages=[1])
    (tie,) = stages[0].stage_cut.ties
    assert tie.canonical == "model.embed_tokens.weight"
    assert dict(zip(tie.stages, tie.names, strict=True)) == {
        0: "model.embed_tokens.weight",
        1: "lm_head.weight",
    }


def test_absent_stages_hold_no_storage_after_release() -> None:
    module, inputs, paths = _make("gpt2")
    (stage,) = cut(module, inputs, repeated_paths=paths, stage_blocks=(1, 3), stages=[0])
    release(module, [stage])
    real = {name for name, p in module.named_parameters() if not p.is_meta}
    assert real == {name for name, _ in stage.named_parameters()}
    assert all(not name.startswith("transformer.h.1") for name in real)


def test_a_module_on_meta_is_cut_and_runs_once_it_has_values() -> None:
    module, inputs, paths = _make("gpt2")
    empty = copy.deepcopy(module).to("meta")
    examples = {key: value.to("meta") for key, value in inputs.items()}
    stages = cut(empty, examples, repeated_paths=paths, stage_blocks=(2, 2), device=torch.device("cpu"))
    assert all(p.is_meta for stage in stages for p in stage.parameters())
    for stage in stages:
        stage.to_empty(device="cpu")
        stage.load_state_dict({key: module.state_dict()[key] for key in stage.state_dict()})
    torch.testing.assert_close(_chain(stages, inputs).loss, module(**inputs).loss)


def test_dropout_stays_the_users_own_and_follows_train_and_eval() -> None:
    torch.manual_seed(0)
    module, inputs, paths = _gpt2(resid_pdrop=0.5, embd_pdrop=0.5)
    module.train()
    stages = cut(module, inputs, repeated_paths=paths, stage_blocks=(2, 2))
    assert _chain(stages, inputs).loss != _chain(stages, inputs).loss
    for stage in stages:
        stage.eval()
    torch.testing.assert_close(_chain(stages, inputs).loss, module.eval()(**inputs).loss)


def test_hooks_of_submodules_fire_in_their_stage() -> None:
    module, inputs, paths = _make("llama")
    stages = cut(module, inputs, repeated_paths=paths, stage_blocks=(2, 2))
    seen: list[str] = []
    for path in ("model.embed_tokens", "model.layers.3.mlp", "model.norm", "lm_head"):
        module.get_submodule(path).register_forward_hook(lambda *_, path=path: seen.append(path))
    _chain(stages, inputs)
    assert seen == ["model.embed_tokens", "model.layers.3.mlp", "model.norm", "lm_head"]


def test_a_causal_mask_is_left_to_the_attention_kernel_as_in_eager_mode() -> None:
    module, inputs, paths = _make("llama")
    (_, stage) = cut(module, inputs, repeated_paths=paths, stage_blocks=(2, 2))
    masks: list[Any] = []
    block = module.get_submodule(paths[3])
    block.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    hidden = torch.randn(4, 8, 32, dtype=torch.float64)
    stage((hidden,), inputs)
    module(**inputs)
    assert masks == [None, None]


def test_a_padding_mask_is_read_anew_in_every_step() -> None:
    module, inputs, paths = _make("llama")
    mask = torch.ones(4, 8, dtype=torch.int64)
    stages = cut(module, inputs | {"attention_mask": mask}, repeated_paths=paths, stage_blocks=(2, 2))
    for padded in (0, 3):
        mask[:, 8 - padded :] = 0
        given = inputs | {"attention_mask": mask}
        torch.testing.assert_close(_chain(stages, given).loss, module(**given).loss)


class Near(nn.Module):
    """Its blocks read a mask that `torch.vmap` makes of a function of two places, one of them the batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Bilinear(8, 8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        def near(sample: Tensor, place: Tensor) -> Tensor:
            return (place - sample >= 0) & (place - sample < 3)

        both = torch.vmap(torch.vmap(near, in_dims=(None, 0)), in_dims=(0, None))
        mask = both(torch.arange(x.shape[0]), torch.arange(8)).to(x.dtype)
        for block in self.blocks:
            x = block(x, mask)
        return x


def test_every_stage_makes_the_masks_that_vmap_makes() -> None:
    module, x = Near(), torch.randn(4, 8)
    stages = cut(module, x, repeated_paths=[f"blocks.{i}" for i in range(4)], stage_blocks=(2, 2))
    torch.testing.assert_close(_chain(stages, x), module(x))
    torch.testing.assert_close(_chain(stages, x[:3]), module(x[:3]))


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if float(x.sum()) > 0 else x
        return x


def test_what_cannot_be_cut_is_refused_in_words() -> None:
    module, inputs, paths = _make("mlp")
    with pytest.raises(UserError, match="adds up to 3"):
        cut(module, inputs, repeated_paths=paths, stage_blocks=(1, 2))
    with pytest.raises(UserError, match="the blocks run in the order"):
        cut(module, inputs, repeated_paths=paths[::-1], stage_blocks=(2, 2))
    with pytest.raises(UserError, match="cannot trace it"):
        cut(Reads(), torch.ones(2, 4), repeated_paths=["blocks.0", "blocks.1"], stage_blocks=(1, 1))
    module, inputs, paths = _make("llama")
    with pytest.raises(UserError, match="use_cache = False"):
        cut(module, inputs | {"use_cache": True}, repeated_paths=paths, stage_blocks=(2, 2))


def test_other_inputs_than_the_examples_are_refused_in_words() -> None:
    module, inputs, paths = _make("llama")
    stages = cut(module, inputs, repeated_paths=paths, stage_blocks=(2, 2))
    with pytest.raises(UserError, match="pass the same arguments"):
        _chain(stages, {"input_ids": inputs["input_ids"]})


class _Looking(nn.Module):
    """Looks at its input through blocks that do not learn, a teacher that stays in evaluation among them, and goes on in 16 bits
    with others that do. Keeps statistics, of which no stage reads one."""

    def __init__(self) -> None:
        super().__init__()
        self.eyes, self.layers = (nn.ModuleList(nn.Linear(4, 4) for _ in range(3)) for _ in range(2))
        self.teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("looked", torch.zeros(4))

    def train(self, mode: bool = True) -> _Looking:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.mean(0))  # type: ignore[operator]
        with torch.no_grad():
            taught = self.teacher(x)
            for eye in self.eyes:
                x = eye(x)
            with torch.autocast("cpu", enabled=False):
                self.looked.add_(x.mean(0))  # type: ignore[operator]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers:
                x = layer(x)
        return (x.float() - taught).square().mean()


def test_modes_of_the_models_own_code_hold_in_its_stages() -> None:
    module, x = _Looking().train(), torch.randn(8, 4)
    whole = copy.deepcopy(module)
    paths = [f"{name}.{i}" for name in ("eyes", "layers") for i in range(3)]
    stages = cut(module, x, repeated_paths=paths, stage_blocks=(2, 2, 2))
    for _ in range(2):
        found, expected = _chain(stages, x), whole(x)
        found.backward()
        expected.backward()
        assert found == expected
        assert torch.is_grad_enabled()
        for stage in stages:
            stage.train()
    gradients = [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (module, whole)]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    torch.testing.assert_close(module.state_dict(), whole.state_dict(), rtol=0, atol=0)
