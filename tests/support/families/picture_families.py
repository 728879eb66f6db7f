"""Write tiny checkpoints of diffusers' picture pipelines, for docs/pictures.md and its tests.

`diffusion_checkpoints.py` has the families of the engine's own tests; this one has the others. A
pipeline that only changes or fills pictures has the modules of one that draws, under its own name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderDC
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from support.checkpoints import diffusion_checkpoints as parts
from support.families import more_picture_families, newer_picture_families
from support.families.tiny_parts import (
    chat_tokenizer,
    deep_vae,
    flow,
    gemma,
    qwen_vae,
    qwen_vl,
    qwen_vl_processor,
    sizes,
    tokenizer_with_pictures,
)

HIDDEN = parts.HIDDEN
_ROWS = 8  # of a tiny transformer's rotary halves


def stable_diffusion_3_5() -> Any:
    """Write SD3.5: attention twice in some blocks, normalized queries and keys."""
    model = parts._sd3_transformer(num_layers=2, dual_attention_layers=(0,), qk_norm="rms_norm")
    return diffusers.StableDiffusion3Pipeline(
        transformer=model,
        scheduler=flow(shift=3.0),
        vae=parts._vae(16, shift_factor=0.06),
        text_encoder=parts._clip(CLIPTextModelWithProjection),
        tokenizer=parts._clip_tokenizer(),
        text_encoder_2=parts._clip(CLIPTextModelWithProjection),
        tokenizer_2=parts._clip_tokenizer(),
        text_encoder_3=parts._t5_of(2 * HIDDEN),
        tokenizer_3=parts._t5_tokenizer(),
    )


def chroma() -> Any:
    model = diffusers.ChromaTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=HIDDEN,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )
    return diffusers.ChromaPipeline(
        transformer=parts._lively(model),
        scheduler=flow(),
        vae=parts._vae(shift_factor=0.06),
        text_encoder=parts._t5(),
        tokenizer=parts._t5_tokenizer(),
    )


def flux_2_klein() -> Any:
    """Write Flux.2 [klein]; its text is read from layers 9, 18 and 27."""
    model = newer_picture_families.flux_2_transformer(guidance_embeds=False)
    return diffusers.Flux2KleinPipeline(
        transformer=model,
        scheduler=flow(use_dynamic_shifting=True),
        vae=newer_picture_families.flux_2_vae(),
        text_encoder=Qwen3ForCausalLM(Qwen3Config(**sizes(28))),
        tokenizer=chat_tokenizer(),
    )


def _qwen_transformer() -> Any:
    return diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=HIDDEN,
        axes_dims_rope=(4, 4, 8),
    )


def qwen_image() -> Any:
    return diffusers.QwenImagePipeline(
        transformer=parts._lively(_qwen_transformer()),
        scheduler=flow(use_dynamic_shifting=True),
        vae=qwen_vae(),
        text_encoder=qwen_vl(),
        tokenizer=tokenizer_with_pictures(),
    )


def qwen_image_edit() -> Any:
    """Write Qwen-Image's editing, whose VAE halves five times: it reads images of 1024x1024."""
    return diffusers.QwenImageEditPipeline(
        transformer=parts._lively(_qwen_transformer()),
        scheduler=flow(use_dynamic_shifting=True),
        vae=qwen_vae(5),
        text_encoder=qwen_vl(),
        tokenizer=tokenizer_with_pictures(),
        processor=qwen_vl_processor(),
    )


def z_image() -> Any:
    model = diffusers.ZImageTransformer2DModel(
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=HIDDEN,
        axes_dims=[4, 4, 8],
        axes_lens=[256, 64, 64],
    )
    return diffusers.ZImagePipeline(
        transformer=parts._lively(model),
        scheduler=flow(use_dynamic_shifting=True),
        vae=parts._vae(16, shift_factor=0.06),
        text_encoder=Qwen3ForCausalLM(Qwen3Config(**sizes(2))).model,
        tokenizer=chat_tokenizer(),
    )


def _dc() -> AutoencoderDC:
    """Return a VAE that halves five times: Sana takes multiples of 32 pixels only."""
    return AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock",) * 5 + ("EfficientViTBlock",),
        decoder_block_types=("ResBlock",) * 5 + ("EfficientViTBlock",),
        encoder_block_out_channels=(4,) * 5 + (8,),
        decoder_block_out_channels=(4,) * 5 + (8,),
        encoder_layers_per_block=(1,) * 6,
        decoder_layers_per_block=(1,) * 6,
        encoder_qkv_multiscales=((),) * 5 + ((5,),),
        decoder_qkv_multiscales=((),) * 5 + ((5,),),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )


def _sana_transformer(**fields: Any) -> Any:
    return diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=4,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=HIDDEN,
        sample_size=8,
        **fields,
    )


def sana() -> Any:
    return diffusers.SanaPipeline(
        transformer=parts._lively(_sana_transformer()),
        scheduler=flow(shift=3.0),
        vae=_dc(),
        text_encoder=gemma(),
        tokenizer=chat_tokenizer(2048),
    )


def sana_sprint() -> Any:
    return diffusers.SanaSprintPipeline(
        transformer=parts._lively(
            _sana_transformer(guidance_embeds=True, qk_norm="rms_norm_across_heads")
        ),
        scheduler=diffusers.SCMScheduler(),
        vae=_dc(),
        text_encoder=gemma(),
        tokenizer=chat_tokenizer(2048),
    )


def lumina_2() -> Any:
    model = diffusers.Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=2,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(512, 64, 64),
        cap_feat_dim=HIDDEN,
    )
    return diffusers.Lumina2Pipeline(
        transformer=parts._lively(model),
        scheduler=flow(),
        vae=deep_vae(shift_factor=0.06),
        text_encoder=gemma(),
        tokenizer=chat_tokenizer(),
    )


def pixart_alpha() -> Any:
    model = diffusers.PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=4,
        in_channels=4,
        out_channels=8,
        cross_attention_dim=32,
        caption_channels=HIDDEN,
        use_additional_conditions=False,
    )
    return diffusers.PixArtAlphaPipeline(
        transformer=parts._lively(model),
        scheduler=parts.SCHEDULERS["dpm"](),
        vae=parts._vae(),
        text_encoder=parts._t5(),
        tokenizer=parts._t5_tokenizer(),
    )


def hidream() -> Any:
    model = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_channels=[HIDDEN, HIDDEN],
        text_emb_dim=2 * HIDDEN,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(32, 32),
        llama_layers=[0, 1],
        force_inference_output=True,
    )
    return diffusers.HiDreamImagePipeline(
        transformer=parts._lively(model),
        scheduler=flow(),
        vae=parts._vae(scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=parts._clip(CLIPTextModelWithProjection, 256),
        tokenizer=parts._clip_tokenizer(),
        text_encoder_2=parts._clip(CLIPTextModelWithProjection, 256),
        tokenizer_2=parts._clip_tokenizer(),
        text_encoder_3=parts._t5(),
        tokenizer_3=parts._t5_tokenizer(),
        text_encoder_4=LlamaForCausalLM(LlamaConfig(**sizes(2))),
        tokenizer_4=chat_tokenizer(),
    )


def aura_flow() -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    model = diffusers.AuraFlowTransformer2DModel(
        sample_size=8,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=HIDDEN,
        caption_projection_dim=32,
        pos_embed_max_size=1024,
    )
    encoder = UMT5EncoderModel(
        UMT5Config(vocab_size=64, d_model=HIDDEN, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )
    return diffusers.AuraFlowPipeline(
        transformer=parts._lively(model),
        scheduler=flow(),
        vae=parts._vae(),
        text_encoder=encoder,
        tokenizer=parts._t5_tokenizer(),
    )


def cogview_4() -> Any:
    from transformers import GlmConfig, GlmModel

    model = diffusers.CogView4Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        text_embed_dim=HIDDEN,
        time_embed_dim=16,
        condition_dim=8,
        pos_embed_max_size=32,
        sample_size=8,
        rope_axes_dim=(16, 16),
    )
    return diffusers.CogView4Pipeline(
        transformer=parts._lively(model),
        scheduler=flow(use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75),
        vae=parts._vae(),
        text_encoder=GlmModel(GlmConfig(**sizes(2))),
        tokenizer=chat_tokenizer(side="left"),
    )


def latent_consistency() -> Any:
    return diffusers.LatentConsistencyModelPipeline(
        vae=parts._vae(),
        text_encoder=parts._clip(CLIPTextModel),
        tokenizer=parts._clip_tokenizer(),
        unet=parts._unet(cross_attention_dim=HIDDEN, time_cond_proj_dim=8),
        scheduler=parts.SCHEDULERS["lcm"](),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


Maker = Callable[[], Any]
# Pipelines by class name: what makes them, and the name of the class whose modules they have.
MAKERS: dict[str, Maker] = {
    "StableDiffusion3Pipeline": stable_diffusion_3_5,
    "ChromaPipeline": chroma,
    "Flux2KleinPipeline": flux_2_klein,
    "QwenImagePipeline": qwen_image,
    "QwenImageEditPipeline": qwen_image_edit,
    "ZImagePipeline": z_image,
    "SanaPipeline": sana,
    "SanaSprintPipeline": sana_sprint,
    "Lumina2Pipeline": lumina_2,
    "PixArtAlphaPipeline": pixart_alpha,
    "HiDreamImagePipeline": hidream,
    "AuraFlowPipeline": aura_flow,
    "CogView4Pipeline": cogview_4,
    "LatentConsistencyModelPipeline": latent_consistency,
    **more_picture_families.MAKERS,
    **newer_picture_families.MAKERS,
}
# Those of `diffusion_checkpoints.py`, which write their folder themselves.
WRITERS: dict[str, Callable[[Path], Path]] = {
    "StableDiffusionPipeline": parts.stable_diffusion,
    "StableDiffusionXLPipeline": parts.stable_diffusion_xl,
    "FluxPipeline": parts.flux,
    "PixArtSigmaPipeline": parts.pixart,
    "KolorsPipeline": newer_picture_families.kolors,
}
# The same modules under another name.
SAME_MODULES = {
    "StableDiffusionImg2ImgPipeline": "StableDiffusionPipeline",
    "StableDiffusionInpaintPipeline": "StableDiffusionPipeline",
    "StableDiffusionXLImg2ImgPipeline": "StableDiffusionXLPipeline",
    "StableDiffusionXLInpaintPipeline": "StableDiffusionXLPipeline",
    "StableDiffusion3Img2ImgPipeline": "StableDiffusion3Pipeline",
    "StableDiffusion3InpaintPipeline": "StableDiffusion3Pipeline",
    "FluxImg2ImgPipeline": "FluxPipeline",
    "FluxInpaintPipeline": "FluxPipeline",
    "FluxKontextPipeline": "FluxPipeline",
    "FluxKontextInpaintPipeline": "FluxPipeline",
    "Flux2KleinInpaintPipeline": "Flux2KleinPipeline",
    "ChromaImg2ImgPipeline": "ChromaPipeline",
    "ChromaInpaintPipeline": "ChromaPipeline",
    "QwenImageImg2ImgPipeline": "QwenImagePipeline",
    "QwenImageInpaintPipeline": "QwenImagePipeline",
    "QwenImageEditPlusPipeline": "QwenImageEditPipeline",
    "QwenImageEditInpaintPipeline": "QwenImageEditPipeline",
    "ZImageImg2ImgPipeline": "ZImagePipeline",
    "ZImageInpaintPipeline": "ZImagePipeline",
    "SanaSprintImg2ImgPipeline": "SanaSprintPipeline",
    "LatentConsistencyModelImg2ImgPipeline": "LatentConsistencyModelPipeline",
    **more_picture_families.SAME_MODULES,
    **newer_picture_families.SAME_MODULES,
}
# What published folders name instead of the class that was written.
_INDEX = {"Flux2Pipeline": {"tokenizer": ["transformers", "PixtralProcessor"]}}
NAMES = sorted({*MAKERS, *WRITERS, *SAME_MODULES})


def write(name: str, path: Path) -> Path:
    """Write a tiny checkpoint of a pipeline class with random weights."""
    torch.manual_seed(0)
    base = SAME_MODULES.get(name, name)
    if base in WRITERS:
        WRITERS[base](path)
    else:
        MAKERS[base]().save_pretrained(path)
    index = path / "model_index.json"
    content = json.loads(index.read_text())
    content |= {"_class_name": name, **_INDEX.get(name, {})}
    index.write_text(json.dumps(content))
    return path
