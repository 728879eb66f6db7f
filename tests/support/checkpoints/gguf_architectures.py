"""Write GGUF files of tiny models of each architecture, with checkpoints of their values.

Metadata and the order of rows are those of llama.cpp's `convert_hf_to_gguf.py`, which is no package;
`gguf` writes, quantizes and dequantizes. No code is shared with the loader. A row is quantized by
itself, so that its bytes are moved as its numbers are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from support.checkpoints.gguf_files import TYPES, finish, write_sizes, write_vocabulary
from support.checkpoints.language_checkpoints import EOS, VOCAB, write_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "n_inner": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
    "pad_token_id": VOCAB - 3,
    "bos_token_id": None,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "sliding_window": 12,
    "use_sliding_window": False,
}
_SCALES_EMBEDDINGS = ("gemma", "lfm2")
Pieces = Iterator[tuple[str, np.ndarray]]
ATTENTION, OTHERS = "Q8_0", "Q4_0"


def _nothing(writer: gguf.GGUFWriter, config: Any) -> None:
    pass


def _as_it_is(name: str, values: np.ndarray, config: Any) -> Pieces:
    yield name, values


def _in_order(name: str, size: int, config: Any) -> np.ndarray:
    return np.arange(size)


@dataclass(frozen=True)
class Kind:
    """found: transformers' `model_type`. write: metadata besides those of all. convert: a parameter's pieces
    in llama.cpp's order, by transformers' names; inputs: transformers' inputs in that order;
    `overrides` go into the config.
    """

    found: str
    write: Callable[[gguf.GGUFWriter, Any], None] = _nothing
    convert: Callable[[str, np.ndarray, Any], Pieces] = _as_it_is
    overrides: dict[str, Any] = field(default_factory=dict)
    experts: str = OTHERS
    inputs: Callable[[str, int, Any], np.ndarray] = _in_order


# -------------------------------------------------------------------------------------- conversion
def _llama_rows(name: str, values: np.ndarray, config: Any) -> Pieces:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(name.split(".")[-2])
    if count is not None:
        halves = values.reshape(count, 2, len(values) // count // 2, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    yield from _experts(name, values, config)


def _experts(name: str, values: np.ndarray, config: Any) -> Pieces:
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(values, 2, axis=1)
        yield name.replace("gate_up_proj", "gate_proj.weight"), gate
        yield name.replace("gate_up_proj", "up_proj.weight"), up
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", values
    elif name.endswith("shared_expert_gate.weight"):
        yield name, values[0]
    elif name.endswith("e_score_correction_bias"):
        yield name.replace("_bias", ".bias"), values
    else:
        yield name, values


def _gpt_oss(name: str, values: np.ndarray, config: Any) -> Pieces:
    if "gate_up_proj" in name:
        end = "bias" if name.endswith("_bias") else "weight"
        stem = name.removesuffix("gate_up_proj_bias").removesuffix("gate_up_proj")
        yield f"{stem}gate_proj.{end}", values[:, ::2]
        yield f"{stem}up_proj.{end}", values[:, 1::2]
    elif name.endswith("down_proj_bias"):
        yield name.replace("_bias", ".bias"), values
    elif name.endswith("sinks"):
        yield f"{name}.weight", values
    else:
        yield from _experts(name, values, config)


def _plus_one(name: str, values: np.ndarray, config: Any) -> Pieces:
    yield name, values + 1 if name.endswith("norm.weight") else values


def _convolution(name: str, values: np.ndarray, config: Any) -> Pieces:
    yield name, values[:, 0] if name.endswith("conv.conv.weight") else values


def _tiled(values: np.ndarray, config: Any, width: int) -> np.ndarray:
    """Value heads of a key head, one after the other, become the n-th of each key head."""
    keys = config.linear_num_key_heads
    return values.reshape(keys, -1, width, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)


def _qwen35(name: str, values: np.ndarray, config: Any) -> Pieces:
    dim, last = config.linear_value_head_dim, name.split("linear_attn.")[-1]
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if last in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        values = _tiled(values, config, 1)
    if last == "in_proj_z.weight":
        values = _tiled(values, config, dim)
    if last in ("in_proj_qkv.weight", "conv1d.weight"):
        values = values if values.ndim == 2 else values[:, 0]
        values = np.concatenate((values[:before], _tiled(values[before:], config, dim)))
    if last == "A_log":
        values = -np.exp(values)
    if last == "dt_bias":
        name = name.replace("dt_bias", "dt_proj.bias")
    if name.endswith("norm.weight") and last != "norm.weight":
        values = values + 1
    yield from _experts(name, values, config)


def _inputs35(name: str, size: int, config: Any) -> np.ndarray:
    if not name.endswith("linear_attn.out_proj.weight"):
        return np.arange(size)
    return _tiled(np.arange(size), config, config.linear_value_head_dim)


# ---------------------------------------------------------------------------------------- metadata
def _rope(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1)))


def _layer_norms(writer: gguf.GGUFWriter, config: Any) -> None:
    names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    writer.add_layer_norm_eps(next(getattr(config, n) for n in names if hasattr(config, n)))


def _rotating(writer: gguf.GGUFWriter, config: Any) -> None:
    _rope(writer, config)
    _layer_norms(writer, config)


def _stablelm(writer: gguf.GGUFWriter, config: Any) -> None:
    _rotating(writer, config)
    writer.add_parallel_residual(config.use_parallel_residual)


def _gpt2(writer: gguf.GGUFWriter, config: Any) -> None:
    _layer_norms(writer, config)
    writer.add_feed_forward_length(config.n_inner)


def _gemma2(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def _gemma3(writer: gguf.GGUFWriter, config: Any) -> None:
    whole = config.rope_parameters["full_attention"]
    writer.add_rope_freq_base(whole["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(whole["factor"])


def _moe(writer: gguf.GGUFWriter, config: Any) -> None:
    _rope(writer, config)
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if (width := getattr(config, "moe_intermediate_size", None)) is not None:
        writer.add_expert_feed_forward_length(width)
    if (width := getattr(config, "shared_expert_intermediate_size", None)) is not None:
        writer.add_expert_shared_feed_forward_length(width)


def _gpt_oss_fields(writer: gguf.GGUFWriter, config: Any) -> None:
    _moe(writer, config)
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    original = config.rope_parameters["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)


def _minimax(writer: gguf.GGUFWriter, config: Any) -> None:
    _moe(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _lfm2(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_feed_forward_length(config.intermediate_size)
    heads = config.num_key_value_heads
    writer.add_head_count_kv(
        [heads if kind == "full_attention" else 0 for kind in config.layer_types]
    )


def _qwen35_fields(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_full_attention_interval(3)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)


def _qwen35moe_fields(writer: gguf.GGUFWriter, config: Any) -> None:
    _qwen35_fields(writer, config)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


_FULL = {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}
_DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_ROPE35 = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    }
}
KINDS: dict[str, Kind] = {
    "llama": Kind("llama", _rope, _llama_rows),
    "llama, experts": Kind("mixtral", _moe, _llama_rows, {"sliding_window": None}),
    "qwen2": Kind("qwen2", _rope),
    "gemma": Kind("gemma", _rope, _plus_one),
    "gemma2": Kind(
        "gemma2", _gemma2, _plus_one, {"query_pre_attn_scalar": 16, "sliding_window": 12}
    ),
    "gemma3": Kind(
        "gemma3_text",
        _gemma3,
        _plus_one,
        {"num_hidden_layers": 6, "query_pre_attn_scalar": 16}
        | {"final_logit_softcapping": None, "attn_logit_softcapping": None}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": _FULL,
            }
        },
    ),
    "phi3": Kind("phi3", _rope, overrides={"sliding_window": None}),
    "starcoder2": Kind("starcoder2", _rotating, overrides={"sliding_window": None}),
    "gpt2": Kind("gpt2", _gpt2),
    "stablelm": Kind("stablelm", _stablelm, overrides={"use_qkv_bias": True}),
    "stablelm, parallel": Kind("stablelm", _stablelm, overrides={"use_parallel_residual": True}),
    "nemotron": Kind("nemotron", _rotating, _plus_one),
    "qwen2moe": Kind(
        "qwen2_moe",
        _moe,
        _experts,
        {"norm_topk_prob": False},
    ),
    "qwen3moe": Kind(
        "qwen3_moe",
        _moe,
        _experts,
        {"norm_topk_prob": True},
    ),
    "gpt-oss": Kind(
        "gpt_oss",
        _gpt_oss_fields,
        _gpt_oss,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 32,
                "truncate": False,
            }
        },
        experts="MXFP4",
    ),
    "minimax-m2": Kind("minimax_m2", _minimax, _experts, {"head_dim": 16}),
    "lfm2": Kind(
        "lfm2",
        _lfm2,
        _convolution,
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "qwen35": Kind("qwen3_5_text", _qwen35_fields, _qwen35, _DELTA | _ROPE35, inputs=_inputs35),
    # All experts for every token: rounding cannot choose another one.
    "qwen35moe": Kind(
        "qwen3_5_moe_text",
        _qwen35moe_fields,
        _qwen35,
        _DELTA | _ROPE35 | {"num_experts_per_tok": 4},
        inputs=_inputs35,
    ),
}


# ------------------------------------------------------------------------------------------- files
def architecture_of(name: str) -> str:
    return name.partition(",")[0]


def _config_of(kind: Kind) -> PreTrainedConfig:
    found: Any = CONFIG_MAPPING[kind.found]
    known = {*found.__dataclass_fields__, *found.attribute_map}
    sizes = {key: value for key, value in SIZES.items() if key in known}
    config: PreTrainedConfig = found(**(sizes | kind.overrides))
    return config


def model_of(name: str) -> PreTrainedModel:
    """Return a tiny model with random weights, spread so that greedy answers vary."""
    kind = KINDS[name]
    config = _config_of(kind)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                # Routers choose clearly: rounding does not move a token to another expert.
                clear = "router" in key or "mlp.gate.weight" in key
                wide = clear or ("embed" in key and not name.startswith(_SCALES_EMBEDDINGS))
                parameter.normal_(std=0.5 if wide else 0.12)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    found: PreTrainedModel = model.eval()
    return found


def write(
    name: str, folder: Path, *, plain: bool = False, up: str | None = None
) -> tuple[Path, PreTrainedModel]:
    """Write a file; return its path and transformers' model with the file's values.

    plain: nothing is quantized. up: another type for one of the experts' halves.
    """
    kind, model = KINDS[name], model_of(name)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    path, config = folder / "model.gguf", model.config
    writer = gguf.GGUFWriter(path, architecture_of(name))
    if architecture_of(name) == "lfm2":
        _sizes_of_lfm2(writer, config)
    else:
        write_sizes(writer, config)
    kind.write(writer, config)
    write_vocabulary(writer, folder)
    number = next(k for k, n in gguf.MODEL_ARCH_NAMES.items() if n == architecture_of(name))
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    types = {} if plain else _types(model, kind)
    tied = getattr(config, "tie_word_embeddings", False)
    for key, parameter in model.state_dict().items():
        if tied and key == "lm_head.weight":
            continue
        turned = key in _turned(model)
        values = parameter.transpose(-1, -2).numpy() if turned else parameter.numpy()
        form = types.get(key)
        inputs = kind.inputs(key, values.shape[-1], config) if values.ndim else np.arange(0)
        values = np.ascontiguousarray(values[..., inputs] if values.ndim == 2 else values)
        if form is not None:
            data = quantize(values, TYPES[form])
            values = dequantize(data, TYPES[form])[..., inputs.argsort()]
            dense = torch.from_numpy(np.ascontiguousarray(values))
            parameter.copy_(dense.transpose(-1, -2) if turned else dense)
            values = data
        for part, piece in kind.convert(key, values, config):
            theirs = _theirs(names, part)
            raw = None if form is None else TYPES[form]
            if up is not None and raw is not None and part.endswith("experts.up_proj.weight"):
                piece, raw = quantize(dequantize(piece, raw), TYPES[up]), TYPES[up]
            writer.add_tensor(theirs, np.ascontiguousarray(piece), raw_dtype=raw)
    finish(writer)
    return path, model


def _sizes_of_lfm2(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)


def _theirs(names: Any, part: str) -> str:
    whole = names.get_name(part)
    if whole is not None:
        return str(whole)
    module, _, end = part.rpartition(".")
    if module.endswith("experts.gate_proj") or module.endswith("experts.up_proj"):
        down = names.get_name(f"{module.rpartition('.')[0]}.down_proj")
        kind = "gate" if module.endswith("gate_proj") else "up"
        return f"{down.replace('down', kind)}.{end}"
    found = names.get_name(module)
    assert found is not None, part
    return f"{found}.{end}"


def _turned(model: PreTrainedModel) -> set[str]:
    """Return the parameters that are [inputs, outputs]."""
    found = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, Conv1D)}
    for name, module in model.named_modules():
        if getattr(module, "is_transposed", False):
            found |= {f"{name}.gate_up_proj", f"{name}.down_proj"}
    return found


def _types(model: PreTrainedModel, kind: Kind) -> dict[str, str]:
    """Return the type of each matrix."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and not name.endswith("shared_expert_gate"):
            found[f"{name}.weight"] = ATTENTION if "attn" in name or "head" in name else OTHERS
        if name.endswith(".experts"):
            found |= {f"{name}.gate_up_proj": kind.experts, f"{name}.down_proj": kind.experts}
    table = model.get_input_embeddings()
    found |= {f"{n}.weight": ATTENTION for n, m in model.named_modules() if m is table}
    return found
