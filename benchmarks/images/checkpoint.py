"""Generate models with random weights for `images.py`, once into a cache folder, by seed.

Their architectures are real, but narrow or short enough for two cores; the shares of time of their
parts are as in the large models.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

from benchmarks.engine.checkpoint import write_tokenizer
from benchmarks.support.cache import made

SEED = 0
_IMAGE = 300  # the token that stands for an image
_VOCAB = 512
# Towers: SigLIP base (patch 16, 224 pixels) and Qwen2.5-VL's, a quarter as deep and half as wide.
ENCODERS: dict[str, dict[str, Any]] = {
    "siglip-base": {
        "kind": "llava", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "image_size": 224, "patch_size": 16, "words": 1024,
    },
    "siglip-least": {
        "kind": "llava", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 32, "patch_size": 16, "words": 32,
    },
    "qwen2.5-vl": {
        "kind": "qwen2_5_vl", "depth": 8, "hidden_size": 640, "intermediate_size": 1710, "num_heads": 8,
        "out_hidden_size": 1024, "window_size": 112, "fullatt_block_indexes": [3, 7], "words": 1024,
    },
    "qwen2.5-vl-least": {
        "kind": "qwen2_5_vl", "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
        "out_hidden_size": 32, "window_size": 56, "fullatt_block_indexes": [1], "words": 32,
    },
}  # fmt: skip
# In the layout of Stable Diffusion. Channels of the denoiser's levels, width of the text, channels of the VAE.
PIPELINES: dict[str, dict[str, Any]] = {
    "unet-54m": {
        "unet": (128, 256, 512),
        "text": 768,
        "layers": 4,
        "vae": (32, 64, 128, 128),
        "words": 77,
    },
    "unet-least": {"unet": (16, 32), "text": 32, "layers": 1, "vae": (8, 16), "words": 12},
}


# -------------------------------------------------------------------------------------------------------------- towers
def vision_checkpoint(name: str, cache: Path) -> Path:
    """Return ENCODERS[name] with a one-layer language model and its image processor, in float32."""
    return made(
        cache / f"{name}-seed{SEED}", lambda path: _write_vision(path, dict(ENCODERS[name]))
    )


def _write_vision(path: Path, size: dict[str, Any]) -> None:
    import torch

    torch.manual_seed(SEED)
    words = {
        "hidden_size": size.pop("words"), "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": _VOCAB, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    model, processor = (_llava if size.pop("kind") == "llava" else _qwen)(size, words)
    model.save_pretrained(path)
    processor.save_pretrained(path)
    write_tokenizer(path, _VOCAB)


def _llava(size: dict[str, Any], words: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import LlavaConfig, LlavaForConditionalGeneration, SiglipImageProcessorPil

    config = LlavaConfig(
        vision_config={"model_type": "siglip_vision_model", **size},
        text_config={"model_type": "llama", **words},
        image_token_index=_IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    side = size["image_size"]
    return LlavaForConditionalGeneration(config), SiglipImageProcessorPil(
        size={"height": side, "width": side}
    )


def _qwen(size: dict[str, Any], words: dict[str, Any]) -> tuple[Any, Any]:
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2VLImageProcessorPil,
    )

    head = words["hidden_size"] // words["num_attention_heads"]
    sections = [head // 4, head // 8, head // 8]
    ropes = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    config = Qwen2_5_VLConfig(
        text_config={**words, "rope_parameters": ropes},
        vision_config=size,
        image_token_id=_IMAGE,
        video_token_id=_IMAGE + 1,
        vision_start_token_id=_IMAGE + 2,
        vision_end_token_id=_IMAGE + 3,
    )
    return Qwen2_5_VLForConditionalGeneration(config), Qwen2VLImageProcessorPil(patch_size=14)


# ----------------------------------------------------------------------------------------------------------- diffusion
def diffusion_checkpoint(name: str, cache: Path) -> Path:
    """Return PIPELINES[name] as diffusers saves it, in float32, with a few-step schedule."""
    return made(
        cache / f"{name}-seed{SEED}",
        lambda path: _write_pipeline(path, PIPELINES[name]),
        mark="model_index.json",
    )


def _write_pipeline(path: Path, size: dict[str, Any]) -> None:
    import torch
    from diffusers import EulerDiscreteScheduler, StableDiffusionPipeline

    torch.manual_seed(SEED)
    StableDiffusionPipeline(
        vae=_vae(size["vae"]),
        text_encoder=_text_encoder(size),
        tokenizer=_tokenizer(size["words"]),
        unet=_unet(size["unet"], size["text"]),
        scheduler=EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            steps_offset=1,
            timestep_spacing="trailing",
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(path)


def _unet(channels: tuple[int, ...], text: int) -> Any:
    """Return a UNet with attention at all levels but the lowest, as in Stable Diffusion."""
    from diffusers import UNet2DConditionModel

    crossed = len(channels) - 1
    return UNet2DConditionModel(
        sample_size=32,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=channels,
        down_block_types=("CrossAttnDownBlock2D",) * crossed + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * crossed,
        cross_attention_dim=text,
        attention_head_dim=8,
        norm_num_groups=min(32, channels[0]),
    )


def _vae(channels: tuple[int, ...]) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        latent_channels=4,
        norm_num_groups=min(32, channels[0]),
        sample_size=256,
    )


def _text_encoder(size: dict[str, Any]) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=len(_letters()),
        hidden_size=size["text"],
        intermediate_size=4 * size["text"],
        num_hidden_layers=size["layers"],
        num_attention_heads=max(size["text"] // 64, 1),
        max_position_embeddings=size["words"],
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModel(config)


def _letters() -> dict[str, int]:
    marks = ["<|startoftext|>", "<|endoftext|>"]
    letters = [
        letter + end for letter in string.ascii_lowercase + string.digits for end in ("", "</w>")
    ]
    return {token: number for number, token in enumerate(marks + letters)}


def _tokenizer(length: int) -> Any:
    from transformers import CLIPTokenizer

    return CLIPTokenizer(vocab=_letters(), merges=[], model_max_length=length)


def describe(folder: Path) -> str:
    """Return millions of parameters of each part of a diffusers folder, from its file sizes."""
    sizes = {
        part.parent.name: part.stat().st_size / 4e6
        for part in sorted(folder.glob("*/*.safetensors"))
    }
    index = json.loads((folder / "model_index.json").read_text())
    return f"{index['_class_name']}: " + ", ".join(
        f"{name} {count:.0f}M" for name, count in sizes.items()
    )
