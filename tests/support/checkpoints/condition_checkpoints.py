"""Write tiny ControlNets and IP-Adapters for a tiny Stable Diffusion (XL), as diffusers loads them."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

_TOKENS = 4  # that an image becomes, in the first layout of IP-Adapter
_EMBEDDING = 16


def write_controlnet(model: Path, path: Path, seed: int) -> Path:
    """Write a strong random ControlNet for the UNet of `model`."""
    torch.manual_seed(seed)
    unet = UNet2DConditionModel.from_pretrained(model / "unet", low_cpu_mem_usage=False)
    net = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 16))
    for parameter in net.parameters():
        if not bool(parameter.any()):  # the convolutions that begin with zeros
            torch.nn.init.normal_(parameter, std=0.3)
    net.save_pretrained(path)
    return path


def write_ip_adapter(model: Path, folder: Path, name: str, seed: int) -> Path:
    """Write a strong random IP-Adapter for the UNet of `model`, its encoder beside it."""
    torch.manual_seed(seed)
    unet = UNet2DConditionModel.from_pretrained(model / "unet", low_cpu_mem_usage=False)
    width = unet.config.cross_attention_dim
    tensors = {
        "image_proj.proj.weight": torch.randn(_TOKENS * width, _EMBEDDING),
        "image_proj.proj.bias": torch.randn(_TOKENS * width),
        "image_proj.norm.weight": torch.ones(width),
        "image_proj.norm.bias": torch.zeros(width),
    }
    number = 1
    for processor in unet.attn_processors:
        if "attn2" not in processor:
            continue
        attention = unet.get_submodule(processor.removesuffix(".processor"))
        for part in ("to_k_ip", "to_v_ip"):
            weight = torch.randn(attention.inner_dim, width)
            tensors[f"ip_adapter.{number}.{part}.weight"] = weight
        number += 2
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / f"{name}.safetensors")
    if not (folder / "image_encoder").exists():
        torch.manual_seed(0)
        config = CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=8,
            projection_dim=_EMBEDDING,
        )
        CLIPVisionModelWithProjection(config).save_pretrained(folder / "image_encoder")
    return folder / f"{name}.safetensors"
