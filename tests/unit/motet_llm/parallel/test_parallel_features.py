"""What requests may ask for, of a group of ranks: adapters, grammars, speculation, scores of prompts, seeds.

Each reply is compared with that of an engine of one rank on the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.engine.outputs import StepOutput
from motet_llm.grammar.grammar import Grammar
from motet_llm.grammar.token_spelling import Spelling
from motet_llm.models.image_embeddings import ImageEmbedding
from motet_shared import messages
from motet_shared.errors import ConfigError
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import EOS, tiny_checkpoint
from support.checkpoints.lora_folders import make_adapter
from support.checkpoints.vlm_checkpoints import tiny_vlm
from support.engine.rank_threads import group_engine
from support.families import language_families as families

PROMPT = [10, 20, 30, 40, 50, 10, 20, 30]
BOUND = 1e-4  # deviation of log-probabilities
DEGREES = [
    {"tensor_parallel": 2},
    pytest.param({"pipeline_parallel": 2}, marks=pytest.mark.long),
    pytest.param({"tensor_parallel": 2, "pipeline_parallel": 2}, marks=pytest.mark.long),
]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "block_size": 4,
    "num_blocks": 100,
    "token_budget": 16,
    "max_running": 8,
    "context": 128,
    "decode_slowdown": 0,
    "packed_cache": 0,
    "collective_timeout": 60.0,
}
Ask = Callable[[Engine], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"))


@contextmanager
def both(folder: Path, degrees: dict[str, Any], **options: Any) -> Iterator[tuple[Engine, Engine]]:
    """Provide an engine of one rank and one of a group, with the same settings."""
    settings = SETTINGS | {"model": str(folder)} | options
    alone = Engine(EngineConfig(**settings))
    with group_engine(EngineConfig(**settings, **degrees)) as group:
        yield alone, group
    alone.close()


def replies(engine: Engine, ask: Ask) -> dict[Hashable, list[StepOutput]]:
    """Return the outputs of the requests that `ask` adds, by their keys."""
    ask(engine)
    found: dict[Hashable, list[StepOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.key, []).append(output)
    engine.check_integrity()
    return found


def ids_of(outputs: list[StepOutput]) -> list[int]:
    assert outputs[-1].error is None
    return [token for output in outputs for token in output.ids]


def logprobs_of(outputs: list[StepOutput]) -> list[float]:
    return [entry.logprob for output in outputs for entry in output.logprobs or []]


def assert_same(alone: Engine, group: Engine, ask: Ask) -> dict[Hashable, list[StepOutput]]:
    due, found = replies(alone, ask), replies(group, ask)
    assert {key: ids_of(outputs) for key, outputs in found.items()} == {
        key: ids_of(outputs) for key, outputs in due.items()
    }
    for key, outputs in found.items():
        assert logprobs_of(outputs) == pytest.approx(logprobs_of(due[key]), abs=BOUND)
    return found


@pytest.mark.parametrize("degrees", DEGREES)
def test_adapters_are_cut_as_their_matrices(
    degrees: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    def load(engine: Engine, name: str, slot: int) -> Any:
        assert engine.runner.adapters is not None
        return engine.runner.adapters.load(name, slot)

    def ask(engine: Engine) -> None:
        held = {name: load(engine, name, slot) for slot, name in enumerate(("a", "b"))}
        for key in ("a", "b", None):
            sampling = Sampling(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0)
            engine.add(key, PROMPT, sampling, adapter=held.get(key or ""))

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    given = tuple(
        f"{name}={make_adapter(model, tmp_path / name, seed=seed, r=rank)}"
        for name, seed, rank in (("a", 1, 4), ("b", 2, 9))
    )
    with both(folder, degrees, adapters=given) as (alone, group):
        found = assert_same(alone, group, ask)
    assert len({tuple(ids_of(outputs)) for outputs in found.values()}) == 3


@pytest.mark.parametrize("degrees", DEGREES)
def test_draws_grammars_and_scores_are_those_of_one_rank(
    degrees: dict[str, Any], folder: Path
) -> None:
    spelling = Spelling.load(str(folder), 259, [EOS])
    text = '{"type":"object","properties":{"age":{"type":"integer"}},"required":["age"]}'
    grammar = Grammar(
        messages.Grammar(kind="json_schema", text=text, param="response_format"), spelling
    )

    def ask(engine: Engine) -> None:
        engine.add("held", PROMPT, Sampling(max_tokens=20, seed=3), grammar_state=grammar.start())
        drawn = Sampling(temperature=1.0, seed=5, max_tokens=12, top_p=0.9, logprobs=2)
        engine.add("drawn", PROMPT, drawn)
        scored = Sampling(temperature=0, max_tokens=3, prompt_logprobs=2, repetition_penalty=1.3)
        engine.add("scored", PROMPT[::-1], scored)

    with both(folder, degrees) as (alone, group):
        found = assert_same(alone, group, ask)
        again = replies(alone, ask)
    ours, due = (_scores(outputs["scored"]) for outputs in (found, again))
    assert len(ours) == len(PROMPT) - 1
    assert ours == pytest.approx(due, abs=BOUND)


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_of_prompt_lookup_are_verified(
    degrees: dict[str, Any], overlap: bool, folder: Path
) -> None:
    def ask(engine: Engine) -> None:
        for key in range(3):
            prompt = [*PROMPT, key] * 3
            engine.add(key, prompt, Sampling(temperature=0, max_tokens=40, logprobs=0))

    options = {"speculate": "ngram", "always_speculate": True, "overlap": overlap}
    with both(folder, degrees, **options) as (alone, group):
        assert_same(alone, group, ask)
        assert group.stats()["drafted_tokens"] > 0


def test_windows_of_full_layers_and_narrow_caches(folder: Path) -> None:
    def ask(engine: Engine) -> None:
        sampling = Sampling(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0)
        engine.add("long", [*PROMPT] * 6, sampling)

    options = {"attention_window": 16, "attention_sinks": 4, "kv_dtype": "int8"}
    with both(folder, {"tensor_parallel": 2}, **options) as (alone, group):
        assert_same(alone, group, ask)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("family", ["llava_clip", "qwen2_5_vl"])
def test_pictures_reach_all_ranks(family: str, tmp_path: Path) -> None:
    """Tokens in a row, and on three axes."""

    def ask(engine: Engine) -> None:
        shape = engine.runner.image_shape
        assert shape is not None
        torch.manual_seed(1)
        shown = ImageEmbedding(torch.randn(shape.layers, 6, shape.hidden) / 4, "a", (1, 2, 3))
        prompt = [*PROMPT, *[shape.placeholders[0]] * 6, *PROMPT]
        sampling = Sampling(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0)
        engine.add("seen", prompt, sampling, images=[shown])
        engine.add("unseen", PROMPT, sampling)

    tiny_vlm(family, tmp_path)
    with both(tmp_path, {"tensor_parallel": 2}) as (alone, group):
        assert_same(alone, group, ask)


def test_pictures_are_refused_where_layers_are_elsewhere(tmp_path: Path) -> None:
    tiny_vlm("llava_clip", tmp_path)
    settings = SETTINGS | {"model": str(tmp_path), "pipeline_parallel": 2}
    with (
        pytest.raises(ConfigError, match=r"^pipeline_parallel=2: .* pictures"),
        group_engine(EngineConfig(**settings)),
    ):
        pass


@pytest.mark.long(after=1)
@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("degrees", [{"tensor_parallel": 2}, {"expert_parallel": 2}])
def test_packed_matrices_and_experts_are_parts_of_the_model(
    weights: str, degrees: dict[str, Any], tmp_path: Path
) -> None:
    """Sums of rounded parts differ from rounded sums: replies stay close, a missing part would not."""
    families.write_checkpoint("Qwen3MoeForCausalLM", tmp_path)

    def ask(engine: Engine) -> None:
        engine.add("scored", PROMPT * 3, Sampling(temperature=0, max_tokens=1, prompt_logprobs=0))

    with both(tmp_path, degrees, weights=weights) as (alone, group):
        due, found = (_scores(replies(engine, ask)["scored"]) for engine in (alone, group))
    assert found == pytest.approx(due, abs=0.5)


def _scores(outputs: list[StepOutput]) -> list[float]:
    return [token.logprob for one in outputs if one.scores for token in one.scores.tokens]
