"""Derive the config of Gemma's generations from the metadata of a GGUF file.

llama.cpp has the scale of queries, the pattern of windows and the inner rotary base in its code.
"""

from __future__ import annotations

from typing import Any

from .header import Header

_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # whose queries are scaled by hidden size and heads
_PERIOD = 6  # Gemma 3: one layer of six attends to the whole sequence
_INNER_BASE = 10000.0


def gemma(header: Header) -> dict[str, Any]:
    return {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}


def gemma2(header: Header) -> dict[str, Any]:
    return {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "query_pre_attn_scalar": _query_scalar(header),
        "sliding_window": header.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": header.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.get("final_logit_softcapping", 30.0),
    }


def gemma3(header: Header) -> dict[str, Any]:
    layers = header.need("block_count")
    outer = {"rope_type": "default", "rope_theta": header.get("rope.freq_base", 1000000.0)}
    if header.get("rope.scaling.type") == "linear":
        outer |= {"rope_type": "linear", "factor": header.need("rope.scaling.factor")}
    inner = {"rope_type": "default"}
    inner_base = {"rope_theta": header.get("rope.freq_base_swa", _INNER_BASE)}
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "query_pre_attn_scalar": _query_scalar(header),
        "sliding_window": header.need("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (layer + 1) % _PERIOD else "full_attention"
            for layer in range(layers)
        ],
        "final_logit_softcapping": header.get("final_logit_softcapping"),
        "rope_parameters": {"sliding_attention": inner | inner_base, "full_attention": outer},
    }


def _query_scalar(header: Header) -> int:
    if header.need("block_count") == _LAYERS_OF_27B[header.architecture]:
        return int(header.need("embedding_length") // header.need("attention.head_count"))
    return int(header.need("attention.key_length"))
