"""Write tiny diffusion checkpoints with random weights, in diffusers' form."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    LCMScheduler,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    PNDMScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from safetensors.torch import save_file
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

LENGTH = 12  # tokens of a prompt
HIDDEN = 32
CELLS = 8  # latents of each side
SIZE = CELLS * 2  # pixels: the VAE halves once

_RANK = 2  # of adapters
_ADAPTED = ("to_q", "to_v", "to_k", "add_q_proj", "proj_mlp", "q_proj", "v_proj", "out_proj")

_BETAS: dict[str, Any] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
}
SCHEDULERS = {
    "ddim": lambda: DDIMScheduler(**_BETAS, clip_sample=False, steps_offset=1),
    "pndm": lambda: PNDMScheduler(**_BETAS, skip_prk_steps=True, steps_offset=1),
    "dpm": lambda: DPMSolverMultistepScheduler(**_BETAS, steps_offset=1),
    "euler": lambda: EulerDiscreteScheduler(**_BETAS, steps_offset=1),
    "ancestral": lambda: EulerAncestralDiscreteScheduler(**_BETAS, steps_offset=1),
    "turbo": lambda: EulerAncestralDiscreteScheduler(
        **_BETAS, steps_offset=1, timestep_spacing="trailing"
    ),
    "lcm": lambda: LCMScheduler(**_BETAS, steps_offset=1),
    "v": lambda: DDIMScheduler(
        **_BETAS, clip_sample=False, steps_offset=1, prediction_type="v_prediction"
    ),
}


def stable_diffusion(path: Path, scheduler: str = "ddim", *, seed: int = 0) -> Path:
    """Write the layout of Stable Diffusion 1.5 and Turbo."""
    torch.manual_seed(seed)
    pipeline = StableDiffusionPipeline(
        vae=_vae(),
        text_encoder=_clip(CLIPTextModel),
        tokenizer=_clip_tokenizer(),
        unet=_unet(cross_attention_dim=HIDDEN),
        scheduler=SCHEDULERS[scheduler](),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(path)
    return path


def stable_diffusion_xl(path: Path, scheduler: str = "euler", *, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    pipeline = StableDiffusionXLPipeline(
        vae=_vae(),
        text_encoder=_clip(CLIPTextModel),
        text_encoder_2=_clip(CLIPTextModelWithProjection),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(),
        unet=_unet_xl(cross_attention_dim=2 * HIDDEN),
        scheduler=SCHEDULERS[scheduler](),
    )
    pipeline.save_pretrained(path)
    return path


def stable_diffusion_3(path: Path, *, seed: int = 0) -> Path:
    """Write Stable Diffusion 3 without its largest text encoder, as is common."""
    torch.manual_seed(seed)
    pipeline = StableDiffusion3Pipeline(
        transformer=_sd3_transformer(num_layers=3),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(16, shift_factor=0.06),
        text_encoder=_clip(CLIPTextModelWithProjection),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_clip(CLIPTextModelWithProjection),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipeline.save_pretrained(path)
    return path


def flux(path: Path, *, seed: int = 0, is_distilled: bool = True) -> Path:
    """Write Flux [dev]; [schnell], which has no guidance in its weights, if not `is_distilled`."""
    torch.manual_seed(seed)
    pipeline = FluxPipeline(
        transformer=_flux_transformer(
            num_layers=2, num_single_layers=2, guidance_embeds=is_distilled
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_vae(shift_factor=0.06),
        text_encoder=_clip(CLIPTextModel),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_t5(),
        tokenizer_2=_t5_tokenizer(),
    )
    pipeline.save_pretrained(path)
    return path


def pixart(path: Path, *, seed: int = 0, scheduler: Any = None) -> Path:
    torch.manual_seed(seed)
    pipeline = PixArtSigmaPipeline(
        transformer=_lively(
            PixArtTransformer2DModel(
                sample_size=CELLS,
                num_layers=3,
                patch_size=2,
                attention_head_dim=8,
                num_attention_heads=4,
                in_channels=4,
                out_channels=8,
                cross_attention_dim=32,
                caption_channels=HIDDEN,
            )
        ),
        scheduler=SCHEDULERS["dpm"]() if scheduler is None else scheduler,
        vae=_vae(),
        text_encoder=_t5(),
        tokenizer=_t5_tokenizer(),
    )
    pipeline.save_pretrained(path)
    return path


FAMILIES = {
    "sd": stable_diffusion,
    "sdxl": stable_diffusion_xl,
    "sd3": stable_diffusion_3,
    "flux": flux,
    "pixart": pixart,
}


def load(path: Path) -> Any:
    left_out = (
        {"text_encoder_3": None, "tokenizer_3": None} if path.parent.name.startswith("sd3") else {}
    )
    return DiffusionPipeline.from_pretrained(path, low_cpu_mem_usage=False, **left_out)


def write_adapter(model: Path, file: Path, seed: int, *, kohya: bool = False) -> Path:
    """Write a strong random adapter of the denoiser's attention.

    Also of the text encoder's, except in SD3 and Flux.
    """
    pipeline, tensors = load(model), dict[str, torch.Tensor]()
    generator = torch.Generator().manual_seed(seed)
    size = 1.5 if hasattr(pipeline, "transformer") else 0.3
    for part in ("unet", "transformer", "text_encoder"):
        found = getattr(pipeline, part, None)
        if found is None or (part == "text_encoder" and hasattr(pipeline, "transformer")):
            continue
        for name, module in found.named_modules():
            if isinstance(module, torch.nn.Linear) and name.split(".")[-1] in _ADAPTED:
                down = torch.randn(_RANK, module.in_features, generator=generator) * size
                up = torch.randn(module.out_features, _RANK, generator=generator) * size
                if kohya:
                    short = "lora_te" if part == "text_encoder" else f"lora_{part}"
                    key = f"{short}_{name.replace('.', '_')}"
                    tensors |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
                    tensors[f"{key}.alpha"] = torch.tensor(1.0)
                else:
                    tensors |= {
                        f"{part}.{name}.lora_A.weight": down,
                        f"{part}.{name}.lora_B.weight": up,
                    }
    save_file(tensors, file)
    return file


def _lively(model: Any) -> Any:
    """Randomize the zero-initialized last layers, without which all pictures would be equal."""
    for parameter in model.parameters():
        if not bool(parameter.any()):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def _unet(**fields: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=CELLS,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        norm_num_groups=4,
        **fields,
    )


def _unet_xl(**fields: Any) -> UNet2DConditionModel:
    """Return a UNet that reads a pooled text and the size of the picture, as SDXL's."""
    return _unet(
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + HIDDEN,
        **fields,
    )


def _sd3_transformer(**fields: Any) -> SD3Transformer2DModel:
    model = SD3Transformer2DModel(
        sample_size=CELLS,
        patch_size=2,
        in_channels=16,  # its inpainting knows no other number
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=2 * HIDDEN,
        caption_projection_dim=32,
        pooled_projection_dim=2 * HIDDEN,
        out_channels=16,
        pos_embed_max_size=32,
        **fields,
    )
    return _lively(model)


def _flux_transformer(channels: int = 16, **fields: Any) -> FluxTransformer2DModel:
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=channels,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=HIDDEN,
        pooled_projection_dim=HIDDEN,
        axes_dims_rope=(4, 4, 8),
        **fields,
    )
    return _lively(model)


def _vae(channels: int = 4, **fields: Any) -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=SIZE,
        **fields,
    )


def _clip(kind: type[Any], length: int = LENGTH) -> Any:
    return kind(
        CLIPTextConfig(
            vocab_size=len(_letters()),
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=length,
            projection_dim=HIDDEN,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )


def _letters() -> dict[str, int]:
    marks = ["<|startoftext|>", "<|endoftext|>"]
    letters = [
        letter + end for letter in string.ascii_lowercase + string.digits for end in ("", "</w>")
    ]
    return {token: number for number, token in enumerate(marks + letters)}


def _clip_tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer(vocab=_letters(), merges=[], model_max_length=LENGTH)


def _t5() -> T5EncoderModel:
    return _t5_of(HIDDEN)


def _t5_of(hidden: int) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=64,
            d_model=hidden,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
        )
    )


def _t5_tokenizer() -> T5Tokenizer:
    marks = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    letters = [(letter, -3.0) for letter in string.ascii_lowercase + string.digits]
    return T5Tokenizer(vocab=marks + letters, extra_ids=0, model_max_length=LENGTH)
