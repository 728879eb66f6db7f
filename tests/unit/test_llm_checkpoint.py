"""What the engine refuses to load, and that it says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    Gemma3Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
    T5Config,
)

from checkpoints import tiny_checkpoint
from motet_llm import checkpoint
from motet_llm.config import EngineConfig
from motet_llm.engine import Engine
from motet_shared.errors import ConfigError

Weights = dict[str, torch.Tensor]


def load(folder: Path, **settings: Any) -> Engine:
    return Engine(EngineConfig(model=str(folder), threads=1, **settings))


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# -------------------------------------------------------------------------------------------------------------- weights
def drop_norm(weights: Weights) -> None:
    del weights["model.norm.weight"]


def add_bias(weights: Weights) -> None:
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)


def widen_mlp(weights: Weights) -> None:
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(100, 64)


def untie_head(weights: Weights) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (drop_norm, r"missing model\.norm\.weight"),
        (add_bias, r"unknown model\.layers\.0\.self_attn\.q_proj\.bias"),
        (widen_mlp, r"model\.layers\.1\.mlp\.up_proj\.weight is \[100, 64\], not \[96, 64\]"),
        (untie_head, r"tie_word_embeddings=true, but the two matrices differ"),
    ],
)
def test_tensors_that_do_not_fit_are_named(damage: Callable[[Weights], None], complaint: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    damage(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=complaint):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"num_hidden_layers": 1, "layer_types": None}, r"unknown model\.layers\.1\."),
        ({"num_hidden_layers": 3, "layer_types": None}, r"missing model\.layers\.2\."),
        ({"num_hidden_layers": 3}, "must be equal to the number of `layer_types`"),
        ({"num_key_value_heads": 1}, r"k_proj\.weight is \[32, 64\], not \[16, 64\]"),
        ({"quantization_config": {"quant_method": "awq"}}, "its weights are quantized"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "has layers of kind chunked_attention"),
        ({"model_type": "house_made"}, r"not of a model that transformers knows.*house_made"),
    ],
)
def test_a_config_that_contradicts_its_weights_is_refused(
    fields: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("qwen3", tmp_path)
    edit_config(folder, **fields)
    with pytest.raises(ConfigError, match=complaint):
        load(folder)


def test_pickled_weights_are_not_touched(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        load(folder)


def test_torn_weights_are_named(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read.*copy it again"):
        load(tmp_path)


def test_broken_json_is_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(folder)


# ------------------------------------------------------------------------------------------------------- architectures
@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (T5Config(), "'t5' is not supported: it is an encoder-decoder"),
        (MambaConfig(), "'mamba' is not supported: MambaForCausalLM does not take an attention function"),
        (BloomConfig(), "'bloom' is not supported: BloomForCausalLM does not take an attention function"),
        (Qwen3NextConfig(), "'qwen3_next' is not supported: Qwen3NextForCausalLM does not take an attention function"),
        (Gemma3Config(), "'gemma3' is not supported: it is multimodal"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_architectures_that_would_run_wrong_are_refused_by_name(
    config: PreTrainedConfig, complaint: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=complaint):
        load(tmp_path)


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    BertLMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="BertSelfAttention looks at later tokens"):
        load(tmp_path)


# ------------------------------------------------------------------------------------------------------ context, dtype
def rope(kind: str, original: int) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": original}


def test_rope_that_depends_on_the_batch_is_held_to_its_exact_range() -> None:
    config = LlamaConfig(max_position_embeddings=512, rope_parameters=rope("dynamic", 128))
    assert checkpoint.context_of(config, 0) == 128
    with pytest.raises(ConfigError, match="context=200: the model is exact up to 128"):
        checkpoint.context_of(config, 200)
    assert checkpoint.context_of(LlamaConfig(max_position_embeddings=512, rope_parameters=rope("yarn", 128)), 0) == 512


def test_sixteen_bit_weights_run_in_float32_where_the_cpu_has_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(dtype=torch.bfloat16)
    for fast, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda fast=fast: fast)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert checkpoint.resolve_dtype(config, "auto") == expected
    assert checkpoint.resolve_dtype(config, "bfloat16") == torch.bfloat16
    assert checkpoint.resolve_dtype(LlamaConfig(dtype=torch.float16), "auto") == torch.float32


def test_the_pool_is_sized_from_memory(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    block_bytes = 2 * 2 * 2 * 16 * 4 * 8  # layers, keys and values, heads, dim, float32, tokens
    engine = load(folder, kv_memory=10 * block_bytes + 1, block_size=8)
    assert engine.stats()["blocks_total"] == 10
    assert engine.stats()["kv_bytes"] == 11 * block_bytes  # one more block for padding
    with pytest.raises(ConfigError, match=r"kv_memory=100: does not hold one block"):
        load(folder, kv_memory=100)
    assert load(folder, max_running=2, block_size=8).stats()["blocks_total"] == 2 * 512 / 8


def test_eos_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    config = checkpoint.load_config(folder)
    assert checkpoint.eos_ids(folder, config) == {5, 6}
    (folder / "generation_config.json").unlink()
    assert checkpoint.eos_ids(folder, config) == {258}
