"""Prompts cut down to what their end attends to: the rule in plain torch, however requests come, go and move."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import max_pool1d
from transformers import DynamicCache, PreTrainedModel

from motet_evaluation.scoring import log_probabilities
from motet_llm.attention.heavy_hitters import POOL, HeavyHitters, top
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_shared.errors import ConfigError
from motet_shared.messages import Sampling
from support.engine.schedules import Job, Schedule, random_prompts
from support.families import language_families as families
from support.running.refusals import refuses

TIE = 1e-4
SIZE, KEPT, WATCHED = 4, 14, 5
FAMILIES = ("LlamaForCausalLM", "Gemma2ForCausalLM", "GptOssForCausalLM")


def cut_down(cache: DynamicCache, attentions: tuple[torch.Tensor, ...], full: list[int]) -> None:
    """The rule on transformers' own cache, by transformers' own attention `[1, H, T, T]` of each layer."""
    for layer in full:
        kept: Any = cache.layers[layer]
        _, heads, length, _ = kept.keys.shape
        start = length - WATCHED
        votes = attentions[layer][0, :, start:, :start].reshape(heads, -1, start).sum(1)
        wide = max_pool1d(votes, POOL, stride=1, padding=POOL // 2).tolist()
        best = [sorted(range(start), key=lambda t: (-row[t], t))[: KEPT - WATCHED] for row in wide]
        stay = [[*sorted(chosen), *range(start, length)] for chosen in best]
        kept.keys, kept.values = (
            torch.stack([whole[0, head, stay[head]] for head in range(heads)])[None]
            for whole in (kept.keys, kept.values)
        )


@torch.inference_mode()
def expected_logits(
    reference: PreTrainedModel, prompt: list[int], output: list[int]
) -> torch.Tensor:
    """`[1 + output, V]`: of the whole prompt, then of each token of the output after what stays of it."""
    cache = DynamicCache()
    first = reference(torch.tensor([prompt]), past_key_values=cache, output_attentions=True)
    kinds = getattr(reference.config, "layer_types", None) or ["full_attention"] * len(cache.layers)
    if len(prompt) > KEPT:
        full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
        cut_down(cache, first.attentions, full)
    rows = [first.logits[0, -1]]
    for position, token in enumerate(output, start=len(prompt)):
        masks: Any = None
        if "sliding_attention" in kinds:
            seen = torch.arange(position + 1) > position - reference.config.sliding_window
            mask = torch.zeros(1, 1, 1, position + 1).masked_fill(
                ~seen, torch.finfo(torch.float32).min
            )
            masks = {"full_attention": None, "sliding_attention": mask}
        places = torch.tensor([[position]])
        step = reference(
            torch.tensor([[token]]),
            attention_mask=masks,
            position_ids=places,
            past_key_values=cache,
        )
        rows.append(step.logits[0, -1])
    return torch.stack(rows)


def check(reference: PreTrainedModel, job: Job) -> None:
    logits = expected_logits(reference, job.prompt, job.ids)
    for row, token, logprob in zip(logits, job.ids, job.logprobs, strict=False):
        assert row.max() - row[token] < TIE
        assert logprob == pytest.approx(float(row.log_softmax(-1)[token]), abs=1e-4)
    if job.finish == "stop":
        eos = reference.generation_config.eos_token_id
        assert logits[-1].max() - logits[-1][eos[0] if isinstance(eos, list) else eos] < TIE
    else:
        assert len(job.ids) == job.sampling.max_tokens


def engine_of(folder: Path, **settings: Any) -> Engine:
    rule: dict[str, Any] = {"attention_budget": KEPT, "attention_observe": WATCHED}
    small: dict[str, Any] = {
        "block_size": SIZE,
        "max_running": 4,
        "decode_slowdown": 0,
        "threads": 1,
    }
    return Engine(EngineConfig(model=str(folder), dtype="float32", **(small | rule | settings)))


def run(engine: Engine, prompt: list[int], max_tokens: int) -> Job:
    """What an engine that has nothing else to do makes of a prompt."""
    job = Job(
        prompt, Sampling(temperature=0, max_tokens=max_tokens, logprobs=0, ignore_eos=True), engine
    )
    engine.add(0, job.prompt, job.sampling)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            job.ids += output.ids
            job.logprobs += [entry.logprob for entry in output.logprobs or []]
            job.finish = output.finish
        engine.check_integrity()
    return job


def random_prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(200) for _ in range(length)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    torch.set_num_threads(1)
    folder = families.write_checkpoint(request.param, tmp_path_factory.mktemp("family"))
    model = families.class_of(request.param).from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return folder, model.eval()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.mark.long(after=3)
@pytest.mark.parametrize(
    "settings",
    [{"token_budget": 5}, {"token_budget": 64}, {"token_budget": 24, "speculate": "ngram"}],
)
def test_tokens_are_those_of_a_model_with_such_a_cache(
    family: tuple[Path, PreTrainedModel], settings: dict[str, Any]
) -> None:
    """However prompts are cut, cached, preempted, guessed and moved."""
    folder, reference = family
    engines = [
        engine_of(folder, num_blocks=blocks, always_speculate=True, **settings)
        for blocks in (32, 48)
    ]
    budget = engines[0].config.token_budget
    jobs = Schedule(
        engines, budget, random_prompts(random.Random(budget), engines[0].card().vocab_size, 8)
    ).run()
    assert sum(engine.stats()["prompts_compressed"] for engine in engines) > 2
    for job in jobs:
        check(reference, job)


@pytest.mark.parametrize("num_prompt", [KEPT, 40, 300])
def test_probabilities_of_answers_are_those_behind_what_stayed(
    family: tuple[Path, PreTrainedModel], num_prompt: int
) -> None:
    folder, reference = family
    runner = engine_of(folder, num_blocks=16).runner
    prompt, answer = random_prompt(num_prompt), random_prompt(9)
    watch = HeavyHitters(kept=KEPT, watched=WATCHED).watch(num_prompt)
    found = log_probabilities(runner, prompt + answer, watch)
    expected = expected_logits(reference, prompt, answer[:-1]).log_softmax(-1)[range(9), answer]
    assert found[num_prompt - 1 :] == pytest.approx(expected.tolist(), abs=1e-4)
    assert found[: num_prompt - 1] == pytest.approx(log_probabilities(runner, prompt), abs=1e-4)


def test_while_it_decodes_a_request_holds_what_stayed_and_what_came_since(llama: Path) -> None:
    engine = engine_of(llama, num_blocks=40)
    engine.add(0, random_prompt(100), Sampling(temperature=0, max_tokens=20, ignore_eos=True))
    held = []
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        held.append(engine.pool.num_blocks - engine.pool.num_free)
    assert held == [-(-(KEPT + computed) // SIZE) for computed in range(19)] + [0]
    assert engine.stats()["prompt_tokens_dropped"] == 100 - KEPT


@pytest.mark.parametrize("steps", range(4))
def test_a_cancel_frees_everything(llama: Path, steps: int) -> None:
    """In the prompt, where the watch begins, when it has been cut, and behind it."""
    engine = engine_of(llama, num_blocks=40, token_budget=18)
    engine.add(0, random_prompt(36), Sampling(temperature=0, max_tokens=20, ignore_eos=True))
    for _ in range(steps):
        engine.step()
    engine.cancel(0)
    engine.check_integrity()
    assert engine.pool.num_free == engine.pool.num_blocks


def test_where_a_shared_prompt_leaves_no_room_for_what_stays_another_gives_way(llama: Path) -> None:
    """Blocks that the other still holds are not free when the one has left them."""
    alone = run(engine_of(llama, attention_budget=60), random_prompt(70), 12)
    engine = engine_of(llama, attention_budget=60, num_blocks=24, token_budget=16)
    for key in range(2):
        engine.add(key, alone.prompt, alone.sampling)
    said: dict[Any, list[int]] = {0: [], 1: []}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            said[output.key] += output.ids
        engine.check_integrity()
    assert said == {0: alone.ids, 1: alone.ids}
    assert engine.stats()["preemptions"] == 1


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "float8_e4m3fn"])
def test_to_the_bit_what_stays_depends_on_the_prompt_alone(llama: Path, kv_dtype: str) -> None:
    """Not on the pieces that it was computed in, nor on a prefix that others computed."""
    settings: dict[str, Any] = {"deterministic": True, "kv_dtype": kv_dtype}
    prompt = random_prompt(60)
    whole = run(engine_of(llama, token_budget=64, **settings), prompt, 16)
    engine = engine_of(llama, token_budget=7, max_running=2, **settings)
    run(engine, [*prompt[:50], 7, 7, 7, 7, 7, 7], 4)
    pieces = run(engine, prompt, 16)
    assert (pieces.ids, pieces.logprobs) == (whole.ids, whole.logprobs)
    assert engine.stats()["cached_tokens"] >= 48


def test_a_prompt_within_the_budget_is_computed_as_ever(llama: Path) -> None:
    ours = run(engine_of(llama, attention_budget=60), random_prompt(60), 30)
    plain = run(engine_of(llama, attention_budget=0), random_prompt(60), 30)
    assert (ours.ids, ours.logprobs) == (plain.ids, plain.logprobs)


def test_a_prompt_beyond_the_budget_is_not(llama: Path) -> None:
    ours = run(engine_of(llama), random_prompt(60), 30)
    plain = run(engine_of(llama, attention_budget=0), random_prompt(60), 30)
    assert ours.logprobs[0] == plain.logprobs[0]  # of the whole prompt
    assert ours.logprobs != plain.logprobs


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_the_top_are_those_around_which_the_most_lies(
    weights: list[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(weights)))
    around = [max(weights[max(0, t - POOL // 2) : t + POOL // 2 + 1]) for t in range(len(weights))]
    best = sorted(range(len(weights)), key=lambda t: (-around[t], t))[:count]
    assert top(torch.tensor(weights, dtype=torch.float32), count).tolist() == sorted(best)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("DeepseekV2ForCausalLM", "layer 0 keeps latents"),
        ("JambaForCausalLM", "layer .* has a recurrent state"),
        ("MistralForCausalLM", "every layer has a window"),
    ],
)
def test_models_that_do_not_keep_every_key_are_refused(
    name: str, layer: str, tmp_path: Path
) -> None:
    folder = families.write_checkpoint(name, tmp_path)
    with refuses(ConfigError, "attention_budget"):
        engine_of(folder)


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"attention_budget": -1}, "attention_budget"),
        ({"attention_observe": 0}, "attention_observe"),
        ({"attention_observe": KEPT}, "attention_budget"),
        ({"attention_window": 8, "attention_sinks": 4}, "attention_budget"),
        ({"contiguous_kv": True}, "attention_budget"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    llama: Path, settings: dict[str, Any], param: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        engine_of(llama, **settings)
    assert raised.value.param == param
