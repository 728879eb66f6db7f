"""Write tiny checkpoints of language models that hear, with transformers' own processors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from support.checkpoints.language_checkpoints import VOCAB
from support.families.processed_vlms import Family

RATE = 16_000
VOXTRAL_TOKEN = VOCAB  # the first mark
VOXTRAL_TOKENS = 75  # of a stretch of 30 seconds
WHISPER = ("WhisperFeatureExtractor", {"feature_size": 16, "chunk_length": 2, "n_fft": 400})
_TOWER = {
    "d_model": 32,
    "num_mel_bins": 16,
    "max_source_positions": 100,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
}
_SECTIONS = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
    }
}

FAMILIES: dict[str, Family] = {
    "qwen2_audio": Family(
        {"feature_extractor": WHISPER},
        {
            "audio_token": "<|AUDIO|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
        },
        {"audio_token_index": "audio_token"},
        audio=_TOWER,
    ),
    "qwen2_5_omni_thinker": Family(
        {
            "feature_extractor": WHISPER,
            "image_processor": ("Qwen2VLImageProcessorPil", {"patch_size": 14}),
        },
        {
            "audio_token": "<|AUDIO|>",
            "image_token": "<|IMAGE|>",
            "video_token": "<|VIDEO|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
            "vision_bos_token": "<|vision_bos|>",
            "vision_eos_token": "<|vision_eos|>",
        },
        {
            "audio_token_index": "audio_token",
            "image_token_index": "image_token",
            "video_token_index": "video_token",
            "audio_start_token_id": "audio_bos_token",
            "audio_end_token_id": "audio_eos_token",
            "vision_start_token_id": "vision_bos_token",
            "vision_end_token_id": "vision_eos_token",
        },
        text=_SECTIONS,
        tower={
            "hidden_size": 32,
            "out_hidden_size": 64,
            "patch_size": 14,
            "fullatt_block_indexes": [1],
        },
        audio={**_TOWER, "n_window": 10, "output_dim": 64},
    ),
    "qwen3_omni_moe_thinker": Family(
        {
            "feature_extractor": WHISPER,
            "image_processor": ("Qwen2VLImageProcessorPil", {"patch_size": 14}),
        },
        {
            "audio_token": "<|audio_pad|>",
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
        },
        {
            "audio_token_id": "audio_token",
            "image_token_id": "image_token",
            "video_token_id": "video_token",
            "audio_start_token_id": "audio_bos_token",
            "vision_start_token_id": "vision_bos_token",
            "vision_end_token_id": "vision_eos_token",
        },
        text={
            **_SECTIONS,
            "sliding_window": None,
            "num_hidden_layers": 3,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        tower={
            "depth": 3,
            "patch_size": 14,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        audio={
            **_TOWER,
            "n_window_infer": 200,
            "downsample_hidden_size": 8,
            "output_dim": 64,
        },
    ),
    "granite_speech": Family(
        {"audio_processor": ("GraniteSpeechFeatureExtractor", {})},
        {"audio_token": "<|audio|>"},
        {"audio_token_index": "audio_token"},
        config={
            "has_lora_adapter": False,
            "encoder_config": {
                "hidden_dim": 32,
                "num_layers": 2,
                "num_heads": 2,
                "dim_head": 16,
                "output_dim": 16,
                "input_dim": 160,
                "context_size": 20,
            },
            "projector_config": {
                "model_type": "blip_2_qformer",
                "hidden_size": 32,
                "encoder_hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 48,
            },
        },
    ),
    "voxtral": Family(
        {"feature_extractor": ("WhisperFeatureExtractor", {"feature_size": 16})},
        {"audio_token": "[AUDIO]"},
        {"audio_token_id": "audio_token"},
        audio={
            "hidden_size": 32,
            "intermediate_size": 32 * 20,
            "num_mel_bins": 16,
            "max_source_positions": 1500,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 16,
        },
    ),
    "glmasr": Family(
        {"feature_extractor": ("WhisperFeatureExtractor", {"feature_size": 16, "chunk_length": 2})},
        {"audio_token": "<|pad|>"},
        {"audio_token_id": "audio_token"},
        audio={
            "hidden_size": 32,
            "intermediate_size": 32 * 4,
            "num_mel_bins": 16,
            "max_position_embeddings": 100,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        },
    ),
}


def recording(seed: int, seconds: float = 1.0) -> NDArray[np.float32]:
    """Return a sound that differs by `seed`: a chord whose loudness changes."""
    rng = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * np.pi * pitch * times) for pitch in rng.uniform(100, 4000, 3))
    loudness = 0.1 + 0.2 * np.abs(np.sin(2 * np.pi * rng.uniform(1, 5) * times))
    return (tones * loudness / 3).astype(np.float32)
