"""Write tiny checkpoints of diffusers' video pipelines, for docs/videos.md and its tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch

from support.checkpoints import diffusion_checkpoints as parts
from support.families import newer_video_families as newer
from support.families.tiny_parts import flow

HIDDEN = parts.HIDDEN


def wan() -> Any:
    """Write Wan 2.1: text to video."""
    return diffusers.WanPipeline(**newer.wan_parts(transformer=newer.wan_transformer()))


def ltx() -> Any:
    """Write LTX-Video: text to video, and image to video with the same weights."""
    return _ltx(
        diffusers.LTXPipeline, scheduler=flow(use_dynamic_shifting=True, shift_terminal=0.1)
    )


def ltx_condition() -> Any:
    """Write LTX-Video 0.9.5: a time for each token, and noise in what the VAE decodes."""
    return _ltx(diffusers.LTXConditionPipeline, scheduler=flow(), timestep_conditioning=True)


def _ltx(kind: Any, *, scheduler: Any, **fields: Any) -> Any:
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        encoder_causal=True,
        decoder_causal=False,
        **fields,
    )
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=HIDDEN,
    )
    return kind(
        transformer=parts._lively(model),
        vae=vae,
        scheduler=scheduler,
        text_encoder=parts._t5(),
        tokenizer=parts._t5_tokenizer(),
    )


def _cogvideox_vae() -> Any:
    return diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )


def _cogvideox_transformer(**fields: Any) -> Any:
    return diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=HIDDEN,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        patch_size=2,
        **fields,
    )


def cogvideox() -> Any:
    """Write CogVideoX 2B: fixed positions, text to video."""
    return diffusers.CogVideoXPipeline(
        transformer=parts._lively(_cogvideox_transformer(in_channels=4)),
        vae=_cogvideox_vae(),
        scheduler=diffusers.CogVideoXDDIMScheduler(
            prediction_type="v_prediction", rescale_betas_zero_snr=True, snr_shift_scale=3.0
        ),
        text_encoder=parts._t5(),
        tokenizer=parts._t5_tokenizer(),
    )


def cogvideox_i2v() -> Any:
    """Write CogVideoX 5B's model for images, with rotary positions."""
    return diffusers.CogVideoXImageToVideoPipeline(
        transformer=parts._lively(
            _cogvideox_transformer(in_channels=8, use_rotary_positional_embeddings=True)
        ),
        vae=_cogvideox_vae(),
        scheduler=diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction"),
        text_encoder=parts._t5(),
        tokenizer=parts._t5_tokenizer(),
    )


MAKERS: dict[str, Callable[[], Any]] = {
    "WanPipeline": wan,
    "LTXConditionPipeline": ltx_condition,
    "LTXPipeline": ltx,
    "CogVideoXPipeline": cogvideox,
    "CogVideoXImageToVideoPipeline": cogvideox_i2v,
    **newer.MAKERS,
}
SAME_MODULES = {"LTXImageToVideoPipeline": "LTXPipeline", **newer.SAME_MODULES}
NAMES = sorted({*MAKERS, *SAME_MODULES})
# What a folder of the class makes videos of: a prompt, or a prompt and an image.
_KINDS = {
    "LTX2Pipeline": ["draw", "change"],
    "LTXConditionPipeline": ["draw", "change"],
    "LTXPipeline": ["draw", "change"],
    "WanPipeline 2.2 TI2V": ["draw", "change"],
}


def kinds_of(name: str) -> list[str]:
    """Return the kinds of requests that a tiny checkpoint takes."""
    return _KINDS.get(name, ["change"] if "ImageToVideo" in name else ["draw"])


def class_of(name: str) -> str:
    """Return the class of a tiny checkpoint; what follows in its name tells it from others."""
    return name.split()[0]


def write(name: str, path: Path) -> Path:
    """Write a tiny checkpoint with random weights."""
    torch.manual_seed(0)
    MAKERS[SAME_MODULES.get(name, name)]().save_pretrained(path)
    index = path / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": class_of(name)}))
    return path
