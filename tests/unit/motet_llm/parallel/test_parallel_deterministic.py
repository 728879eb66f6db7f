"""`deterministic` gives the same bits at every degree: logits of one rank and of groups are compared bit by bit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.parallel.collectives import Collectives, add_in_pairs
from motet_llm.parallel.cuts.fixed_tree import TreeLinear, shards_of
from motet_llm.parallel.degrees import Degrees
from motet_llm.weights import checkpoint
from motet_shared.errors import ConfigError
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.checkpoints.lora_folders import make_adapter
from support.engine.rank_families import SMALL
from support.engine.rank_threads import group_engine, threads_of
from support.engine.schedules import random_prompts
from support.families import language_families as families

DEGREES: list[dict[str, Any]] = [
    {"tensor_parallel": 2},
    {"tensor_parallel": 4},
    {"pipeline_parallel": 2},
    {"tensor_parallel": 2, "pipeline_parallel": 2},
]
# Wide enough that whole granules are divided, and that sums in another order have other bits.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 672,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LENGTH = 24


@contextmanager
def engine_of(config: EngineConfig) -> Iterator[Engine]:
    if Degrees.of(config).ranks > 1:
        with group_engine(config) as engine:
            yield engine
        return
    engine = Engine(config)
    yield engine
    engine.close()


def logits(config: EngineConfig, adapters: Sequence[str] = ()) -> Tensor:
    """Return the logits of all tokens of some requests, in the order in which they are computed.

    adapters: names of those that some requests use.
    """
    torch.set_num_threads(1)
    vocab = checkpoint.load_config(Path(config.model)).vocab_size
    with engine_of(config) as engine:
        forward, found = engine.runner.forward, []

        def recorded(*args: Any) -> Any:
            result = forward(*args)
            found.append(result.logits_RV.clone())
            return result

        engine.runner.forward = recorded  # type: ignore[method-assign, assignment]
        bank = engine.runner.adapters
        held: list[Any] = [
            bank.load(name, slot) if bank is not None else None
            for slot, name in enumerate(adapters)
        ]
        for key, prompt in enumerate(random_prompts(random.Random(1), vocab, 4)):
            sampling = Sampling(temperature=0, max_tokens=LENGTH, ignore_eos=True)
            adapter = [*held, None][key % (len(held) + 1)]
            engine.add(key, prompt, sampling, adapter=adapter)
        while engine.has_work:
            engine.step()
    return torch.cat(found)


@pytest.mark.extended("families", after=5)
@pytest.mark.long(after=1)
@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("weights", ["float32", "int8", "bfloat16", "int4"])
def test_the_bits_are_those_of_one_rank(
    weights: str, degrees: dict[str, Any], tmp_path: Path
) -> None:
    folder = tiny_checkpoint("llama", tmp_path, **WIDE)
    settings = SMALL | {"model": str(folder), "weights": weights, "deterministic": True}
    alone = logits(EngineConfig(**settings))
    assert torch.equal(logits(EngineConfig(**settings, **degrees)), alone)


@pytest.mark.long
def test_without_the_setting_the_bits_differ(tmp_path: Path) -> None:
    """The comparison sees what it is for."""
    folder = tiny_checkpoint("llama", tmp_path, **WIDE)
    settings = SMALL | {"model": str(folder), "weights": "float32"}
    alone = logits(EngineConfig(**settings))
    assert not torch.equal(logits(EngineConfig(**settings, tensor_parallel=4)), alone)


@pytest.mark.long
@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM"])
def test_families_have_the_same_bits(name: str, tmp_path: Path) -> None:
    families.write_checkpoint(name, tmp_path)
    settings = SMALL | {"model": str(tmp_path), "deterministic": True}
    alone = logits(EngineConfig(**settings))
    assert torch.equal(logits(EngineConfig(**settings, tensor_parallel=2)), alone)


MIXED: list[dict[str, Any]] = [
    {"tensor_parallel": 2},
    {"expert_parallel": 2},
    {"tensor_parallel": 4},
    {"expert_parallel": 4},
    {"tensor_parallel": 2, "expert_parallel": 2},
    {"expert_parallel": 2, "pipeline_parallel": 2},
]


@pytest.mark.extended("families", after=4)
@pytest.mark.long(after=2)
@pytest.mark.parametrize("degrees", MIXED, ids=str)
@pytest.mark.parametrize("weights", ["float32", "int8", "bfloat16"])
def test_experts_have_the_same_bits_however_they_are_shared(
    weights: str, degrees: dict[str, Any], tmp_path: Path
) -> None:
    families.write_checkpoint("Qwen3MoeForCausalLM", tmp_path)
    settings = SMALL | {"model": str(tmp_path), "weights": weights, "deterministic": True}
    alone = logits(EngineConfig(**settings))
    assert torch.equal(logits(EngineConfig(**settings, **degrees)), alone)


@pytest.mark.extended("families", after=2)
# Shared experts, latents, experts without a gate, interleaved and transposed ones with biases.
@pytest.mark.long
@pytest.mark.parametrize("degrees", [{"tensor_parallel": 2}, {"expert_parallel": 4}], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "MixtralForCausalLM",
        "DeepseekV3ForCausalLM",
        "Qwen2MoeForCausalLM",
        "AriaTextForCausalLM",
        "GptOssForCausalLM",
    ],
)
def test_families_of_experts_have_the_same_bits(
    name: str, degrees: dict[str, Any], tmp_path: Path
) -> None:
    families.write_checkpoint(name, tmp_path)
    settings = SMALL | {"model": str(tmp_path), "weights": "int8", "deterministic": True}
    if name == "GptOssForCausalLM" and "tensor_parallel" in degrees:
        with pytest.raises(ConfigError), engine_of(EngineConfig(**settings, **degrees)):
            pass
        return
    alone = logits(EngineConfig(**settings))
    assert torch.equal(logits(EngineConfig(**settings, **degrees)), alone)


@pytest.mark.extended("families", after=3)
@pytest.mark.long(after=1)
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_adapters_have_the_same_bits(weights: str, degrees: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "base", **WIDE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    given = tuple(
        f"{name}={make_adapter(model, tmp_path / name, seed=seed, r=rank)}"
        for name, seed, rank in (("a", 1, 4), ("b", 2, 9))
    )
    settings = SMALL | {"model": str(folder), "weights": weights, "deterministic": True}
    plain = logits(EngineConfig(**settings))
    adapted = EngineConfig(**settings, adapters=given)
    alone = logits(adapted, ("a", "b"))
    assert not torch.equal(alone, plain)
    assert torch.equal(logits(replace(adapted, **degrees), ("a", "b")), alone)


@pytest.mark.long
def test_threads_do_not_change_the_bits(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path, **WIDE)
    settings = SMALL | {"model": str(folder), "deterministic": True}
    one, two = (logits(EngineConfig(**settings | {"threads": n})) for n in (1, 2))
    assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_are_of_one_tree(ranks: int, shared: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = [(torch.randn(3, 50) * 10**n).to(dtype) for n in range(4)]
    expected = (parts[0] + parts[1]) + (parts[2] + parts[3])
    each = 4 // ranks

    def compute(group: Collectives) -> Tensor:
        own = parts[group.rank * each : (group.rank + 1) * each]
        return group.sum_in_pairs(add_in_pairs(own))

    for found in threads_of(ranks, compute, shared=shared):
        assert torch.equal(found, expected)


def test_one_rank_computes_shards_where_a_group_would(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path, **WIDE)
    engine = Engine(EngineConfig(**SMALL | {"model": str(folder), "deterministic": True}))
    trees = [one for one in engine.runner.model.modules() if isinstance(one, TreeLinear)]
    assert [len(tree.parts) for tree in trees] == [4] * len(trees)
    assert len(trees) == 2 * engine.runner.model.config.num_hidden_layers
    assert engine.runner.fused["layers"] == engine.runner.model.config.num_hidden_layers
    engine.close()


@pytest.mark.parametrize(
    ("name", "shards"),
    [("LlamaForCausalLM", 4), ("GPT2LMHeadModel", 0), ("Qwen3MoeForCausalLM", 4)],
)
def test_the_number_of_shards_is_the_models(name: str, shards: int) -> None:
    assert shards_of(families.variant_config(name)) == shards


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel"),
        ({"expert_parallel": 3}, "expert_parallel"),
    ],
)
def test_groups_without_a_tree_are_refused(
    given: dict[str, Any], field: str, tmp_path: Path
) -> None:
    families.write_checkpoint("LlamaForCausalLM", tmp_path)
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**SMALL | {"model": str(tmp_path), "deterministic": True} | given)
    assert refused.value.param == field


def test_experts_of_another_structure_are_refused_by_a_deterministic_group(tmp_path: Path) -> None:
    families.write_checkpoint("Llama4ForCausalLM", tmp_path)
    settings = SMALL | {"model": str(tmp_path), "deterministic": True}
    with (
        pytest.raises(ConfigError, match="deterministic"),
        group_engine(EngineConfig(**settings, tensor_parallel=2)),
    ):
        pass
