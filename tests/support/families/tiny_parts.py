"""Make the tiny text models, tokenizers and VAEs that tiny picture pipelines share."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL, AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler
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
# Of messages whose content is a text, or a list of texts.
_PARTS = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{{ part.text }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def flow(**fields: Any) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**fields)


def chat_tokenizer(
    length: int = 512, side: str = "right", *, begins: bool = True
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a chat template; begins: it puts a token before every text."""
    backend = copy.deepcopy(byte_level())
    if begins:
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


def qwen_vae(halvings: int = 1) -> Any:
    return AutoencoderKLQwenImage(
        base_dim=8 if halvings == 1 else 2,
        z_dim=4,
        dim_mult=[1] * halvings + [4 if halvings > 1 else 1],
        num_res_blocks=1,
        temperal_downsample=[False] * halvings,
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.0, 1.5, 0.8, 1.2],
    )


def qwen_vl(layers: int = 2) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config=sizes(
            layers,
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


def qwen3_vl(layers: int = 2) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = tokenizer_with_pictures()
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    config = Qwen3VLConfig(
        text_config=sizes(layers, rope_parameters=rope),
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    return Qwen3VLForConditionalGeneration(config)


def tokenizer_with_pictures(*, begins: bool = True) -> PreTrainedTokenizerFast:
    tokenizer = chat_tokenizer(4096, begins=begins)
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

    images = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56)
    return _processor(Qwen2VLProcessor, images, tokenizer_with_pictures())


def qwen3_vl_processor() -> Any:
    from transformers import Qwen3VLProcessor

    images = Qwen2VLImageProcessor(patch_size=16, min_pixels=32 * 32, max_pixels=64 * 64)
    return _processor(Qwen3VLProcessor, images, tokenizer_with_pictures(begins=False))


def _processor(kind: Any, images: Any, tokenizer: Any) -> Any:
    from transformers.processing_utils import MODALITY_TO_AUTOPROCESSOR_MAPPING

    tokenizer.chat_template = _PARTS
    processor = without_videos(kind, MODALITY_TO_AUTOPROCESSOR_MAPPING)(
        image_processor=images, tokenizer=tokenizer, chat_template=_PARTS
    )
    processor.save_pretrained = functools.partial(_save_processor, processor)
    return processor
