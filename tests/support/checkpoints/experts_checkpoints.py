"""Write tiny mixtures of experts in codes, with checkpoints of their float32 values."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    NemotronHConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from support.checkpoints.language_checkpoints import EOS, VOCAB, write_tokenizer
from support.checkpoints.quantized_checkpoints import quantize, set_config, stands_for, words

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
MIXTRAL = MixtralConfig(**SIZES, num_local_experts=4, intermediate_size=128)
QWEN2_MOE = Qwen2MoeConfig(
    **{key: size for key, size in SIZES.items() if key != "head_dim"},
    num_experts=4,
    moe_intermediate_size=128,
    shared_expert_intermediate_size=128,
    intermediate_size=128,
)
GRANITE_MOE = GraniteMoeConfig(
    **{key: size for key, size in SIZES.items() if key != "head_dim"},
    num_local_experts=4,
    intermediate_size=128,
)
DEEPSEEK = DeepseekV3Config(
    **{**SIZES, "num_key_value_heads": 4, "head_dim": 32},
    intermediate_size=128,
    moe_intermediate_size=128,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
    first_k_dense_replace=1,
    kv_lora_rank=32,
    q_lora_rank=32,
    qk_rope_head_dim=32,
    qk_nope_head_dim=32,
    v_head_dim=32,
)
NEMOTRON_H = NemotronHConfig(
    **{**SIZES, "num_hidden_layers": 3},
    hybrid_override_pattern="ME*",
    n_routed_experts=4,
    moe_intermediate_size=128,
    moe_shared_expert_intermediate_size=128,
    n_group=1,
    topk_group=1,
    mamba_num_heads=8,
    expand=2,
    mamba_head_dim=32,
    ssm_state_size=16,
    n_groups=2,
    chunk_size=16,
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


# ------------------------------------------------------------------- every method, every structure
Packed = tuple[dict[str, Tensor], Tensor]  # tensors by the ends of their names, and what they are
_MATRIX = re.compile(r".*(_proj|_linear|\.w[123])\.weight")
GROUP = 32


def _gptq(weight: Tensor) -> Packed:
    groups = np.arange(weight.shape[1]) // GROUP
    codes = quantize(weight, 4, groups, True)
    steps, scales, zeros = codes
    tensors = {
        "qweight": words(steps, 4).T.contiguous(),
        "qzeros": words(zeros.T - 1, 4),
        "scales": torch.from_numpy(scales.T.astype(np.float16)),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return tensors, stands_for(codes, groups)


def _awq(weight: Tensor) -> Packed:
    groups = np.arange(weight.shape[1]) // GROUP
    codes = quantize(weight, 4, groups, False)
    steps, scales, zeros = codes
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words(steps.T, 4, order), "qzeros": words(zeros.T, 4, order)}
    scale = torch.from_numpy(scales.T.astype(np.float16))
    return tensors | {"scales": scale}, stands_for(codes, groups)


def _float8(weight: Tensor) -> Packed:
    blocks = [-(-size // 128) for size in weight.shape]
    scale = torch.full(blocks, float(weight.abs().max()) / 448)
    codes = (weight / scale[0, 0]).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * scale[0, 0]


def _int8(weight: Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def _packed4(weight: Tensor) -> Packed:
    groups = np.arange(weight.shape[1]) // GROUP
    codes = quantize(weight, 4, groups, True)
    steps, scales, _ = codes
    tensors = {
        "weight_packed": words(steps, 4),
        "weight_shape": torch.tensor(weight.shape),
        "weight_scale": torch.from_numpy(scales.astype(np.float16)),
    }
    return tensors, stands_for(codes, groups)


def _scheme(form: str, bits: int, target: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel"}
    weights |= {"strategy": "group", "group_size": GROUP} if form == "pack-quantized" else {}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": [target], "weights": weights}},
    }


METHODS: dict[str, tuple[Callable[[Tensor], Packed], dict[str, Any]]] = {
    "gptq": (_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP}),
    "fp8": (_float8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "int8": (_int8, _scheme("int-quantized", 8, "Linear")),
    # By the names that the checkpoint has.
    "int4": (_packed4, _scheme("pack-quantized", 4, r"re:.*(self_attn|block_sparse_moe).*")),
}


def quantized(folder: Path, config: Any, method: str) -> tuple[Path, Path]:
    """Write a mixture as published, all matrices but routers and the head in codes of `method`.

    One tensor of all experts becomes one of codes, one of scales.
    """
    pack, settings = METHODS[method]

    def change(name: str, weight: Tensor) -> Packed | None:
        if not _MATRIX.fullmatch(name):
            return None
        found = [pack(one) for one in (weight if weight.dim() == 3 else [weight])]
        ends = found[0][0]
        if weight.dim() == 3:
            parts = {end: torch.stack([one[0][end] for one in found]) for end in ends}
            dense = torch.stack([one[1] for one in found])
        else:
            parts, dense = found[0]
        stem = name.removesuffix(".weight")
        return {f"{stem}.{end}": part.contiguous() for end, part in parts.items()}, dense

    return _pair(folder, config, settings, change)
