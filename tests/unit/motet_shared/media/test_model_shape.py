"""Counts from config.json against the models that transformers builds, and against what is known of public ones."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from motet_models.capacity import KV_FORMATS
from motet_models.model_config import count_safetensors, model_shape, read_config
from motet_models.model_families import FAMILIES
from motet_shared.errors import ConfigError
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.peers.public_models import KNOWN
from support.running.refusals import refuses

SMALL: dict[str, Any] = {
    "vocab_size": 4000,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "moe_intermediate_size": 48,
    "moe_layer_end_index": 4,
    "n_shared_experts": 2,
    "mamba_n_heads": 6,
    "mamba_d_head": 32,
    "mamba_d_ssm": 192,
    "mamba_d_state": 16,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "small": {},
    "tied, dense first": {
        "head_dim": 16, "tie_word_embeddings": True, "first_k_dense_replace": 2, "num_dense_layers": 2,
        "attn_layer_indices": [2],
    },
    "with every bias": {
        "attention_bias": True, "mlp_bias": True, "use_bias": True, "lm_head_bias": True, "use_qk_norm": True,
        "qkv_bias": True, "use_qkv_bias": True, "tie_word_embeddings": False, "q_lora_rank": None,
        "num_experts_per_tok": 2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2,
        "mamba_proj_bias": True, "mamba_rms_norm": True, "conv_bias": True, "mlp_only_layers": [1],
        "decoder_sparse_step": 2, "shared_intermediate_size": 32,
    },
}  # fmt: skip
# Where the defaults of transformers do not make a model, or one that nobody would build.
NEEDED: dict[str, dict[str, Any]] = {
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16},
}


def config_of(family: str, values: dict[str, Any]) -> PreTrainedConfig:
    """Of the family's class, with those of the values that it knows."""
    config_class = CONFIG_MAPPING[family]
    known = {field.name for field in fields(config_class)} | set(config_class.attribute_map)
    return config_class(
        **{key: value for key, value in values.items() if key in known} | NEEDED.get(family, {})
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_model_that_transformers_builds(
    family: str, variant: str
) -> None:
    config = config_of(family, {**SMALL, **VARIANTS[variant]})
    with torch.device("meta"):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    shape = model_shape(json.loads(config.to_json_string()))
    counts = shape.parameters
    assert counts.total == model.num_parameters()
    assert len(shape.layers) == config.num_hidden_layers
    table = model.get_input_embeddings().weight
    assert counts.tied == (model.get_output_embeddings().weight is table)
    others = (
        p for n, p in model.named_parameters() if p.ndim > 1 and p is not table and "wpe" not in n
    )
    small = 0.02  # matrices that are counted with the vectors, such as convolutions, and biases of experts
    assert counts.matrices - counts.tied * table.numel() == pytest.approx(
        sum(p.numel() for p in others), rel=small
    )


@pytest.mark.parametrize("name", KNOWN)
def test_published_totals(name: str) -> None:
    total, active, kv_bytes_per_token, config = KNOWN[name]
    shape = model_shape(config)
    assert shape.parameters.total == pytest.approx(total, rel=0.01)
    assert shape.parameters.active == pytest.approx(active, rel=0.01)
    assert sum(map(KV_FORMATS["bfloat16"].token_bytes, shape.layers)) == kv_bytes_per_token


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("Gemma-3-27B", [1024, 1024, 1024, 1024, 1024, None] * 10 + [1024, 1024]),
        ("GPT-OSS-20B", [128, None] * 12),
        ("Qwen3-0.6B", [None] * 28),
    ],
)
def test_windows_where_the_config_lists_no_layer_types(
    name: str, windows: list[int | None]
) -> None:
    assert [layer.window for layer in model_shape(KNOWN[name][3]).layers] == windows


def test_an_unknown_family_is_counted_from_safetensors_or_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "m")
    config = read_config(folder)
    known = model_shape(config).parameters
    assert count_safetensors(folder) == known.total
    counted = model_shape({**config, "model_type": "novel"}, folder).parameters
    assert (counted.total, counted.embeddings, counted.tied) == (
        known.total,
        known.embeddings,
        True,
    )
    with refuses(ConfigError, "model_type"):
        model_shape({**config, "model_type": "novel"})
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        model_shape({**config, "model_type": "novel"}, folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size=None.*'qwen3'"),
        ({"num_hidden_layers": "28"}, "num_hidden_layers='28'"),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"num_attention_heads": 0}, "model_type='qwen3'"),
        ({"is_encoder_decoder": True}, "model_type='qwen3'"),
        ({"layer_types": ["linear_attention"] * 28}, "'linear_attention'"),
    ],
)
def test_fields_that_make_no_sense_are_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        model_shape({**KNOWN["Qwen3-0.6B"][3], **change})


@pytest.mark.parametrize(
    ("text", "named"),
    [("{", r"config\.json"), ("[]", "model_type"), (None, r"config\.json")],
)
def test_a_folder_without_a_config_is_refused(tmp_path: Path, text: str | None, named: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_config(tmp_path)
