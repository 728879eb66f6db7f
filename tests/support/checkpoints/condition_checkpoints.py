"""Write tiny ControlNets and IP-Adapters for tiny picture models, as diffusers loads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import IPAdapterTimeImageProjection
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
)

_TOKENS = 4  # that an image becomes, in the first layout of IP-Adapter
_EMBEDDING = 16
_VISION: dict[str, int] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_PROJECTED = {"hidden_dim": 64, "heads": 1, "num_queries": 4, "timestep_in_dim": 32}


def write_controlnet(model: Path, path: Path, seed: int, **fields: Any) -> Path:
    """Write a strong random ControlNet for the denoiser of `model`; fields: of its config."""
    torch.manual_seed(seed)
    kind, denoiser = _denoiser(model)
    if kind == "UNet2DConditionModel":
        net: Any = diffusers.ControlNetModel.from_unet(
            denoiser, conditioning_embedding_out_channels=(8, 16)
        )
    elif kind == "FluxTransformer2DModel":
        config = {**denoiser.config, "num_layers": 1, "num_single_layers": 1, **fields}
        net = diffusers.FluxControlNetModel.from_config(config)
    else:
        config = {**denoiser.config, "num_layers": 2, **fields}
        net = diffusers.SD3ControlNetModel.from_config(config)
    for parameter in net.parameters():
        if not bool(parameter.any()):  # the layers that begin with zeros
            torch.nn.init.normal_(parameter, std=0.3)
    net.save_pretrained(path)
    return path


def write_ip_adapter(model: Path, folder: Path, name: str, seed: int) -> Path:
    """Write a strong random IP-Adapter for the denoiser of `model`, its encoder beside it."""
    torch.manual_seed(seed)
    kind, denoiser = _denoiser(model)
    folder.mkdir(exist_ok=True)
    save_file(_TENSORS[kind](denoiser), folder / f"{name}.safetensors")
    if not (folder / "image_encoder").exists():
        torch.manual_seed(0)
        if kind == "SD3Transformer2DModel":
            SiglipVisionModel(SiglipVisionConfig(**_VISION)).save_pretrained(
                folder / "image_encoder"
            )
            side = _VISION["image_size"]
            processor = SiglipImageProcessor(size={"height": side, "width": side})
            processor.save_pretrained(folder / "image_encoder")
        else:
            config = CLIPVisionConfig(**_VISION, projection_dim=_EMBEDDING)
            CLIPVisionModelWithProjection(config).save_pretrained(folder / "image_encoder")
    return folder / f"{name}.safetensors"


def _denoiser(model: Path) -> tuple[str, Any]:
    """Return the class name of a model's denoiser, and the denoiser."""
    index = json.loads((model / "model_index.json").read_text())
    part = "unet" if "unet" in index else "transformer"
    kind = index[part][1]
    return kind, getattr(diffusers, kind).from_pretrained(model / part, low_cpu_mem_usage=False)


def _projection(width: int) -> dict[str, Tensor]:
    return {
        "image_proj.proj.weight": torch.randn(_TOKENS * width, _EMBEDDING),
        "image_proj.proj.bias": torch.randn(_TOKENS * width),
        "image_proj.norm.weight": torch.ones(width),
        "image_proj.norm.bias": torch.zeros(width),
    }


def _for_unet(unet: Any) -> dict[str, Tensor]:
    width = unet.config.cross_attention_dim
    tensors, number = _projection(width), 1
    for processor in unet.attn_processors:
        if "attn2" not in processor:
            continue
        attention = unet.get_submodule(processor.removesuffix(".processor"))
        for part in ("to_k_ip", "to_v_ip"):
            weight = torch.randn(attention.inner_dim, width)
            tensors[f"ip_adapter.{number}.{part}.weight"] = weight
        number += 2
    return tensors


def _for_flux(transformer: Any) -> dict[str, Tensor]:
    width, inner = transformer.config.joint_attention_dim, transformer.inner_dim
    tensors = _projection(width)
    for block in range(len(transformer.transformer_blocks)):
        for part in ("to_k_ip", "to_v_ip"):
            tensors[f"ip_adapter.{block}.{part}.weight"] = torch.randn(inner, width)
            tensors[f"ip_adapter.{block}.{part}.bias"] = torch.randn(inner)
    return tensors


def _for_sd3(transformer: Any) -> dict[str, Tensor]:
    """Return an adapter in the layout of SD3.5's, whose projection has four blocks."""
    from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0

    inner, head = transformer.inner_dim, transformer.config.attention_head_dim
    projection = IPAdapterTimeImageProjection(
        embed_dim=_VISION["hidden_size"], output_dim=inner, **_PROJECTED
    )
    tensors = {
        f"image_proj.{_published(name)}": tensor for name, tensor in projection.state_dict().items()
    }
    for number in range(len(transformer.attn_processors)):
        layer = SD3IPAdapterJointAttnProcessor2_0(inner, inner, head, _PROJECTED["hidden_dim"])
        tensors |= {
            f"ip_adapter.{number}.{name}": torch.randn_like(tensor)
            for name, tensor in layer.state_dict().items()
        }
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


def _published(name: str) -> str:
    """Return the name that published adapters have for a tensor of the projection."""
    if not name.startswith("layers."):
        return name
    _, number, rest = name.split(".", 2)
    names = {
        "ln0": "0.norm1",
        "ln1": "0.norm2",
        "attn.to_q": "0.to_q",
        "attn.to_kv": "0.to_kv",
        "attn.to_out.0": "0.to_out",
        "adaln_norm": "1.0",
        "ff.net.0.proj": "1.1",
        "ff.net.2": "1.3",
        "adaln_proj": "2.1",
    }
    own = next(own for own in names if rest.startswith(f"{own}."))
    return f"layers.{number}.{names[own]}{rest.removeprefix(own)}"


_TENSORS: dict[str, Callable[[Any], dict[str, Tensor]]] = {
    "UNet2DConditionModel": _for_unet,
    "FluxTransformer2DModel": _for_flux,
    "SD3Transformer2DModel": _for_sd3,
}
