"""Sequences longer than the length a model was made for: rotary frequencies by sequence, chunks, temperatures.

The reference is transformers: `generate` where its result does not depend on the cache, and otherwise what it does
from a fresh model. The tiny models were made for 32 tokens, and go up to 128.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from motet_llm.attention.sequence_rope import RopeRule
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.engine.request import Request
from motet_llm.weights import checkpoint
from motet_models.context import trained_context
from motet_shared.errors import ConfigError
from motet_shared.messages import Sampling
from support.families import language_families as families

ORIGINAL = 32
OUTPUT = 20
# Below, across and above the original length; the last one is several times as long.
LENGTHS = (5, 20, 31, 32, 33, 50, 90)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 250, length).tolist()


def engine_of(folder: Path, **options: Any) -> Engine:
    settings: dict[str, Any] = {
        "threads": 1,
        "block_size": 4,
        "num_blocks": 512,
        "token_budget": 16,
    }
    return Engine(EngineConfig(model=str(folder), max_running=8, **(settings | options)))


def answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Return the greedy outputs of prompts that run together."""
    made: dict[int, list[int]] = {key: [] for key in range(len(prompts))}
    for key, prompt in enumerate(prompts):
        engine.add(key, prompt, Sampling(temperature=0, max_tokens=OUTPUT, ignore_eos=True))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            made[output.key] += output.ids  # type: ignore[index]
        engine.check_integrity()
    return list(made.values())


@torch.inference_mode()
def expected(folder: Path, name: str, prompt: list[int], *, use_cache: bool = True) -> list[int]:
    """Return what `generate` of a fresh model gives, whatever would end the reply."""
    reference: PreTrainedModel = families.class_of(name).from_pretrained(folder).float().eval()
    reference.generation_config.eos_token_id = None
    made = reference.generate(
        torch.tensor([prompt]), max_new_tokens=OUTPUT, do_sample=False, use_cache=use_cache
    )
    return made[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    names = ("phi3, longrope", "llama, longrope", "llama, dynamic rope", "Llama4ForCausalLM")
    parent = tmp_path_factory.mktemp("rope")
    return {name: families.write_checkpoint(name, parent / str(i)) for i, name in enumerate(names)}


@pytest.mark.parametrize("name", ["phi3, longrope", "llama, dynamic rope", "Llama4ForCausalLM"])
def test_sequences_of_all_lengths_in_one_batch_are_those_of_generate(
    name: str, folders: dict[str, Path]
) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    found = answers(engine_of(folders[name]), prompts)
    assert found == [expected(folders[name], name, prompt) for prompt in prompts]


def test_a_class_whose_cache_mixes_factors_is_computed_as_without_a_cache(
    folders: dict[str, Path],
) -> None:
    """transformers computes the cache again for Phi-3 alone; with it, Llama mixes keys of both sets."""
    name, prompt = "llama, longrope", prompt_of(25)
    (found,) = answers(engine_of(folders[name]), [prompt])
    assert found == expected(folders[name], name, prompt, use_cache=False)
    assert found != expected(folders[name], name, prompt)


@pytest.mark.parametrize("name", ["phi3, longrope", "llama, dynamic rope", "Llama4ForCausalLM"])
def test_blocks_of_other_frequencies_are_not_shared(name: str, folders: dict[str, Path]) -> None:
    """A prompt whose beginning is cached from a shorter sequence, and the same one once more."""
    engine, long = engine_of(folders[name]), prompt_of(60)
    for prompt in (long[:24], long, long[:30], long, long[:24]):
        assert answers(engine, [prompt]) == [expected(folders[name], name, prompt)]


def test_a_request_is_computed_again_once_when_it_crosses(folders: dict[str, Path]) -> None:
    engine = engine_of(folders["phi3, longrope"])
    answers(engine, [prompt_of(20)])
    assert engine.stats()["rope_switches"] == 1
    answers(engine, [prompt_of(40, 1)])
    assert engine.stats()["rope_switches"] == 1
    assert engine.card().kv_format == ""


@pytest.mark.parametrize("name", ["phi3, longrope", "llama, dynamic rope"])
def test_drafts_change_nothing(name: str, folders: dict[str, Path]) -> None:
    prompts = [prompt_of(length, seed) * 2 for seed, length in enumerate((10, 15, 24))]
    plain = answers(engine_of(folders[name]), prompts)
    for speculate in ("ngram", str(folders[name])):
        options = {"speculate": speculate, "token_budget": 64}
        engine = Engine(
            EngineConfig(
                model=str(folders[name]), threads=1, block_size=4, num_blocks=512, max_running=8,
                always_speculate=True, **options,  # type: ignore[arg-type]
            )
        )  # fmt: skip
        assert answers(engine, prompts) == plain
    assert engine.stats()["accepted_tokens"] > 0


def test_a_small_pool_preempts_and_changes_nothing(folders: dict[str, Path]) -> None:
    for name in ("phi3, longrope", "llama, dynamic rope", "Llama4ForCausalLM"):
        prompts = [prompt_of(length, seed) for seed, length in enumerate((28, 30, 26, 29))]
        whole = engine_of(folders[name])
        blocks = 18 * len(whole.runner.kv.groups)
        engine = engine_of(folders[name], num_blocks=blocks)
        assert answers(engine, prompts) == answers(whole, prompts)
        assert engine.stats()["preemptions"] > 0


def test_chunks_that_are_no_whole_blocks_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError) as raised:
        engine_of(folders["Llama4ForCausalLM"], block_size=12)
    assert raised.value.param == "block_size"


def test_layers_in_chunks_free_the_blocks_of_earlier_ones(folders: dict[str, Path]) -> None:
    engine = engine_of(folders["Llama4ForCausalLM"], prefix_cache=False)
    local = [g for g, group in enumerate(engine.runner.kv.groups) if group.is_local]
    engine.add(0, prompt_of(90), Sampling(temperature=0, max_tokens=8, ignore_eos=True))
    most = 0
    while engine.has_work:
        engine.step()
        for request in engine.scheduler.running:
            null = engine.runner.kv.null_block
            most = max(most, *(sum(b != null for b in request.tables[g]) for g in local))
    assert local
    assert most <= (ORIGINAL + 16) // 4 + 1


# ------------------------------------------------------------------------------------------------------- rules
def longrope(original: int) -> LlamaConfig:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0],
        "long_factor": [2.0],
        "original_max_position_embeddings": original,
    }
    return LlamaConfig(max_position_embeddings=128, head_dim=2, rope_parameters=rope)


def test_a_rule_applies_only_where_sequences_outgrow_it() -> None:
    assert RopeRule.of(longrope(32)) == RopeRule("longrope", 32)
    assert RopeRule.of(longrope(128)) is None
    assert RopeRule.of(LlamaConfig()) is None


def test_keys_and_lengths_of_longrope_change_together() -> None:
    rule = RopeRule("longrope", 32)
    request = Request(0, 0, prompt_of(32), Sampling(), max_length=64)
    assert rule.key(32, 32) == 0
    assert rule.drafts_end(request) == 32
    assert max(rule.lengths(request, 0, 32)) == 32
    request.rope_key = rule.key(32, 33)
    assert min(rule.lengths(request, 0, 33)) == 33
    assert rule.drafts_end(request) is None


def test_a_prompt_beyond_the_original_length_has_a_dynamic_key_of_its_own() -> None:
    rule = RopeRule("dynamic", 32)
    assert [rule.key(prompt, 100) for prompt in (10, 32, 33, 50)] == [0, 0, 33, 50]
    request = Request(0, 0, prompt_of(40), Sampling(), max_length=64)
    assert list(rule.lengths(request, 38, 42)) == [40, 40, 41, 42]


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({}, None),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 40,
                    "original_max_position_embeddings": 4096,
                },
            },
            163840,
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 65536),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 9}}, 65536),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 32768),
        ({"max_sequence_length": 65536, "rope_scaling": {"type": "linear", "factor": 4.0}}, 65536),
        ({"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 4096}, 32768),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 32768),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2}, "sliding_attention": None}}, 65536),
    ],
)  # fmt: skip
def test_the_trained_context_is_read_off_the_config(
    config: dict[str, Any], context: int | None
) -> None:
    if "rope_scaling" in config or "rope_parameters" in config:
        config = {"max_position_embeddings": 32768, **config}
    assert trained_context(config) == context


def test_yarn_reaches_beyond_the_stated_length(tmp_path: Path) -> None:
    """Some configs keep `max_position_embeddings` at the original length."""
    name = "llama, short yarn"
    folder = families.write_checkpoint(name, tmp_path)
    engine, prompt = engine_of(folder), prompt_of(60)
    assert engine.context == 128
    assert answers(engine, [prompt]) == [expected(folder, name, prompt)]


def test_no_more_than_the_trained_context_is_given() -> None:
    with pytest.raises(ConfigError):
        checkpoint.context_of(longrope(32), 200)
