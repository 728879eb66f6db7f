"""Describe the memory-relevant differences of decoder families, for `model_counter`.

A family describes what its transformers model builds, as read from
`transformers.models.<model_type>`; the tests compare the counts with transformers' own
`num_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Flag = bool | str  # True, False, or the name of the config field that holds it


@dataclass(frozen=True, kw_only=True)
class Family:
    """Differences of a decoder layer from plain query, key, value, output and MLP matrices.

    attention: "grouped" heads, or "latent": multi-head latent attention (DeepSeek-V2,
        arXiv:2405.04434).
    qk_norm: a norm on queries and keys, per head ("head") or over all heads ("whole").
    gate: a gate on the attention's output, as wide as the queries, in its own matrix ("own",
        without bias) or in that of the queries ("queries"). sinks: one logit per head.
    gated: the MLP has a gate matrix. norms: norm vectors per layer, of `norm_parts` parts each (2:
        with bias, 0: without parameters). sub_norms: BitNet's norms before the output and the down
        projections.
    layer_extra: further single parameters per layer.
    windows: which layers slide if config.json has no `layer_types`: "all", "none", "pattern" (all
        but every n-th), "alternate" (every second, including the first), or "late" (from
        `max_window_layers` on).
    parallel: every layer has a recurrent mixer in parallel to its attention.
    expert_width: config field with the inner width of one expert; empty: dense. dense_layers:
        config field with the number of leading layers without experts.
    expert_bias, router_bias: as in gpt-oss. balance_bias: one parameter per expert for load
        balancing.
    defaults: transformers' defaults for fields that published config.json files omit.
    """

    attention: Literal["grouped", "latent"] = "grouped"
    qkv_bias: Flag = False
    out_bias: Flag = False
    qk_norm: Literal["", "head", "whole"] = ""
    qk_norm_if: Flag = True
    gate: Literal["", "own", "queries"] = ""
    sinks: bool = False
    gated: bool = True
    mlp_bias: Flag = False
    norms: int = 2
    norm_parts: int = 1
    sub_norms: bool = False
    layer_extra: int = 0
    head_bias: Flag = False
    windows: Literal["all", "none", "pattern", "alternate", "late"] = "none"
    mixer: Literal["", "mamba2", "conv", "delta"] = ""
    parallel: bool = False
    expert_width: str = ""
    dense_layers: str = ""
    expert_bias: bool = False
    router_bias: bool = False
    balance_bias: Flag = False
    defaults: Mapping[str, object] = field(default_factory=dict)


_LLAMA = Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias")
_PLAIN = replace(_LLAMA, mlp_bias=False)
_BARE = Family()
_GPT = Family(qkv_bias=True, out_bias=True, gated=False, mlp_bias=True, norm_parts=2)
_QWEN = replace(_PLAIN, qk_norm="head", windows="late", defaults={"max_window_layers": 28})
_LATENT = replace(_LLAMA, attention="latent")
_TIED = {"tie_word_embeddings": True}
_GEMMA = replace(_PLAIN, defaults={**_TIED, "head_dim": 256, "vocab_size": 256000})
_COHERE = replace(_PLAIN, norms=1, qk_norm="whole", qk_norm_if="use_qk_norm", defaults=_TIED)
_ERNIE = replace(
    _LLAMA, qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", defaults=_TIED
)
_LFM = replace(_BARE, qk_norm="head", mixer="conv", defaults=_TIED)


def _wide(family: Family) -> Family:
    """Return `family` with experts as wide as a dense MLP."""
    return replace(family, expert_width="intermediate_size")


def _narrow(family: Family, dense_layers: str = "") -> Family:
    """Return `family` with experts of their own width, after some dense layers."""
    return replace(family, expert_width="moe_intermediate_size", dense_layers=dense_layers)


FAMILIES: dict[str, Family] = {
    "afmoe": replace(
        _narrow(_PLAIN, "num_dense_layers"),
        qk_norm="head",
        gate="own",
        norms=4,
        balance_bias=True,
        windows="pattern",
    ),
    "apertus": replace(_PLAIN, qk_norm="head", gated=False, layer_extra=2),
    "arcee": replace(_LLAMA, gated=False),
    "bamba": replace(_LLAMA, mixer="mamba2"),
    "bitnet": replace(_PLAIN, sub_norms=True),
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE, qk_norm="", windows="pattern", defaults={**_TIED, "sliding_window_pattern": 4}
    ),
    "cwm": replace(_LLAMA, qkv_bias=False, out_bias=False),
    "deepseek_v2": _narrow(_LATENT, "first_k_dense_replace"),
    "deepseek_v3": _narrow(replace(_LATENT, mlp_bias=False), "first_k_dense_replace"),
    "dots1": _narrow(replace(_PLAIN, qk_norm="head"), "first_k_dense_replace"),
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": replace(_narrow(_ERNIE), balance_bias=True, head_bias="use_bias"),
    "exaone4": replace(
        _BARE, qk_norm="head", windows="pattern", defaults={"sliding_window_pattern": 4}
    ),
    "falcon_h1": replace(_LLAMA, mixer="mamba2", parallel=True),
    "flex_olmo": replace(_wide(_PLAIN), qk_norm="whole"),
    "gemma": _GEMMA,
    "gemma2": replace(
        _GEMMA, norms=4, windows="alternate", defaults={**_GEMMA.defaults, "sliding_window": 4096}
    ),
    "gemma3_text": replace(
        _GEMMA,
        norms=4,
        qk_norm="head",
        windows="pattern",
        defaults={
            **_GEMMA.defaults,
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 131072,
        },
    ),
    "glm": replace(_PLAIN, out_bias=False),
    "glm4": replace(_PLAIN, out_bias=False, norms=4),
    "glm4_moe": _narrow(
        replace(_PLAIN, out_bias=False, qk_norm="head", qk_norm_if="use_qk_norm"),
        "first_k_dense_replace",
    ),
    "glm4_moe_lite": _narrow(replace(_LATENT, mlp_bias=False), "first_k_dense_replace"),
    "gpt2": replace(_GPT, defaults=_TIED),
    "gpt_neox": replace(
        _GPT,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        defaults={"attention_bias": True},
    ),
    "gpt_oss": replace(
        _wide(_PLAIN),
        sinks=True,
        expert_bias=True,
        router_bias=True,
        windows="alternate",
        defaults={"attention_bias": True, "head_dim": 64},
    ),
    "granite": _LLAMA,
    "granite_swa": replace(_LLAMA, sinks=True),
    "granitemoe": _wide(_PLAIN),
    "granitemoehybrid": replace(_wide(_PLAIN), mixer="mamba2"),
    "granitemoeshared": _wide(_PLAIN),
    "helium": replace(_LLAMA, out_bias=False),
    "hunyuan_v1_dense": replace(_PLAIN, qk_norm="head"),
    "hyperclovax": replace(_LLAMA, norms=4),
    "internlm3": _LLAMA,
    "jais2": replace(
        _LLAMA, gated=False, norm_parts=2, defaults={"attention_bias": True, "mlp_bias": True}
    ),
    "lfm2": _LFM,
    "lfm2_moe": _narrow(_LFM, "num_dense_layers"),
    "llama": _LLAMA,
    "mellum": replace(_narrow(_PLAIN), qk_norm="head"),
    "minicpm3": replace(_LATENT, defaults=_TIED),
    "minimax_m2": replace(_wide(_BARE), qk_norm="whole"),
    "ministral": replace(_BARE, windows="all"),
    "ministral3": replace(_BARE, windows="all"),
    "mistral": replace(_BARE, windows="all", defaults={"sliding_window": 4096}),
    "mixtral": replace(_wide(_BARE), windows="all"),
    "nanochat": replace(_PLAIN, gated=False, norm_parts=0),
    "nemotron": replace(_LLAMA, gated=False, norm_parts=2),
    "olmo": replace(_PLAIN, norm_parts=0),
    "olmo2": replace(_PLAIN, qk_norm="whole"),
    "olmo3": replace(_PLAIN, qk_norm="whole", windows="pattern"),
    "olmoe": replace(_wide(_PLAIN), qk_norm="whole"),
    "phi": replace(_GPT, norms=1, head_bias=True),
    "phi3": replace(_BARE, windows="all"),
    "phimoe": replace(_wide(_PLAIN), norm_parts=2, head_bias="lm_head_bias", windows="all"),
    "qwen2": replace(_QWEN, qkv_bias=True, out_bias=False, qk_norm=""),
    "qwen2_moe": replace(
        _narrow(_BARE),
        qkv_bias="qkv_bias",
        defaults={"qkv_bias": True, "num_experts": 60, "num_experts_per_tok": 4},
    ),
    "qwen3": _QWEN,
    "qwen3_moe": replace(_narrow(_QWEN), windows="all"),
    "qwen3_next": replace(
        _narrow(_QWEN),
        gate="queries",
        mixer="delta",
        windows="none",
        defaults={"full_attention_interval": 4},
    ),
    "seed_oss": replace(_LLAMA, out_bias="attention_out_bias"),
    "smollm3": replace(_LLAMA, defaults=_TIED),
    "solar_open": replace(_narrow(_PLAIN), out_bias=False),
    "stablelm": replace(_BARE, qkv_bias="use_qkv_bias", norm_parts=2),
    "starcoder2": replace(
        _GPT,
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        windows="all",
        defaults={**_TIED, "use_bias": True},
    ),
    "vaultgemma": replace(_GEMMA, windows="alternate"),
    "youtu": replace(_LATENT, mlp_bias=False, defaults=_TIED),
}
