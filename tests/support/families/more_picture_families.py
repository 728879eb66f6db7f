"""Write tiny modules of diffusers' rarer picture pipelines, for `picture_families.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizer,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Qwen3Config,
    Qwen3Model,
)

from support.checkpoints import diffusion_checkpoints as parts
from support.families.tiny_parts import (
    chat_tokenizer,
    deep_vae,
    flow,
    gemma,
    qwen_vl,
    qwen_vl_processor,
    sizes,
)

HIDDEN = parts.HIDDEN


def flux_fill() -> Any:
    """Write Flux' filling, whose transformer gets the image and the mask beside the noise."""
    model = parts._flux_transformer(
        48, out_channels=16, num_layers=1, num_single_layers=1, guidance_embeds=True
    )
    return diffusers.FluxFillPipeline(
        transformer=model,
        scheduler=flow(use_dynamic_shifting=True),
        vae=parts._vae(shift_factor=0.06),
        text_encoder=parts._clip(CLIPTextModel),
        tokenizer=parts._clip_tokenizer(),
        text_encoder_2=parts._t5(),
        tokenizer_2=parts._t5_tokenizer(),
    )


def instruct_pix2pix() -> Any:
    unet = parts._unet(cross_attention_dim=HIDDEN)
    return diffusers.StableDiffusionInstructPix2PixPipeline(
        vae=parts._vae(),
        text_encoder=parts._clip(CLIPTextModel),
        tokenizer=parts._clip_tokenizer(),
        unet=_wider(unet, 8),
        scheduler=parts.SCHEDULERS["euler"](),
        safety_checker=None,
        feature_extractor=None,
        image_encoder=None,
        requires_safety_checker=False,
    )


def instruct_pix2pix_xl() -> Any:
    unet = parts._unet_xl(cross_attention_dim=2 * HIDDEN)
    return diffusers.StableDiffusionXLInstructPix2PixPipeline(
        vae=parts._vae(),
        text_encoder=parts._clip(CLIPTextModel),
        text_encoder_2=parts._clip(CLIPTextModelWithProjection),
        tokenizer=parts._clip_tokenizer(),
        tokenizer_2=parts._clip_tokenizer(),
        unet=_wider(unet, 8),
        scheduler=parts.SCHEDULERS["euler"](),
    )


def _wider(unet: Any, channels: int, **fields: Any) -> Any:
    """Return a UNet of the same configuration that reads more channels."""
    config = {**unet.config, "in_channels": channels, **fields}
    return diffusers.UNet2DConditionModel.from_config(config)


def cogview_3() -> Any:
    model = diffusers.CogView3PlusTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        text_embed_dim=HIDDEN,
        time_embed_dim=16,
        condition_dim=8,
        pos_embed_max_size=32,
        sample_size=8,
    )
    return diffusers.CogView3PlusPipeline(
        transformer=parts._lively(model),
        scheduler=diffusers.CogVideoXDDIMScheduler(),
        vae=parts._vae(),
        text_encoder=parts._t5(),
        tokenizer=parts._t5_tokenizer(),
    )


def hunyuan_dit() -> Any:
    model = diffusers.HunyuanDiT2DModel(
        sample_size=16,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=4,
        in_channels=4,
        hidden_size=32,
        cross_attention_dim=HIDDEN,
        cross_attention_dim_t5=HIDDEN,
        pooled_projection_dim=16,
        activation_fn="gelu-approximate",
    )
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    bert = BertConfig(
        vocab_size=len(words),
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=128,
    )
    return diffusers.HunyuanDiTPipeline(
        transformer=parts._lively(model),
        scheduler=diffusers.DDPMScheduler(),
        vae=deep_vae(),
        text_encoder=BertModel(bert),
        tokenizer=BertTokenizer(vocab={word: number for number, word in enumerate(words)}),
        text_encoder_2=parts._t5(),
        tokenizer_2=parts._t5_tokenizer(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def lumina() -> Any:
    model = diffusers.LuminaNextDiT2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=24,
        num_layers=2,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=16,
        learn_sigma=True,
        cross_attention_dim=HIDDEN,
    )
    return diffusers.LuminaPipeline(
        transformer=parts._lively(model),
        scheduler=flow(),
        vae=deep_vae(),
        text_encoder=gemma(),
        tokenizer=chat_tokenizer(),
    )


def bria() -> Any:
    model = diffusers.BriaTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=HIDDEN,
        axes_dims_rope=[4, 4, 8],
    )
    return diffusers.BriaPipeline(
        transformer=parts._lively(model),
        scheduler=flow(),
        vae=parts._vae(shift_factor=0.06),
        text_encoder=parts._t5(),
        tokenizer=parts._t5_tokenizer(),
    )


def ovis() -> Any:
    model = diffusers.OvisImageTransformer2DModel(
        patch_size=1,
        in_channels=16,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=HIDDEN,
        axes_dims_rope=(4, 4, 8),
    )
    return diffusers.OvisImagePipeline(
        transformer=parts._lively(model),
        scheduler=flow(use_dynamic_shifting=True),
        vae=parts._vae(shift_factor=0.06),
        text_encoder=Qwen3Model(Qwen3Config(**sizes(2))),
        tokenizer=chat_tokenizer(),
    )


def longcat() -> Any:
    model = diffusers.LongCatImageTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=HIDDEN,
        pooled_projection_dim=HIDDEN,
        axes_dims_rope=[4, 4, 8],
    )
    processor = qwen_vl_processor()
    return diffusers.LongCatImagePipeline(
        transformer=parts._lively(model),
        scheduler=flow(use_dynamic_shifting=True),
        vae=parts._vae(16, shift_factor=0.06),
        text_encoder=qwen_vl(),
        tokenizer=processor.tokenizer,
        text_processor=processor,
    )


def kandinsky_5() -> Any:
    return _kandinsky_5(diffusers.Kandinsky5T2IPipeline)


def kandinsky_5_changing() -> Any:
    """Write the model that changes pictures, whose transformer gets the image beside the noise."""
    return _kandinsky_5(diffusers.Kandinsky5I2IPipeline, visual_cond=True)


def _kandinsky_5(kind: Any, **fields: Any) -> Any:
    model = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=16,
        in_text_dim=HIDDEN,
        in_text_dim2=HIDDEN,
        time_dim=16,
        out_visual_dim=16,
        patch_size=(1, 2, 2),
        model_dim=32,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=1,
        axes_dims=(4, 4, 8),
        **fields,
    )
    return kind(
        transformer=parts._lively(model),
        scheduler=flow(),
        vae=deep_vae(16),
        text_encoder=qwen_vl(),
        tokenizer=qwen_vl_processor(),
        text_encoder_2=parts._clip(CLIPTextModel, 77),
        tokenizer_2=parts._clip_tokenizer(),
    )


# Pipelines by class name: what makes them.
MAKERS: dict[str, Callable[[], Any]] = {
    "BriaPipeline": bria,
    "CogView3PlusPipeline": cogview_3,
    "FluxFillPipeline": flux_fill,
    "HunyuanDiTPipeline": hunyuan_dit,
    "Kandinsky5I2IPipeline": kandinsky_5_changing,
    "Kandinsky5T2IPipeline": kandinsky_5,
    "LongCatImagePipeline": longcat,
    "LuminaPipeline": lumina,
    "OvisImagePipeline": ovis,
    "StableDiffusionInstructPix2PixPipeline": instruct_pix2pix,
    "StableDiffusionXLInstructPix2PixPipeline": instruct_pix2pix_xl,
}
# The same modules under another name.
SAME_MODULES = {
    "Flux2KleinKVPipeline": "Flux2KleinPipeline",
}
