"""Write tiny mixtures of experts in codes, with checkpoints of their float32 values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from support.checkpoints import EOS, VOCAB, write_tokenizer
from support.quantized_checkpoints import set_config

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "eos_token_id": EOS,
    "pad_token_id": VOCAB - 3,
}
QWEN3_MOE = Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=128, norm_topk_prob=True)
GPT_OSS = GptOssConfig(
    **SIZES,
    num_local_experts=4,
    intermediate_size=128,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)


def plain(folder: Path, config: Any, dtype: torch.dtype = torch.float32) -> Path:
    """Write a mixture with random weights; those of the experts and of attention are small."""
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                # Routers choose clearly: rounding does not move a token to another expert.
                spread = 0.4 if "embed" in name or "router" in name or "mlp.gate." in name else 0.08
                parameter.normal_(std=spread)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def _pair(
    folder: Path,
    config: Any,
    settings: dict[str, Any],
    change: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor] | None],
) -> tuple[Path, Path]:
    """Write a checkpoint with tensors that `change` replaces, and one with their values."""
    dense, coded = plain(folder / "plain", config), plain(folder / "quantized", config)
    values = load_file(dense / "model.safetensors")
    codes = dict(values)
    for name, tensor in list(values.items()):
        found = change(name, tensor)
        if found is not None:
            del codes[name]
            codes |= found[0]
            values[name] = found[1]
    save_file(values, dense / "model.safetensors", {"format": "pt"})
    save_file(codes, coded / "model.safetensors", {"format": "pt"})
    set_config(coded, quantization_config=settings)
    return coded, dense


def float8_experts(folder: Path) -> tuple[Path, Path]:
    """Write Qwen3-MoE in float8 with a scale per block of 128 × 128, expert by expert."""

    def change(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not name.endswith("_proj.weight"):
            return None
        blocks = [-(-size // 128) for size in weight.shape]
        scale = torch.full(blocks, float(weight.abs().max()) / 448)
        codes = (weight / scale[0, 0]).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}_scale_inv": scale}, codes.float() * scale[0, 0]

    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return _pair(folder, QWEN3_MOE, settings, change)


def mxfp4_experts(folder: Path) -> tuple[Path, Path]:
    """Write gpt-oss with experts in MXFP4; transformers decodes them for the other."""

    def change(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not name.endswith((".gate_up_proj", ".down_proj")):
            return None
        experts, inputs, features = weight.shape
        drawn = torch.Generator().manual_seed(inputs + features)
        shape = (experts, features, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=drawn, dtype=torch.uint8)
        scales = torch.randint(121, 124, shape, generator=drawn, dtype=torch.uint8)
        dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}, dense.contiguous()

    return _pair(folder, GPT_OSS, {"quant_method": "mxfp4"}, change)
