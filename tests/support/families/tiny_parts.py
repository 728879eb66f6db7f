"""Make the tiny text models, tokenizers and VAEs that tiny picture pipelines share."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from tokenizers.processors import TemplateProcessing
from transformers import (
    Gemma2Config,
    Gemma2Model,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
)

from motet_models.processors import without_videos
from support.checkpoints import diffusion_checkpoints as parts
from support.checkpoints.tiny_tokenizers import CHATML, SPECIALS, byte_level

HIDDEN = parts.HIDDEN


def flow(**fields: Any) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**fields)


def chat_tokenizer(length: int = 512, side: str = "right") -> PreTrainedTokenizerFast:
    backend = copy.deepcopy(byte_level())
    backend.post_processor = TemplateProcessing(
        single=f"{SPECIALS[1]} $A", special_tokens=[(SPECIALS[1], 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=length,
        eos_token=SPECIALS[2],
        bos_token=SPECIALS[1],
        pad_token=SPECIALS[0],
        padding_side=side,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def sizes(layers: int, **fields: Any) -> dict[str, Any]:
    return {
        "vocab_size": 512,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        **fields,
    }


def deep_vae(channels: int = 4, levels: int = 4, **fields: Any) -> AutoencoderKL:
    """Return a VAE that halves `levels - 1` times."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        block_out_channels=(8,) * levels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=8 << levels,
        **fields,
    )


def gemma() -> Gemma2Model:
    return Gemma2Model(Gemma2Config(**sizes(2), sliding_window=64))


def qwen_vl() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config=sizes(
            2,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 2],
            },
        ),
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
            "fullatt_block_indexes": [0],
        },
        image_token_id=tokenizer_with_pictures().convert_tokens_to_ids("<|image_pad|>"),
        vision_start_token_id=tokenizer_with_pictures().convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer_with_pictures().convert_tokens_to_ids("<|vision_end|>"),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def tokenizer_with_pictures() -> PreTrainedTokenizerFast:
    tokenizer = chat_tokenizer(4096)
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": [
                "<|image_pad|>",
                "<|vision_start|>",
                "<|vision_end|>",
                "<|video_pad|>",
            ]
        }
    )
    tokenizer.image_token, tokenizer.video_token = "<|image_pad|>", "<|video_pad|>"
    return tokenizer


def _save_processor(processor: Any, folder: Path, **_: Any) -> None:
    processor.image_processor.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)


def qwen_vl_processor() -> Any:
    from transformers import Qwen2VLProcessor
    from transformers.processing_utils import MODALITY_TO_AUTOPROCESSOR_MAPPING

    processor = without_videos(Qwen2VLProcessor, MODALITY_TO_AUTOPROCESSOR_MAPPING)(
        image_processor=Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56),
        tokenizer=tokenizer_with_pictures(),
    )
    processor.save_pretrained = functools.partial(_save_processor, processor)
    return processor
