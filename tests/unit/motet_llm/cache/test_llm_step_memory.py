"""Steps that are replayed say what steps say that are not, whoever comes, goes and is moved meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from motet_kernels.runtime import native
from motet_llm.config import EngineConfig
from motet_llm.engine import step_memory
from motet_llm.engine.engine import Engine
from motet_llm.engine.outputs import StepOutput
from motet_llm.engine.step_memory import MAX_ROWS, MAX_TOKENS, padded
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import tiny_checkpoint

LENGTHS = (3, 9, 17, 30, 5, 12)  # of the prompts; one arrives every fifth step


def said(
    folder: Path, *, period: int = 250, block_size: int = 4, num_blocks: int = 96, **settings: Any
) -> tuple[Engine, list[Any]]:
    """An engine that was run, and the tokens and log-probabilities of each of its requests."""
    config = {
        "threads": 1,
        "token_budget": 32,
        "max_running": 6,
        "decode_slowdown": 0.0,
        "prefix_cache": False,
    }
    engine = Engine(
        EngineConfig(
            model=str(folder), block_size=block_size, num_blocks=num_blocks, **(config | settings)
        )
    )
    answers: list[list[Any]] = [[] for _ in LENGTHS]
    arrived = steps = 0
    while engine.has_work or arrived < len(LENGTHS):
        if arrived < len(LENGTHS) and steps % 5 == 0:
            sampling = Sampling(
                max_tokens=8 + 7 * arrived, temperature=0, ignore_eos=True, logprobs=0
            )
            engine.add(
                arrived,
                [(13 * (i % period) + arrived) % 250 for i in range(LENGTHS[arrived])],
                sampling,
            )
            arrived += 1
        for output in engine.step():
            assert output.error is None
            assert isinstance(output.key, int)
            answers[output.key] += [(entry.id, entry.logprob) for entry in output.logprobs or []]
        steps += 1
        assert steps < 500
    return engine, answers


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_replayed_steps_say_the_same(
    family: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(family, tmp_path)
    engine, answers = said(folder, weights=weights)
    exact, sizes = kept(engine)
    assert exact == {(1,) * rows for rows in range(1, 5)}
    assert sizes  # of steps in which prompts are computed
    monkeypatch.setattr(step_memory, "MAX_ROWS", 0)
    plain, expected = said(folder, weights=weights)
    assert not plain.runner._memories
    assert answers == expected  # to the bit, log-probabilities too


def kept(engine: Engine) -> tuple[set[tuple[int, ...]], set[int]]:
    """The token counts of rows, and the padded numbers of tokens, of which there are recordings."""
    keys = [key for key, _ in engine.runner._memories]
    exact = {key for key in keys if isinstance(key, tuple)}
    return exact, {key for key in keys if isinstance(key, int)}


@pytest.mark.parametrize(
    "settings", [{"kv_dtype": "int8"}, {"kv_dtype": "bfloat16"}, {"weights": "bfloat16"}]
)
def test_padding_changes_nothing(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts whose chunks are beside streams, in several rows and of any length."""
    folder = tiny_checkpoint("qwen3", tmp_path)
    engine, answers = said(folder, token_budget=13, **settings)
    _, sizes = kept(engine)
    assert len(sizes) >= 2
    assert max(sizes) >= 13
    assert not engine.runner.kv.rows(0)[engine.runner.kv.null_block].any()
    assert not engine.stats()["failed_steps"]
    monkeypatch.setattr(step_memory, "MAX_ROWS", 0)
    assert answers == said(folder, token_budget=13, **settings)[1]  # to the bit


def test_streams_with_drafts_are_padded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint("qwen3", tmp_path)
    drafts: dict[str, Any] = {
        "period": 4,
        "speculate": "ngram",
        "draft_tokens": 5,
        "always_speculate": True,
    }
    engine, answers = said(folder, **drafts)
    assert len(kept(engine)[1]) >= 3
    monkeypatch.setattr(step_memory, "MAX_ROWS", 0)
    plain, expected = said(folder, **drafts)
    assert plain.stats()["drafted_tokens"] == engine.stats()["drafted_tokens"] > 0
    assert answers == expected


def test_a_size_is_at_most_an_eighth_more() -> None:
    sizes = {padded(tokens) for tokens in range(1, 1025)}
    assert len(sizes) <= 60
    for tokens in range(1, 1025):
        assert 0 <= padded(tokens) - tokens < max(4, tokens / 8)
        assert padded(padded(tokens)) == padded(tokens)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_a_stream_with_drafts_is_replayed_by_their_length(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(family, tmp_path)
    drafts: dict[str, Any] = {
        "period": 4,
        "speculate": "ngram",
        "draft_tokens": 9,
        "always_speculate": True,
        "max_running": 1,
    }
    engine, answers = said(folder, **drafts)
    exact, _ = kept(engine)
    assert {(1,)} < exact <= {(count,) for count in range(1, MAX_TOKENS + 1)}
    monkeypatch.setattr(step_memory, "MAX_ROWS", 0)
    plain, expected = said(folder, **drafts)
    assert not plain.runner._memories
    assert plain.stats()["drafted_tokens"] == engine.stats()["drafted_tokens"]
    assert answers == expected  # to the bit, log-probabilities too


def test_requests_that_lose_their_blocks_are_replayed_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint("qwen3", tmp_path)
    engine, answers = said(folder, num_blocks=24)
    assert engine.stats()["preemptions"] > 0
    monkeypatch.setattr(step_memory, "MAX_ROWS", 0)
    assert answers == said(folder, num_blocks=24)[1]


def test_a_profile_sees_every_kernel(tmp_path: Path) -> None:
    """A replayed step would be a single call to it."""
    folder = tiny_checkpoint("qwen3", tmp_path)
    with native.named_calls():
        engine, _ = said(folder)
    assert not engine.runner._memories


def test_recordings_of_all_layers_and_row_counts_share_their_memory(tmp_path: Path) -> None:
    runner = said(tiny_checkpoint("qwen3", tmp_path))[0].runner
    tapes = [
        (index, memory._tapes[index].result)
        for memory in runner._memories.values()
        for index in sorted(memory._tapes)
    ]
    assert len({index for index, _ in tapes}) >= 2
    storages = {(index % 2, result.untyped_storage().data_ptr()) for index, result in tapes}
    assert len(storages) == 2


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
def test_as_many_rows_as_run_by_default_are_replayed(weights: str, tmp_path: Path) -> None:
    """From 64 rows on, a gated MLP is another kernel."""
    config = EngineConfig(
        model=str(tiny_checkpoint("qwen3", tmp_path)), weights=weights, threads=1, block_size=4,
        num_blocks=300, token_budget=256, max_running=64,
    )  # fmt: skip
    engine = Engine(config)
    said: dict[object, list[int]] = {}
    for key in range(MAX_ROWS):
        engine.add(key, [key, 3, 5], Sampling(max_tokens=6, temperature=0, ignore_eos=True))
        said[key] = []
    alone = Engine(config)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            said[output.key] += output.ids
    assert ((1,) * MAX_ROWS, False) in engine.runner._memories
    assert engine.stats()["failed_steps"] == 0
    for key in (0, MAX_ROWS - 1):
        alone.add(0, [key, 3, 5], Sampling(max_tokens=6, temperature=0, ignore_eos=True))
        ids = [id_ for output in iter_steps(alone) for id_ in output.ids]
        assert ids == said[key]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_whole_chunks_of_a_long_prompt_are_replayed(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks at other places of a prompt, and of other prompts, are the same recording."""
    folder, told = tiny_checkpoint(family, tmp_path), []
    for replayed in (True, False):
        config = EngineConfig(
            model=str(folder), threads=1, block_size=4, num_blocks=200, token_budget=32,
            max_running=8, prefix_cache=False,
        )  # fmt: skip
        engine = Engine(config)
        if not replayed:
            monkeypatch.setattr(step_memory, "MAX_ROWS", 0)
        for key in range(2):
            prompt = [(7 * i + 3 * key) % 250 for i in range(110)]
            engine.add(
                key, prompt, Sampling(max_tokens=4, ignore_eos=True, temperature=0, logprobs=0)
            )
            told += [
                (output.key, entry.id, entry.logprob)
                for output in iter_steps(engine)
                for entry in output.logprobs or []
            ]
        assert ((32, False) in engine.runner._memories) is replayed
    assert len(told) == 16
    assert told[:8] == told[8:]  # to the bit, log-probabilities too


def iter_steps(engine: Engine) -> Iterator[StepOutput]:
    while engine.has_work:
        yield from engine.step()


def test_a_model_on_its_twins_is_not_replayed(tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3", tmp_path)
    native.select("off")
    try:
        engine, _ = said(folder)
    finally:
        native.select("")
    assert not engine.runner._memories


def test_another_cache_has_steps_of_its_own(tmp_path: Path) -> None:
    runner = said(tiny_checkpoint("qwen3", tmp_path))[0].runner
    own = runner._memories
    with runner.other_caches(2, 16):
        assert not runner._memories
    assert runner._memories is own
