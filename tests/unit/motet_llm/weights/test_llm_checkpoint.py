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
    DeepseekV32Config,
    Gemma4UnifiedAssistantConfig,
    LlamaConfig,
    PreTrainedConfig,
    T5Config,
    TrOCRConfig,
    conversion_mapping,
)

from motet_kernels.runtime.device import find_dtype
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.weights import checkpoint
from motet_shared.errors import ConfigError
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.families import language_families as families
from support.running.refusals import refuses

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
    ("damage", "named"),
    [
        (drop_norm, r"model\.norm\.weight"),
        (add_bias, r"model\.layers\.0\.self_attn\.q_proj\.bias"),
        (widen_mlp, r"model\.layers\.1\.mlp\.up_proj\.weight .*\[100, 64\].*\[96, 64\]"),
        (untie_head, "tie_word_embeddings"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    damage: Callable[[Weights], None], named: str, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    damage(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=named):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_hidden_layers": 1, "layer_types": None}, r"model\.layers\.1\."),
        ({"num_hidden_layers": 3, "layer_types": None}, r"model\.layers\.2\."),
        ({"num_hidden_layers": 3}, "layer_types"),
        ({"num_key_value_heads": 1}, r"k_proj\.weight .*\[32, 64\].*\[16, 64\]"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            r"quantization_config\.quant_method='hqq'",
        ),
        (
            {"layer_types": ["full_attention", "chunked_attention"]},
            "model_type='qwen3'",
        ),
        ({"model_type": "house_made"}, "house_made"),
    ],
)
def test_a_config_that_contradicts_its_weights_is_refused(
    fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("qwen3", tmp_path)
    edit_config(folder, **fields)
    with pytest.raises(ConfigError, match=named):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"num_attention_heads": 0},
            r"config\.json: num_attention_heads=0",
        ),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None},
            "heads",
        ),
        (
            {"num_attention_heads": 3},
            "num_key_value_heads=2.*num_attention_heads=3",
        ),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
        ({"hidden_act": "nope"}, "LlamaForCausalLM.*'nope'"),
        (
            {"rope_parameters": {"rope_type": "nope"}},
            "LlamaForCausalLM.*'nope'",
        ),
        ({"dtype": "float13"}, "float13"),
        ({"vocab_size": 300}, r"embed_tokens\.weight .*\[259, 64\].*\[300, 64\]"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, r"config\.json"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_makes_no_sense_is_refused(
    fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    edit_config(folder, **fields)
    with pytest.raises(ConfigError, match=named):
        load(folder)


def test_loading_finds_the_rules_for_names_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.prepare_renaming()

    def compile_again() -> None:
        raise AssertionError("transformers compiles its rules for names a second time")

    monkeypatch.setattr(conversion_mapping, "_build_checkpoint_conversion_mapping", compile_again)
    folder = tiny_checkpoint("llama", tmp_path)
    model = checkpoint.load_model(folder, checkpoint.load_config(folder), torch.float32)
    weights = load_file(folder / "model.safetensors")
    assert torch.equal(model.get_input_embeddings().weight, weights["model.embed_tokens.weight"])


def test_files_of_a_checkpoint_in_parts_are_all_there(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = dict.fromkeys(weights, "model-1.safetensors") | {
        "model.norm.weight": "model-2.safetensors"
    }
    for part in sorted(set(parts.values())):
        own = {name: weights[name] for name in weights if parts[name] == part}
        save_file(own, folder / part, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    load(folder)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-2\.safetensors"):
        load(folder)
    index.write_text("{")
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_tensors_are_refused_though_the_config_says_nothing(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        load(folder)


def test_a_broken_generation_config_is_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        load(folder)


def test_pickled_weights_are_not_touched(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"\*\.safetensors"):
        load(folder)


def test_torn_weights_are_named(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load(tmp_path)


def test_broken_json_is_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(folder)


# ------------------------------------------------------------------------------------------------------- architectures
@pytest.mark.parametrize(
    ("config", "named"),
    [
        (T5Config(), "model_type='t5'"),
        (
            Gemma4UnifiedAssistantConfig(),
            "shared_kv_states",
        ),
        (DeepseekV32Config(), "indexed_attention"),
        (TrOCRConfig(), "TrOCRForCausalLM"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_what_config_json_tells_is_refused_before_weights_are_read(
    config: PreTrainedConfig, named: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=named):
        load(tmp_path, context=64)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("BloomForCausalLM", "BloomForCausalLM"),
        ("DiffLlamaForCausalLM", "layer 0"),
        ("DogeForCausalLM", "model_type='doge'"),
        ("MambaForCausalLM", "model_type='mamba'"),
        ("MiniMaxForCausalLM", "model_type='minimax'"),
        (
            "MoshiForCausalLM",
            "12 .*layer 0",
        ),
        ("ZayaForCausalLM", "ZayaCCAProjection"),
    ],
)
def test_code_that_would_run_wrong_is_refused_by_its_cause(
    name: str, named: str, tmp_path: Path
) -> None:
    folder = families.write_checkpoint(name, tmp_path)
    with pytest.raises(ConfigError, match=named):
        load(folder, context=64)


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("BertLMHeadModel", {"is_decoder": False}, "BertSelfAttention"),
        (
            "GemmaForCausalLM",
            {"use_bidirectional_attention": True},
            "model_type=",
        ),
        (
            "Gemma4ForCausalLM",
            {"use_bidirectional_attention": "all"},
            "model_type=",
        ),
    ],
)
def test_a_field_of_the_config_can_make_a_family_inexact(
    name: str, fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = families.write_checkpoint(name, tmp_path)
    edit_config(folder, **fields)
    with pytest.raises(ConfigError, match=named):
        load(folder)


# ------------------------------------------------------------------------------------------------------ context, dtype
def rope(kind: str, original: int) -> dict[str, Any]:
    return {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": original,
    }


def test_the_context_is_the_trained_one() -> None:
    config = LlamaConfig(max_position_embeddings=512, rope_parameters=rope("dynamic", 128))
    assert checkpoint.context_of(config, 0) == 2048
    with pytest.raises(ConfigError, match="context=4096: the model is exact up to 2048"):
        checkpoint.context_of(config, 4096)
    config = LlamaConfig(max_position_embeddings=512, rope_parameters=rope("yarn", 128))
    assert checkpoint.context_of(config, 0) == 512


def test_what_auto_stands_for() -> None:
    configs = [LlamaConfig(dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    wide, bf16, _ = configs
    cpu, float32 = torch.device("cpu"), torch.float32
    assert [find_dtype("auto", c.dtype, cpu) for c in configs] == [float32] * 3
    assert find_dtype("bfloat16", wide.dtype, cpu) == torch.bfloat16
    kinds = [checkpoint.resolve_kv_dtype(c, "auto", float32, cpu) for c in configs]
    assert kinds == [float32, torch.bfloat16, float32]
    assert checkpoint.resolve_kv_dtype(bf16, "float32", float32, cpu) == float32
    assert [checkpoint.resolve_weights(c, "auto", float32, cpu) for c in configs] == [
        "float32",
        "bfloat16",
        "float32",
    ]
    assert checkpoint.resolve_weights(wide, "int8", float32, cpu) == "int8"


def test_the_pool_is_sized_from_memory(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    block_bytes = 2 * 2 * 2 * 16 * 4 * 8  # layers, keys and values, heads, dim, float32, tokens
    engine = load(folder, kv_memory=11 * block_bytes + 1, block_size=8)  # one pads block tables
    assert engine.stats()["blocks_total"] == 10
    assert engine.stats()["kv_bytes"] == 11 * block_bytes  # one more block for padding
    with refuses(ConfigError, "kv_memory"):
        load(folder, kv_memory=100)
    assert load(folder, max_running=2, block_size=8).stats()["blocks_total"] == 2 * 512 / 8


def test_eos_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    config = checkpoint.load_config(folder)
    assert checkpoint.eos_ids(folder, config) == {5, 6}
    (folder / "generation_config.json").unlink()
    assert checkpoint.eos_ids(folder, config) == {258}
