"""Write tiny modules of diffusers' newer picture pipelines, for `picture_families.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import sentencepiece
import torch
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from support.checkpoints import diffusion_checkpoints as parts
from support.families.tiny_parts import (
    chat_tokenizer,
    flow,
    qwen3_vl,
    qwen3_vl_processor,
    qwen_vae,
    qwen_vl,
    sizes,
    tokenizer_with_pictures,
)

HIDDEN = parts.HIDDEN
_BOS_OF_FIBO = 128_000  # token of an empty prompt


def _filled(model: Any) -> Any:
    """Set all parameters of a model that leaves them as memory happens to be."""
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            continue
        if parameter.ndim > 1 or name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
        else:
            torch.nn.init.ones_(parameter)
    return model


def flux_2_vae() -> Any:
    """Return the VAE of Flux.2, whose latents are normalized by statistics of patches."""
    return diffusers.AutoencoderKLFlux2(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    )


def flux_2_transformer(**fields: Any) -> Any:
    model = diffusers.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * HIDDEN,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        **fields,
    )
    return parts._lively(model)


def mistral(layers: int) -> Any:
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {**sizes(layers), "model_type": "mistral"}
    return Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision))


def flux_2() -> Any:
    """Write Flux.2 [dev]; its text is read from layers 10, 20 and 30."""
    return diffusers.Flux2Pipeline(
        transformer=flux_2_transformer(guidance_embeds=True),
        scheduler=flow(use_dynamic_shifting=True),
        vae=flux_2_vae(),
        text_encoder=mistral(30),
        tokenizer=chat_tokenizer(),
    )


def ernie() -> Any:
    model = diffusers.ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=48,
        in_channels=16,
        out_channels=16,
        text_in_dim=HIDDEN,
        rope_axes_dim=(4, 6, 6),
    )
    return diffusers.ErnieImagePipeline(
        transformer=parts._lively(model),
        vae=flux_2_vae(),
        text_encoder=mistral(2).model,
        tokenizer=chat_tokenizer(),
        scheduler=flow(),
    )


def bria_fibo() -> Any:
    model = diffusers.BriaFiboTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=2 * HIDDEN,
        axes_dims_rope=[4, 4, 8],
        text_encoder_dim=HIDDEN,
    )
    vae = diffusers.AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, False, False],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.0, 1.5, 0.8, 1.2],
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )
    text = SmolLM3Config(**sizes(2, vocab_size=_BOS_OF_FIBO + 1))
    return diffusers.BriaFiboPipeline(
        transformer=parts._lively(model),
        scheduler=flow(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=SmolLM3ForCausalLM(text),
        tokenizer=chat_tokenizer(),
    )


def bria_fibo_2() -> Any:
    """Write FIBO 2, whose text is read from layers up to 35."""
    model = diffusers.BriaFibo2Transformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        cap_feat_dim=3 * HIDDEN,
        injection_layer_ids=(0, 1),
        perceiver_num_layers=1,
        min_num_gist_tokens=4,
        max_num_gist_tokens=8,
        gist_step=2,
        axes_dims=(4, 6, 6),
        axes_lens=(512, 64, 64),
    )
    return diffusers.BriaFibo2Pipeline(
        transformer=parts._lively(model),
        scheduler=flow(use_dynamic_shifting=True),
        vae=flux_2_vae(),
        text_encoder=qwen3_vl(36),
        processor=qwen3_vl_processor(),
    )


def _dreamlite(kind: Any) -> Any:
    unet = diffusers.DreamLiteUNetModel(
        sample_size=8,
        block_out_channels=(16, 16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=HIDDEN,
        attention_head_dim=4,
        ff_mult=1,
    )
    vae = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    )
    return kind(
        text_encoder=qwen3_vl(),
        tokenizer=tokenizer_with_pictures(),
        processor=qwen3_vl_processor(),
        vae=vae,
        unet=parts._lively(unet),
        scheduler=flow(use_dynamic_shifting=True),
    )


def dreamlite() -> Any:
    return _dreamlite(diffusers.DreamLitePipeline)


def dreamlite_mobile() -> Any:
    return _dreamlite(diffusers.DreamLiteMobilePipeline)


def _hunyuan_transformer(read: int, predicted: int, **fields: Any) -> Any:
    model = diffusers.HunyuanImageTransformer2DModel(
        in_channels=read,
        out_channels=predicted,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=HIDDEN,
        **fields,
    )
    return parts._lively(model)


def hunyuan_image() -> Any:
    vae = diffusers.AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        spatial_compression_ratio=2,
        sample_size=64,
        scaling_factor=0.75,
    )
    return diffusers.HunyuanImagePipeline(
        scheduler=flow(shift=5.0),
        vae=vae,
        text_encoder=qwen_vl(4),
        tokenizer=chat_tokenizer(2048),
        text_encoder_2=parts._t5(),
        tokenizer_2=parts._t5_tokenizer(),
        transformer=_hunyuan_transformer(4, 4, rope_axes_dim=(4, 4), text_embed_2_dim=HIDDEN),
        guider=diffusers.AdaptiveProjectedMixGuidance(guidance_scale=2.5),
        ocr_guider=None,
    )


def hunyuan_refiner() -> Any:
    vae = diffusers.AutoencoderKLHunyuanImageRefiner(
        latent_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        spatial_compression_ratio=2,
        temporal_compression_ratio=1,
    )
    transformer = _hunyuan_transformer(
        16, 8, rope_axes_dim=(2, 2, 4), patch_size=(1, 1, 1), guidance_embeds=True
    )
    return diffusers.HunyuanImageRefinerPipeline(
        scheduler=flow(),
        vae=vae,
        text_encoder=qwen_vl(4),
        tokenizer=chat_tokenizer(2048),
        transformer=transformer,
        guider=None,
    )


def krea_2() -> Any:
    model = diffusers.Krea2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        timestep_embed_dim=16,
        text_hidden_dim=HIDDEN,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=48,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    return diffusers.Krea2Pipeline(
        scheduler=flow(use_dynamic_shifting=True),
        vae=qwen_vae(),
        text_encoder=qwen3_vl().model,
        tokenizer=chat_tokenizer(),
        transformer=parts._lively(model),
        text_encoder_select_layers=(1, 2),
    )


def nucleus() -> Any:
    """Write Nucleus-Image, whose text is read from the eighth layer before the end."""
    model = diffusers.NucleusMoEImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=HIDDEN,
        axes_dims_rope=(4, 4, 8),
        mlp_ratio=8.0,
        dense_moe_strategy="leave_first_block_dense",
        num_experts=4,
        moe_intermediate_dim=16,
        capacity_factors=2.0,
    )
    _filled(model)  # experts are not initialized
    return diffusers.NucleusMoEImagePipeline(
        transformer=parts._lively(model),
        scheduler=flow(use_dynamic_shifting=True),
        vae=qwen_vae(),
        text_encoder=qwen3_vl(8),
        processor=qwen3_vl_processor(),
    )


def qwen_image_2_1() -> Any:
    model = diffusers.QwenImage21Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=HIDDEN,
        axes_dims_rope=(4, 4, 8),
    )
    vae = diffusers.AutoencoderKLQwenImage21(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, False, False, False],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.0, 1.5, 0.8, 1.2],
    )
    return diffusers.QwenImage21Pipeline(
        scheduler=flow(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=qwen3_vl(),
        processor=qwen3_vl_processor(),
        transformer=parts._lively(model),
    )


def z_image_omni() -> Any:
    from transformers import (
        Qwen3Config,
        Qwen3Model,
        Siglip2ImageProcessor,
        Siglip2VisionConfig,
        Siglip2VisionModel,
    )

    model = diffusers.ZImageTransformer2DModel(
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=HIDDEN,
        siglip_feat_dim=16,
        axes_dims=[4, 4, 8],
        axes_lens=[256, 64, 64],
    )
    eyes = Siglip2VisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_patches=16,
        patch_size=8,
    )
    return diffusers.ZImageOmniPipeline(
        scheduler=flow(use_dynamic_shifting=True),
        vae=parts._vae(16, shift_factor=0.06),
        text_encoder=Qwen3Model(Qwen3Config(**sizes(2))),
        tokenizer=chat_tokenizer(),
        transformer=parts._lively(model),
        siglip=Siglip2VisionModel(eyes),
        siglip_processor=Siglip2ImageProcessor(patch_size=8, max_num_patches=16),
    )


def kolors(path: Path) -> Path:
    """Write Kolors; its tokenizer's file is kept beside `path`, where it is read again when saved."""
    from diffusers.pipelines.kolors import ChatGLMModel, ChatGLMTokenizer
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig

    pieces = path.parent / "kolors"
    pieces.with_suffix(".txt").write_text("a red circle, a blue square and a green star\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(pieces.with_suffix(".txt")),
        model_prefix=str(pieces),
        vocab_size=40,
        model_type="bpe",
        num_threads=1,
        minloglevel=2,
    )
    text = ChatGLMConfig(
        num_layers=2,
        padded_vocab_size=64,
        hidden_size=HIDDEN,
        ffn_hidden_size=48,
        kv_channels=8,
        num_attention_heads=4,
        seq_length=512,
        add_qkv_bias=True,
        multi_query_attention=True,
        multi_query_group_num=2,
        original_rope=True,
    )
    unet = parts._unet_xl(
        cross_attention_dim=HIDDEN, encoder_hid_dim=HIDDEN, encoder_hid_dim_type="text_proj"
    )
    pipeline = diffusers.KolorsPipeline(
        vae=parts._vae(),
        text_encoder=_filled(ChatGLMModel(text)),
        tokenizer=ChatGLMTokenizer(str(pieces.with_suffix(".model"))),
        unet=unet,
        scheduler=parts.SCHEDULERS["euler"](),
    )
    pipeline.save_pretrained(path)
    return path


# Pipelines by class name: what makes them.
MAKERS: dict[str, Callable[[], Any]] = {
    "BriaFibo2Pipeline": bria_fibo_2,
    "BriaFiboPipeline": bria_fibo,
    "DreamLiteMobilePipeline": dreamlite_mobile,
    "DreamLitePipeline": dreamlite,
    "ErnieImagePipeline": ernie,
    "Flux2Pipeline": flux_2,
    "HunyuanImagePipeline": hunyuan_image,
    "HunyuanImageRefinerPipeline": hunyuan_refiner,
    "Krea2Pipeline": krea_2,
    "NucleusMoEImagePipeline": nucleus,
    "QwenImage21Pipeline": qwen_image_2_1,
    "ZImageOmniPipeline": z_image_omni,
}
# The same modules under another name.
SAME_MODULES = {
    "BriaFiboEditPipeline": "BriaFiboPipeline",
    "KolorsImg2ImgPipeline": "KolorsPipeline",
}
