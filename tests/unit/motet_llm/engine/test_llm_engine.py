"""The engine through its public face, on a tiny model: endings, limits, credit, cancels, moves, faults."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.engine.outputs import StepOutput
from motet_llm.scheduling.step_time import StepTimeEstimate
from motet_llm.weights import checkpoint
from motet_shared.errors import (
    BadRequest,
    ConfigError,
    ContextTooLong,
    DeadlineExceeded,
    InternalError,
    Overloaded,
)
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import VOCAB, tiny_checkpoint

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
PROMPT = [10, 20, 30, 40, 50]
IDLE_SECONDS = 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("tiny-qwen3"))


@pytest.fixture
def engine(folder: Path) -> Engine:
    return make_engine(folder)


def make_engine(folder: Path, **settings: Any) -> Engine:
    defaults = {
        "threads": 1,
        "block_size": 4,
        "num_blocks": 64,
        "token_budget": 32,
        "max_running": 8,
    }
    return Engine(EngineConfig(model=str(folder), **{**defaults, **settings}))


def run(engine: Engine, steps: int = 10_000) -> dict[Hashable, list[StepOutput]]:
    """Step until nothing is left to do; outputs by request."""
    outputs: dict[Hashable, list[StepOutput]] = {}
    while engine.has_work and steps:
        steps -= 1
        for output in engine.step():
            outputs.setdefault(output.key, []).append(output)
        engine.check_integrity()
    return outputs


def ids_of(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.ids]


def generate(
    engine: Engine, prompt: list[int] = PROMPT, output: tuple[int, ...] = (), **sampling: Any
) -> list[int]:
    engine.add("alone", prompt, Sampling(**sampling), output=output)
    return ids_of(run(engine)["alone"])


# -------------------------------------------------------------------------------------------------------------- endings
def test_the_last_output_says_why_what_and_how_long(engine: Engine) -> None:
    engine.add("a", PROMPT, Sampling(max_tokens=5, **GREEDY))
    outputs = run(engine)["a"]
    assert [len(output.ids) for output in outputs] == [1] * 5
    last = outputs[-1]
    assert last.finish == "length"
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 5)
    assert last.timing is not None
    assert set(last.timing) == {"queue", "prefill", "decode", "model"}
    assert 0 < last.timing["model"] <= last.timing["prefill"] + last.timing["decode"]
    assert all(output.finish is output.usage is output.timing is None for output in outputs[:-1])


def test_a_stop_token_ends_and_is_not_emitted(engine: Engine) -> None:
    free = generate(engine, max_tokens=12, **GREEDY)
    stop = free[6]
    engine.add("a", PROMPT, Sampling(max_tokens=12, stop_token_ids=[stop], **GREEDY))
    outputs = run(engine)["a"]
    assert outputs[-1].finish == "stop"
    assert ids_of(outputs) == free[: free.index(stop)]


def test_the_model_s_eos_ends_unless_ignored(folder: Path) -> None:
    engine = make_engine(folder)
    eos = generate(engine, max_tokens=1, **GREEDY)[0]
    engine.runner.eos_ids = frozenset({eos})
    assert generate(engine, max_tokens=3, temperature=0) == []
    assert len(generate(engine, max_tokens=3, **GREEDY)) == 3
    assert len(generate(engine, max_tokens=3, temperature=0, min_tokens=3)) == 3


def test_bfloat16_computes_the_same_up_to_its_precision(folder: Path) -> None:
    logprobs = []
    for dtype in ("float32", "bfloat16"):
        engine = make_engine(folder, dtype=dtype)
        engine.add("a", PROMPT, Sampling(max_tokens=1, logprobs=5, **GREEDY))
        (output,) = run(engine)["a"]
        assert output.logprobs is not None
        logprobs.append(dict(output.logprobs[0].top))
    both = logprobs[0].keys() & logprobs[1].keys()
    assert len(both) >= 3
    assert all(abs(logprobs[0][token] - logprobs[1][token]) < 0.3 for token in both)


def test_generation_ends_at_the_end_of_the_context(folder: Path) -> None:
    engine = make_engine(folder, context=12)
    assert engine.card().context == 12
    engine.add("a", PROMPT, Sampling(max_tokens=100, **GREEDY))
    outputs = run(engine)["a"]
    assert len(ids_of(outputs)) == 7
    assert outputs[-1].finish == "length"


def test_the_pool_bounds_the_context_and_a_full_pool_still_ends(folder: Path) -> None:
    engine = make_engine(folder, num_blocks=4)
    assert engine.card().context == 16
    for key in range(3):
        engine.add(key, PROMPT, Sampling(max_tokens=100, **GREEDY))
    results = run(engine)
    assert [len(ids_of(results[key])) for key in range(3)] == [11] * 3
    assert engine.stats()["preemptions"] > 0


# ------------------------------------------------------------------------------------------------------ moves, seeds
@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_move_continues_the_same_random_answer(folder: Path, cut: int) -> None:
    sampling: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 0.95,
        "seed": 99,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "max_tokens": 12,
    }
    whole = generate(make_engine(folder), **sampling)
    other = make_engine(folder, block_size=16, token_budget=8)
    assert generate(other, output=tuple(whole[:cut]), **sampling) == whole[cut:]


def test_seeds_make_different_answers_and_the_same_seed_the_same(engine: Engine) -> None:
    answers = [generate(engine, max_tokens=12, seed=seed, ignore_eos=True) for seed in (1, 2, 1)]
    assert answers[0] == answers[2] != answers[1]


def test_a_move_with_all_output_ends_at_once(engine: Engine) -> None:
    engine.add("a", PROMPT, Sampling(max_tokens=3, **GREEDY), output=[1, 2, 3], credit=0)
    (output,) = engine.step()
    assert (output.ids, output.finish) == ([], "length")
    assert output.usage is not None
    assert output.usage.completion_tokens == 3
    engine.check_integrity()


# -------------------------------------------------------------------------------------------------------------- credit
def test_no_more_items_than_credit(engine: Engine) -> None:
    engine.add("slow", PROMPT, Sampling(max_tokens=9, **GREEDY), credit=2)
    engine.add("fast", PROMPT, Sampling(max_tokens=9, **GREEDY))
    results = run(engine)
    assert len(ids_of(results["slow"])) == 2
    assert len(ids_of(results["fast"])) == 9
    assert engine.stats()["out_of_credit"] == 1
    assert engine.step() == []
    engine.grant("slow", 5)
    engine.grant("slow", 3)
    assert ids_of(run(engine)["slow"]) == ids_of(results["fast"])[2:5]
    engine.grant("slow", 100)
    assert ids_of(run(engine)["slow"]) == ids_of(results["fast"])[5:]


# -------------------------------------------------------------------------------------------------------------- cancels
def test_a_cancel_frees_blocks_in_every_phase(folder: Path) -> None:
    engine = make_engine(folder, token_budget=8)
    engine.add("decoding", PROMPT, Sampling(max_tokens=50, **GREEDY))
    engine.step()
    engine.add("prefilling", list(range(40)), Sampling(max_tokens=5, **GREEDY))
    engine.step()
    engine.add("queued", list(range(200)), Sampling(max_tokens=5, **GREEDY))
    engine.add("paused", PROMPT, Sampling(max_tokens=5, **GREEDY), credit=0)
    for key in ("paused", "queued", "prefilling", "decoding"):
        engine.cancel(key)
        engine.check_integrity()
    stats = engine.stats()
    assert stats["blocks_free"] == stats["blocks_total"]
    assert (stats["running"], stats["waiting"], engine.step()) == (0, 0, [])
    engine.cancel("unknown")


def test_a_deadline_ends_a_request_in_any_state(engine: Engine) -> None:
    soon = time.monotonic() + 0.3
    engine.add("paused", PROMPT, Sampling(**GREEDY), credit=1, deadline=soon)
    engine.add("calm", PROMPT, Sampling(max_tokens=2, **GREEDY), deadline=time.monotonic() + 60)
    assert engine.next_deadline == soon
    outputs = [output for some in run(engine).values() for output in some]
    time.sleep(max(0.0, soon - time.monotonic()))
    outputs += engine.step()
    (late,) = [output for output in outputs if output.error is not None]
    assert late.key == "paused"
    assert isinstance(late.error, DeadlineExceeded)
    assert engine.stats()["blocks_free"] == engine.stats()["blocks_total"]
    assert engine.next_deadline == math.inf


def test_tokens_that_were_drawn_in_time_precede_the_end(folder: Path) -> None:
    engine = make_engine(folder)
    soon = time.monotonic() + 0.5
    engine.add("late", PROMPT, Sampling(**GREEDY, max_tokens=500), deadline=soon)
    outputs: list[StepOutput] = []
    engine.step(outputs.extend)
    engine.step(outputs.extend)
    time.sleep(max(0.0, soon - time.monotonic()))
    while engine.has_work:
        outputs += engine.step(outputs.extend)
    assert isinstance(outputs[-1].error, DeadlineExceeded)
    assert len(ids_of(outputs)) == 2
    engine.close()


# ------------------------------------------------------------------------------------------------------------ bad input
def test_a_refused_request_leaves_nothing(engine: Engine) -> None:
    for prompt, sampling in (
        ([], Sampling()),
        ([VOCAB], Sampling()),
        (PROMPT, Sampling(top_p=2.0)),
    ):
        with pytest.raises(BadRequest):
            engine.add("a", prompt, sampling)
        engine.check_integrity()
    assert not engine.has_work


def test_a_prompt_that_does_not_fit_names_both_numbers(folder: Path) -> None:
    with pytest.raises(ContextTooLong, match=r"13 .*12"):
        make_engine(folder, context=12).add("a", [1] * 13, Sampling())
    with pytest.raises(ContextTooLong, match=r"13 .*8 \(2 .*4\)"):
        make_engine(folder, num_blocks=2).add("a", [1] * 13, Sampling())


def test_a_key_in_use_and_a_full_queue_are_refused(folder: Path) -> None:
    engine = make_engine(folder, max_waiting=1)
    engine.add("a", PROMPT, Sampling())
    with pytest.raises(BadRequest, match="'a'"):
        engine.add("a", PROMPT, Sampling())
    with pytest.raises(Overloaded):
        engine.add("b", PROMPT, Sampling())
    engine.check_integrity()


@pytest.fixture
def poisoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the same model with a NaN in the embedding of token 5, which loading does not refuse."""
    monkeypatch.setattr(checkpoint, "check_weights", lambda *_: None)
    folder = tiny_checkpoint("qwen3", tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][5, 3] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_nan_fails_the_one_request_and_leaves_nothing_behind(
    engine: Engine, poisoned: Path
) -> None:
    """Its neighbours in the batch, and whoever gets its blocks, answer as ever."""
    expected = {key: generate(engine, [key, 9, 11], max_tokens=8, **GREEDY) for key in range(4)}
    engine = make_engine(poisoned, num_blocks=16)
    for key in range(3):
        engine.add(key, [key, 9, 11], Sampling(max_tokens=8, **GREEDY))
    engine.add("bad", [1, 2, 7, 3, 4, 5, 6, 8, 9, 10, 11, 12], Sampling(**GREEDY))
    results = run(engine)
    (failure,) = results.pop("bad")
    assert isinstance(failure.error, InternalError)
    assert "NaN" in failure.error.message
    assert {key: ids_of(outputs) for key, outputs in results.items()} == {
        key: expected[key] for key in range(3)
    }
    for _ in range(2):
        engine.add(3, [3, 9, 11], Sampling(max_tokens=8, **GREEDY))
        assert ids_of(run(engine)[3]) == expected[3]


def test_nan_does_not_leak_through_padded_block_tables(engine: Engine, poisoned: Path) -> None:
    """Block 0, the natural padding, goes to the request that poisons it while rows of unequal length decode."""
    rows = {"short": [1, 9, 11], "long": list(range(10, 19))}
    expected = {
        key: generate(engine, prompt, max_tokens=3, **GREEDY) for key, prompt in rows.items()
    }
    engine = make_engine(poisoned)
    engine.add("first", [1], Sampling(max_tokens=1, **GREEDY))
    for key, prompt in rows.items():
        engine.add(key, prompt, Sampling(max_tokens=3, **GREEDY))
    outputs = engine.step()
    assert outputs[0].finish == "length"
    engine.add("bad", [5, 1], Sampling(**GREEDY))
    outputs += engine.step()
    assert sum(output.error is not None for output in outputs) == 1
    outputs += [output for late in run(engine).values() for output in late]
    for key in rows:
        assert ids_of([output for output in outputs if output.key == key]) == expected[key]


def test_stats_count_what_happens(engine: Engine) -> None:
    engine.add("a", PROMPT, Sampling(max_tokens=4, **GREEDY))
    engine.step()
    stats = engine.stats()
    assert stats["blocks_total"] - stats["blocks_free"] == 2
    assert (stats["running"], stats["steps"], stats["tokens"], stats["batch_size"]) == (1, 1, 5, 1)
    assert 0 < stats["model_seconds"] <= stats["step_seconds"]
    assert stats["resident_bytes"] > 1 << 20
    assert engine.card().name == engine.config.model_name == Path(engine.config.model).name
    assert engine.card().vocab_size == VOCAB


# -------------------------------------------------------------------------------------------------------- prefix cache
def test_usage_tells_what_was_found_in_the_prefix_cache(engine: Engine) -> None:
    long = [t % VOCAB for t in range(40)]
    answers = []
    for key, cached in (("first", 0), ("again", 39)):
        engine.add(key, long, Sampling(max_tokens=6, **GREEDY))
        outputs = run(engine)[key]
        assert outputs[-1].usage is not None
        assert outputs[-1].usage.cached_tokens == cached
        answers.append(ids_of(outputs))
    assert answers[0] == answers[1]
    assert engine.stats()["blocks_cached"] > 0
    assert engine.stats()["cached_tokens"] == 39


def test_without_a_prefix_cache_nothing_is_kept(folder: Path) -> None:
    engine = make_engine(folder, prefix_cache=False)
    for key in range(2):
        engine.add(key, PROMPT * 4, Sampling(max_tokens=2, **GREEDY))
        (*_, last) = run(engine)[key]
        assert last.usage is not None
        assert last.usage.cached_tokens == 0
    assert engine.stats()["blocks_cached"] == 0


def test_prompts_that_fell_out_come_back_from_the_tiers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        StepTimeEstimate, "prefill_token", 1.0
    )  # seconds: to compute a tiny model again may cost less than to read
    engine = make_engine(
        folder, num_blocks=12, host_cache=20 << 10, disk_cache=1 << 20, cache_folder=str(tmp_path)
    )
    prompts = [[(7 * key + t) % 250 for t in range(40)] for key in range(3)]
    first = [generate(engine, prompt, max_tokens=4, **GREEDY) for prompt in prompts]
    engine.add("again", prompts[0], Sampling(max_tokens=4, **GREEDY))
    outputs = run(engine)["again"]
    assert ids_of(outputs) == first[0]
    assert outputs[-1].usage is not None
    assert outputs[-1].usage.cached_tokens >= 36
    stats = engine.stats()
    assert stats["blocks_loaded"] >= 9
    assert stats["host_cache_bytes"] <= 20 << 10
    assert stats["disk_cache_bytes"] > 0
    engine.close()
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------------- scheduling
def test_a_deadline_that_cannot_be_met_is_refused_at_once(engine: Engine) -> None:
    engine.add("slow", PROMPT * 20, Sampling(max_tokens=8, **GREEDY))
    run(engine)
    token = engine.pace.at_least(1000, 0) / 1000
    assert token > 0
    engine.add("fits", PROMPT, Sampling(max_tokens=1, **GREEDY), deadline=time.monotonic() + 100)
    with pytest.raises(DeadlineExceeded):
        engine.add("late", [1] * 200, Sampling(**GREEDY), deadline=time.monotonic() + 100 * token)
    assert set(run(engine)) == {"fits"}


def test_a_higher_priority_interrupts_and_both_answers_are_what_they_are_alone(
    folder: Path,
) -> None:
    expected = generate(make_engine(folder), max_tokens=12, **GREEDY)
    engine = make_engine(folder, max_running=1)
    engine.add("low", PROMPT, Sampling(max_tokens=12, **GREEDY))
    for _ in range(4):
        engine.step()
    engine.add("high", PROMPT, Sampling(max_tokens=12, **GREEDY), priority=1)
    order = [output.key for _ in range(12) for output in engine.step()]
    assert order == ["high"] * 12
    engine.step()
    assert engine.scheduler.running[0].output[:4] == expected[:4]
    assert engine.stats()["preemptions"] == 1


def test_outputs_are_the_same_when_their_handling_overlaps_the_model(folder: Path) -> None:
    """With `emit`, a step's outputs come while the next one is computed, in the same order, none lost."""
    engine = make_engine(folder)
    sampling = [Sampling(max_tokens=3 + key, logprobs=1, **GREEDY) for key in range(5)]
    for key, s in enumerate(sampling):
        engine.add(key, [*PROMPT, key], s)
    plain = run(engine)
    for key, s in enumerate(sampling):
        engine.add(key, [*PROMPT, key], s)
    emitted: list[StepOutput] = []
    while engine.has_work:
        emitted += engine.step(emitted.extend)
        engine.check_integrity()
    for request, outputs in plain.items():
        mine = [output for output in emitted if output.key == request]
        assert ids_of(mine) == ids_of(outputs)
        assert [output.finish for output in mine] == [output.finish for output in outputs]
    engine.close()


def test_an_error_of_the_model_reaches_the_step_that_overlaps_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_: object) -> None:
        raise InternalError("a broken invariant")

    monkeypatch.setattr(engine.runner, "forward", forward)
    engine.add("a", PROMPT, Sampling(**GREEDY))
    with pytest.raises(InternalError):
        engine.step(lambda outputs: None)


def test_the_time_that_the_model_waits_for_python_is_counted(engine: Engine) -> None:
    engine.add("a", PROMPT, Sampling(max_tokens=5, **GREEDY))
    run(engine)
    first = engine.stats()["python_seconds"]
    assert first > 0
    time.sleep(IDLE_SECONDS)
    engine.add("b", PROMPT, Sampling(max_tokens=1, **GREEDY))
    run(engine)
    assert engine.stats()["python_seconds"] < first + IDLE_SECONDS, "idle is not waiting"


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"weights": "int3"}, "weights"),
        ({"kv_dtype": "fp8"}, "kv_dtype"),
        ({"decode_slowdown": 0.5}, "decode_slowdown"),
        ({"latency_goal": -0.1}, "latency_goal"),
        ({"host_cache": 1, "prefix_cache": False}, "host_cache"),
        ({"cache_folder": "/nowhere"}, "cache_folder"),
        ({"host_cache": -1}, "host_cache"),
    ],
)
def test_wrong_settings_name_field_value_and_remedy(
    folder: Path, settings: dict[str, Any], param: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        make_engine(folder, **settings)
    assert raised.value.param == param
