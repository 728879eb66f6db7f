"""Make tiny pipelines of videos: Wan 2.2, Wan with images, LTX-2, HunyuanVideo and HunyuanVideo 1.5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
from transformers import (
    CLIPImageProcessor,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaModel,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    UMT5Config,
    UMT5EncoderModel,
)

from support.checkpoints import diffusion_checkpoints as parts
from support.families.tiny_parts import chat_tokenizer, flow, sizes

HIDDEN = parts.HIDDEN
_CHANNELS = 4  # of latents


# ------------------------------------------------------------------------------------------- Wan
def wan_vae(**fields: Any) -> Any:
    return diffusers.AutoencoderKLWan(
        base_dim=8,
        z_dim=_CHANNELS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.0, 1.5, 0.8, 1.2],
        **fields,
    )


def wan_transformer(read: int = _CHANNELS, **fields: Any) -> Any:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=read,
        out_channels=_CHANNELS,
        text_dim=HIDDEN,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
        **fields,
    )
    return parts._lively(model)


def wan_parts(**fields: Any) -> dict[str, Any]:
    """Return the parts that all pipelines of Wan have, with those in `fields`."""
    encoder = UMT5EncoderModel(
        UMT5Config(vocab_size=64, d_model=HIDDEN, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )
    common = {
        "vae": wan_vae(),
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        "text_encoder": encoder,
        "tokenizer": parts._t5_tokenizer(),
    }
    return common | fields


def wan_2_2() -> Any:
    """Wan 2.2 A14B: a denoiser for much noise, and another for little."""
    first, second = wan_transformer(), wan_transformer()
    return diffusers.WanPipeline(
        **wan_parts(transformer=first, transformer_2=second, boundary_ratio=0.875)
    )


def wan_2_2_ti2v() -> Any:
    """Wan 2.2 TI2V 5B: a time for each token, and a VAE that puts 2x2 pixels into channels."""
    vae = wan_vae(
        in_channels=12, out_channels=12, patch_size=2, is_residual=True, scale_factor_spatial=16
    )
    return diffusers.WanPipeline(
        **wan_parts(vae=vae, transformer=wan_transformer(), expand_timesteps=True)
    )


def _wan_i2v(positions: int | None = None) -> Any:
    eyes = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
        projection_dim=16,
    )
    size = {"height": 32, "width": 32}
    looks = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size)
    transformer = wan_transformer(
        3 * _CHANNELS, image_dim=16, added_kv_proj_dim=24, pos_embed_seq_len=positions
    )
    return diffusers.WanImageToVideoPipeline(
        **wan_parts(
            transformer=transformer, image_encoder=CLIPVisionModel(eyes), image_processor=looks
        )
    )


def wan_i2v() -> Any:
    """Wan 2.1 with images, which its image encoder reads too."""
    return _wan_i2v()


def wan_flf2v() -> Any:
    """Wan 2.1 with a first and a last frame."""
    return _wan_i2v(positions=5)


def wan_2_2_i2v() -> Any:
    """Wan 2.2 A14B with images: two denoisers, and no image encoder."""
    first, second = wan_transformer(3 * _CHANNELS), wan_transformer(3 * _CHANNELS)
    return diffusers.WanImageToVideoPipeline(
        **wan_parts(transformer=first, transformer_2=second, boundary_ratio=0.9),
        image_encoder=None,
        image_processor=None,
    )


# ----------------------------------------------------------------------------------------- LTX-2
def ltx_2() -> Any:
    """LTX-2: frames and sound."""
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=8,
        block_out_channels=(16, 16, 32, 32),
        decoder_block_out_channels=(16, 32, 64),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=16,  # as many as latents of a moment: channels times mel bins
        ch_mult=(1, 2, 2),
        num_res_blocks=1,
        latent_channels=4,
        mel_bins=16,
        resolution=32,
    )
    text = Gemma3Config(
        text_config=sizes(2, sliding_window=64),
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 16,
        },
        mm_tokens_per_image=4,
        image_token_index=4,
        boi_token_index=5,
        eoi_token_index=6,
    )
    connectors = diffusers.pipelines.ltx2.LTX2TextConnectors(
        caption_channels=HIDDEN,
        text_proj_in_factor=3,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=16,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=16,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=16,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=16,
    )
    model = diffusers.LTX2VideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        audio_in_channels=16,
        audio_out_channels=16,
        audio_num_attention_heads=2,
        audio_attention_head_dim=16,
        audio_cross_attention_dim=32,
        num_layers=2,
        caption_channels=HIDDEN,
    )
    vocoder = diffusers.pipelines.ltx2.LTX2Vocoder(
        in_channels=32,
        hidden_channels=16,
        upsample_kernel_sizes=[16, 15],
        upsample_factors=[16, 15],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3]],
    )
    return diffusers.LTX2Pipeline(
        scheduler=flow(use_dynamic_shifting=True, shift_terminal=0.1),
        vae=vae,
        audio_vae=audio_vae,
        text_encoder=Gemma3ForConditionalGeneration(text),
        tokenizer=chat_tokenizer(1024, "left"),
        connectors=parts._lively(connectors),
        transformer=parts._lively(model),
        vocoder=vocoder,
    )


# ---------------------------------------------------------------------------------- HunyuanVideo
def hunyuan_video() -> Any:
    """HunyuanVideo: guidance in its weights."""
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=_CHANNELS,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=_CHANNELS,
        out_channels=_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=HIDDEN,
        pooled_projection_dim=HIDDEN,
        rope_axes_dim=(4, 4, 4),
    )
    return diffusers.HunyuanVideoPipeline(
        text_encoder=LlamaModel(LlamaConfig(**sizes(3))),
        tokenizer=chat_tokenizer(1024),
        transformer=parts._lively(model),
        vae=vae,
        scheduler=flow(shift=7.0),
        text_encoder_2=parts._clip(CLIPTextModel, 77),
        tokenizer_2=parts._clip_tokenizer(),
    )


def _hunyuan_1_5() -> dict[str, Any]:
    model = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=2 * _CHANNELS + 1,
        out_channels=_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=HIDDEN,
        text_embed_2_dim=HIDDEN,
        image_embed_dim=16,
        rope_axes_dim=(4, 4, 4),
        target_size=64,
    )
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=_CHANNELS,
        block_out_channels=(8, 8, 8, 8, 8),
        layers_per_block=1,
    )
    text = Qwen2_5_VLTextConfig(
        **sizes(3),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    )
    return {
        "text_encoder": Qwen2_5_VLTextModel(text),
        "tokenizer": chat_tokenizer(2048),
        "transformer": parts._lively(model),
        "vae": vae,
        "scheduler": flow(shift=5.0),
        "text_encoder_2": parts._t5(),
        "tokenizer_2": parts._t5_tokenizer(),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    }


def hunyuan_video_1_5() -> Any:
    return diffusers.HunyuanVideo15Pipeline(**_hunyuan_1_5())


def hunyuan_video_1_5_i2v() -> Any:
    eyes = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    return diffusers.HunyuanVideo15ImageToVideoPipeline(
        **_hunyuan_1_5(),
        image_encoder=SiglipVisionModel(eyes),
        feature_extractor=SiglipImageProcessor(size={"height": 32, "width": 32}),
    )


# By class, and where a class has several kinds of models, what tells them apart.
MAKERS: dict[str, Callable[[], Any]] = {
    "HunyuanVideo15ImageToVideoPipeline": hunyuan_video_1_5_i2v,
    "HunyuanVideo15Pipeline": hunyuan_video_1_5,
    "HunyuanVideoPipeline": hunyuan_video,
    "LTX2Pipeline": ltx_2,
    "WanImageToVideoPipeline": wan_i2v,
    "WanImageToVideoPipeline 2.2": wan_2_2_i2v,
    "WanPipeline 2.2": wan_2_2,
    "WanPipeline 2.2 TI2V": wan_2_2_ti2v,
}
SAME_MODULES = {"LTX2ImageToVideoPipeline": "LTX2Pipeline"}
