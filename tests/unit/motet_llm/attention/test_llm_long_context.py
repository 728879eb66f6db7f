"""Sequences longer than the pool: exact, in bounded memory, beside others; and what happens where tiers fail."""

from __future__ import annotations

import random
import shutil
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from motet_llm.cache.offload import DISK, HOST, Offload
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.engine.outputs import StepOutput
from motet_shared.errors import ConfigError, ContextTooLong, InternalError
from motet_shared.messages import Sampling
from support.engine.schedules import Job, Schedule, random_prompts
from support.families import language_families as families

TIE = 1e-4
SIZE = 4
BUDGET = 8
NUM_BLOCKS = 24
# Plain; a window and soft-capped scores; sinks; latents; recurrent layers.
FAMILIES = (
    "LlamaForCausalLM",
    "Gemma2ForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV2ForCausalLM",
    "Qwen3NextForCausalLM",
)


_opened: list[Engine] = []


@pytest.fixture(autouse=True)
def close_engines() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def engine_of(folder: Path, **settings: Any) -> Engine:
    small: dict[str, Any] = {
        "block_size": SIZE,
        "num_blocks": NUM_BLOCKS,
        "token_budget": BUDGET,
        "max_running": 4,
        "decode_slowdown": 0,
        "threads": 1,
        "dtype": "float32",
        "long_context": True,
        "host_cache": 1 << 20,
    }
    _opened.append(Engine(EngineConfig(model=str(folder), **(small | settings))))
    return _opened[-1]


def run(engine: Engine, steps: int = 10_000) -> dict[Hashable, list[StepOutput]]:
    """Step until nothing is left to do; outputs by request."""
    outputs: dict[Hashable, list[StepOutput]] = {}
    while engine.has_work and steps:
        steps -= 1
        for output in engine.step():
            outputs.setdefault(output.key, []).append(output)
        engine.check_integrity()
    return outputs


def told(outputs: list[StepOutput]) -> list[tuple[int, float]]:
    """Tokens and the exact logarithms of their probabilities."""
    assert outputs[-1].error is None
    entries = (entry for output in outputs for entry in output.logprobs or [])
    return [(entry.id, entry.logprob) for entry in entries]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(families.VOCAB - 3) for _ in range(length)]


def greedy(max_tokens: int) -> Sampling:
    return Sampling(temperature=0, max_tokens=max_tokens, logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return families.write_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@torch.inference_mode()
def check(reference: PreTrainedModel, job: Job) -> None:
    logits = reference(torch.tensor([job.prompt + job.ids])).logits[0, len(job.prompt) - 1 :]
    for row, token, logprob in zip(logits, job.ids, job.logprobs, strict=False):
        assert row.max() - row[token] < TIE
        assert logprob == pytest.approx(float(row.log_softmax(-1)[token]), abs=1e-4)


# ---------------------------------------------------------------------------------------------------------- exactness
@pytest.mark.long(after=2)
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """In a storm of arrivals, cancels, moves and preemptions; with tiers that do not hold two of the longest."""
    torch.set_num_threads(1)
    folder = families.write_checkpoint(name, tmp_path)
    reference = families.class_of(name).from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    host, disk = (
        {"host_cache": nbytes, "disk_cache": more}
        for nbytes, more in ((400 << 10, 0), (20 << 10, 1 << 20))
    )
    engines = [engine_of(folder, **tiers) for tiers in (host, disk)]
    longest = min(engine.context for engine in engines)
    in_pool = engines[0].parts.tables.longest_in_pool
    assert longest > 2 * in_pool
    rng = random.Random(7)
    prompts = random_prompts(rng, families.VOCAB, 5) + [
        prompt_of(in_pool + extra, extra) for extra in (-5, 9, 70)
    ]
    rng.shuffle(prompts)
    jobs = Schedule(engines, 3, prompts).run()
    assert max(len(job.prompt) for job in jobs) > in_pool
    assert all(engine.stats()["spilled_bytes"] == 0 for engine in engines)
    assert sum(engine.stats()["spilled_blocks"] for engine in engines) > 0
    for job in jobs:
        check(reference.eval(), job)


@pytest.mark.long(after=2)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"host_cache": 0, "disk_cache": 1 << 20},
        {"host_cache": 3000, "disk_cache": 1 << 20},
        {"kv_dtype": "int8"},
        {"dtype": "bfloat16"},
        {"speculate": "ngram", "always_speculate": True},
        {"block_size": 16, "token_budget": 40, "num_blocks": 8},
    ],
    ids=str,
)
def test_results_are_those_of_a_pool_that_holds_everything(
    folder: Path, settings: dict[str, Any]
) -> None:
    """Bit for bit, through the prompt and far into the answer."""
    results = []
    for pool in ({}, {"num_blocks": 200, "long_context": False}):
        engine = engine_of(folder, **(settings | pool))
        engine.add(0, prompt_of(45) * 3, greedy(70))
        results.append(told(run(engine)[0]))
        if not pool:
            assert engine.stats()["spilled_blocks"] * engine.config.block_size >= 100
            assert engine.stats()["preemptions"] == 0
    assert results[0] == results[1]
    assert len(results[0]) == 70


def test_an_answer_may_outgrow_the_pool_beside_others(folder: Path) -> None:
    """Whose tokens do not depend on it, nor its on theirs, down to the bit."""
    requests = {"grows": ([1, 2, 3], 130), "short": ([4, 5, 6], 12), "long": (prompt_of(150), 5)}
    alone = {}
    for key, (prompt, count) in requests.items():
        engine = engine_of(folder, num_blocks=200, deterministic=True, long_context=False)
        engine.add(key, prompt, greedy(count))
        alone[key] = told(run(engine)[key])
    engine = engine_of(folder, deterministic=True)
    for key, (prompt, count) in requests.items():
        engine.add(key, prompt, greedy(count))
    together = run(engine)
    assert {key: told(outputs) for key, outputs in together.items()} == alone


def test_others_run_while_one_is_longer_than_the_pool(folder: Path) -> None:
    engine = engine_of(folder)
    engine.add("long", prompt_of(120), greedy(40))
    run(engine, steps=120 // BUDGET + 3)
    engine.add("short", prompt_of(20, 1), greedy(8))
    order = [output.key for _ in range(12) for output in engine.step() if output.finish]
    assert order == ["short"]
    assert engine.stats()["preemptions"] == 0
    stats = engine.stats()
    assert stats["blocks_total"] - stats["blocks_free"] <= NUM_BLOCKS // 2
    assert stats["spilled_bytes"] > 0
    engine.cancel("long")
    engine.check_integrity()
    assert engine.stats()["spilled_bytes"] == 0


def test_the_earlier_one_keeps_the_tiers_where_they_do_not_hold_two(folder: Path) -> None:
    room = engine_of(folder).parts.spill.capacity  # type: ignore[union-attr]
    block = (1 << 20) // room
    engine = engine_of(folder, host_cache=45 * block)
    prompts = {key: prompt_of(100, key) for key in range(3)}
    for key, prompt in prompts.items():
        engine.add(key, prompt, greedy(60))
    together: dict[int, list[StepOutput]] = {key: [] for key in prompts}
    finished = []
    while engine.has_work:
        for output in engine.step():
            together[output.key].append(output)  # type: ignore[index]
            finished += [output.key] if output.finish else []
        engine.check_integrity()
    assert engine.stats()["preemptions"] > 0
    assert finished == [0, 1, 2]
    for key, prompt in prompts.items():
        whole = engine_of(folder, num_blocks=200, long_context=False)
        whole.add(key, prompt, greedy(60))
        assert [token for token, _ in told(run(whole)[key])] == [
            token for token, _ in told(together[key])
        ]


# ------------------------------------------------------------------------------------------------- tiers that fail
def test_a_damaged_file_ends_its_sequence_alone(folder: Path, tmp_path: Path) -> None:
    engine = engine_of(folder, host_cache=0, disk_cache=1 << 20, cache_folder=str(tmp_path))
    engine.add("long", prompt_of(120), greedy(40))
    run(engine, steps=120 // BUDGET + 1)
    engine.add("short", [1, 2, 3], greedy(10))
    path = next(tmp_path.glob("*/*.spilled"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    outputs = run(engine)
    error = outputs["long"][-1].error
    assert isinstance(error, InternalError)
    assert "cannot be read back from disk_cache" in error.message
    assert len(told(outputs["short"])) == 10
    assert (engine.stats()["spilled_bytes"], list(tmp_path.glob("*/*.spilled"))) == (0, [])
    assert engine.stats()["blocks_free"] == NUM_BLOCKS


def test_a_disk_that_takes_nothing_ends_the_sequence(folder: Path, tmp_path: Path) -> None:
    engine = engine_of(folder, host_cache=0, disk_cache=1 << 20, cache_folder=str(tmp_path))
    shutil.rmtree(next(tmp_path.iterdir()))
    engine.add("long", prompt_of(120), greedy(40))
    engine.add("short", [1, 2, 3], greedy(10))
    outputs = run(engine)
    (failed,) = outputs["long"]
    assert isinstance(failed.error, InternalError)
    assert "cannot be written to disk_cache" in failed.error.message
    assert len(told(outputs["short"])) == 10
    assert engine.stats()["blocks_free"] == NUM_BLOCKS


def test_copies_of_other_prompts_give_way(tmp_path: Path) -> None:
    dropped: list[Hashable] = []
    offload = Offload(30, 20, folder=tmp_path, on_drop=dropped.append)
    for key in range(4):
        offload.store(key, lambda: torch.zeros(10, dtype=torch.uint8))
    assert (offload.host_bytes, offload.disk_bytes, dropped) == (30, 10, [])
    offload.reserve(HOST, 20)
    assert (offload.host_bytes, offload.disk_bytes, dropped) == (10, 20, [0])
    offload.reserve(DISK, 15)
    assert (offload.host_bytes, offload.disk_bytes, dropped) == (10, 0, [0, 1, 2])
    with pytest.raises(InternalError, match="10"):
        offload.reserve(HOST, 11)
    offload.unreserve(HOST, 20)
    assert offload.unreserved(HOST) == 30
    offload.close()


# ------------------------------------------------------------------------------------------------------------ limits
def test_the_tiers_bound_the_context(folder: Path) -> None:
    block = (1 << 20) // engine_of(folder).parts.spill.capacity  # type: ignore[union-attr]
    engine = engine_of(folder, host_cache=30 * block)
    assert NUM_BLOCKS * SIZE < engine.context < (NUM_BLOCKS + 30) * SIZE
    with pytest.raises(ContextTooLong, match=rf"{engine.context} \(24 .*4 .*30"):
        engine.add("a", prompt_of(engine.context + 1), greedy(1))
    with pytest.raises(ContextTooLong, match=r"96 \(24 .*4\)"):
        engine.add("a", prompt_of(97), greedy(1), send_from=0)
    engine.add("a", prompt_of(engine.context - 1), greedy(10))
    outputs = run(engine)["a"]
    assert (len(told(outputs)), outputs[-1].finish) == (1, "length")


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"host_cache": 0}, "long_context"),
        ({"attention_window": 8, "attention_sinks": 4}, "long_context"),
        ({"attention_budget": 64}, "long_context"),
        ({"contiguous_kv": True}, "long_context"),
        ({"token_budget": 512}, "num_blocks"),
        ({"num_blocks": 0, "kv_memory": 40 << 10}, "kv_memory"),
    ],
)
def test_what_does_not_go_together_is_refused(
    folder: Path, settings: dict[str, Any], param: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        engine_of(folder, **settings)
    assert raised.value.param == param
