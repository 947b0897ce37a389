"""What models of sound, of pictures with words and of series are fed, by the names of their arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autoparallel.planner.capture.load import load_model

_SMALL = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
_VISION = {**_SMALL, "image_size": 16, "patch_size": 8}
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "images and texts that belong together": (
        {"model_type": "clip", "architectures": ["CLIPModel"], "text_config": _SMALL, "vision_config": _VISION},
        {"input_ids": (2, 24), "pixel_values": (2, 3, 16, 16)},
    ),
    "an image in front of a text": (
        {
            "model_type": "paligemma", "architectures": ["PaliGemmaForConditionalGeneration"], "image_token_index": 63,
            "text_config": {**_SMALL, "model_type": "gemma", "num_key_value_heads": 2, "head_dim": 8},
            "vision_config": {**_VISION, "model_type": "siglip_vision_model", "projection_dim": 16},
            "projection_dim": 16,
        },
        {"input_ids": (2, 24), "pixel_values": (2, 3, 16, 16), "labels": (2, 24)},
    ),
    "sound as it is recorded": (
        {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"], **_SMALL, "conv_stride": [4, 4],
         "conv_kernel": [4, 4], "conv_dim": [8, 8], "num_feat_extract_layers": 2},
        {"input_values": (2, 24 * 16), "labels": (2, 24)},
    ),
    "a time series and what comes after it": (
        {"model_type": "time_series_transformer", "architectures": ["TimeSeriesTransformerForPrediction"],
         "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 3], "num_time_features": 2},
        {"past_values": (2, 11), "past_time_features": (2, 11, 2), "past_observed_mask": (2, 11),
         "future_values": (2, 4), "future_time_features": (2, 4, 2)},
    ),
    "words in boxes": (
        {"model_type": "bros", "architectures": ["BrosModel"], **_SMALL, "hidden_size": 64},
        {"input_ids": (2, 24), "bbox": (2, 24, 4)},
    ),
    "sound with its length": (
        {"model_type": "audioflamingo3_encoder", "architectures": ["AudioFlamingo3Encoder"], **_SMALL,
         "num_mel_bins": 8, "max_source_positions": 64, "encoder_layers": 1, "d_model": 16, "encoder_ffn_dim": 32,
         "encoder_attention_heads": 2},
        {"input_features": (2, 8, 128), "input_features_mask": (2, 128)},
    ),
    "an encoder and a decoder that do not say how a sentence begins": (
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], **_SMALL, "d_model": 16, "d_kv": 8,
         "d_ff": 32, "num_layers": 1, "num_heads": 2},
        {"input_ids": (2, 24), "labels": (2, 24)},
    ),
    "sound for strides that are buffers": (
        {"model_type": "encodec", "architectures": ["EncodecModel"], "hidden_size": 8, "num_filters": 2,
         "upsampling_ratios": [40, 20], "codebook_dim": 8, "codebook_size": 16},
        {"input_values": (2, 1, 48_000)},
    ),
    "patches cut out before, and where they were": (
        {"model_type": "siglip2_vision_model", "architectures": ["Siglip2VisionModel"], **_SMALL, "num_patches": 16,
         "patch_size": 8},
        {"pixel_values": (2, 16, 3 * 8 * 8), "pixel_attention_mask": (2, 16), "spatial_shapes": (2, 2)},
    ),
    "a film, parts of it masked": (
        {"model_type": "videomae", "architectures": ["VideoMAEForPreTraining"], **_VISION, "num_frames": 4,
         "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2},
        {"pixel_values": (2, 4, 3, 16, 16), "bool_masked_pos": (2, 8)},
    ),
    "two views to match, and nothing to learn from": (
        {"model_type": "efficientloftr", "architectures": ["EfficientLoFTRModel"]},
        {"pixel_values": (2, 2, 3, 224, 224)},
    ),
    "sound by another name, with a mask of flags": (
        {"model_type": "gemma3n_audio", "architectures": ["Gemma3nAudioEncoder"], "hidden_size": 32,
         "conf_num_attention_heads": 2, "conf_num_hidden_layers": 1},
        {"audio_mel": (2, 1024, 128), "audio_mel_mask": (2, 1024)},
    ),
    "images by queries in front of a text, by a token without a number": (
        {"model_type": "blip-2", "architectures": ["Blip2ForConditionalGeneration"], "num_query_tokens": 4,
         "vision_config": _VISION, "qformer_config": {**_SMALL, "encoder_hidden_size": 16},
         "text_config": {"model_type": "opt", **_SMALL, "ffn_dim": 32, "word_embed_proj_dim": 16}},
        {"pixel_values": (2, 3, 16, 16), "input_ids": (2, 24), "labels": (2, 24)},
    ),
    "what queries ask is as wide as another model": (
        {"model_type": "blip_2_qformer", "architectures": ["Blip2QFormerModel"], **_SMALL, "encoder_hidden_size": 24},
        {"input_ids": (2, 24), "query_embeds": (2, 32, 16), "encoder_hidden_states": (2, 24, 24),
         "attention_mask": (2, 24), "encoder_attention_mask": (2, 24)},
    ),
    "patches cut out before, each with its column and row": (
        {"model_type": "gemma4_vision", "architectures": ["Gemma4VisionModel"], **_SMALL, "head_dim": 8,
         "num_key_value_heads": 2, "patch_size": 4},
        {"input_ids": (2, 24), "pixel_values": (2, 324, 48), "pixel_position_ids": (2, 324, 2)},
    ),
    "sound as a picture": (
        {"model_type": "clap", "architectures": ["ClapModel"], "text_config": _SMALL,
         "audio_config": {"depths": [1, 1], "num_attention_heads": [2, 2], "patch_embeds_hidden_size": 16,
                          "num_hidden_layers": 2, "hidden_size": 32}, "projection_dim": 16},
        {"input_ids": (2, 24), "input_features": (2, 1, 1024, 64)},
    ),
    "steps without an end": (
        {"model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], **_SMALL,
         "num_key_value_heads": 2, "layer_types": ["attention"], "mamba_n_heads": 4,
         "time_step_limit": [0.0, {"__float__": "Infinity"}]},
        {"input_ids": (2, 24), "labels": (2, 24)},
    ),
    "a map of classes": (
        {"model_type": "segformer", "architectures": ["SegformerForSemanticSegmentation"], "image_size": 32},
        {"pixel_values": (2, 3, 32, 32), "labels": (2, 32, 32)},
    ),
}  # fmt: skip


@pytest.mark.sweep(9)
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_is_fed_what_it_is_made_for(kind: str, tmp_path: Path) -> None:
    raw, shapes = CONFIGS[kind]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    inputs = load_model(f"hf:{tmp_path}", model_args={}, seq_len=24).example_inputs
    assert {k: tuple(v.shape) for k, v in inputs.items() if isinstance(v, torch.Tensor)} == shapes
    if raw["model_type"] == "paligemma":
        assert (inputs["input_ids"] == 63).sum(1).tolist() == [4, 4]  # the patches of an image
    if raw["model_type"] == "blip-2":
        assert (inputs["input_ids"] == 63).sum(1).tolist() == [4, 4]  # what the queries found
