"""Test that log-probabilities of prompts equal those of transformers, whatever happens to a request."""

from __future__ import annotations

import inspect
import random
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from list_models import PAGE, exact_on
from motet_llm.config import EngineConfig
from motet_llm.engine import prompt_scores
from motet_llm.engine.engine import Engine
from motet_llm.engine.model_runner import ModelRunner
from motet_llm.engine.outputs import StepOutput
from motet_llm.weights import checkpoint
from motet_shared.errors import BadRequest
from motet_shared.messages import Sampling, ScoredToken
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.families import language_families as families
from support.running.tiers import mostly_extended

BOUND = 1e-4  # between log-probabilities, both in float32
TOP = 3
# Heads that do more than multiply: caps, scales, biases; and states in place of attention.
HEADS = [
    "LlamaForCausalLM",
    "Gemma2ForCausalLM",
    "CohereForCausalLM",
    "FalconH1ForCausalLM",
    "PhiForCausalLM",
]
Outputs = dict[Hashable, list[StepOutput]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"), hidden_size=32, head_dim=8)


def make_engine(folder: Path, **options: Any) -> Engine:
    defaults = {"block_size": 4, "num_blocks": 100, "token_budget": 16, "max_running": 8}
    return Engine(EngineConfig(model=str(folder), dtype="float32", threads=1, **defaults | options))


def run(engine: Engine) -> Outputs:
    found: Outputs = {}
    for _ in range(2000):
        if not engine.has_work:
            break
        for output in engine.step():
            found.setdefault(output.key, []).append(output)
        engine.check_integrity()
    return found


def scored(outputs: list[StepOutput]) -> list[ScoredToken]:
    """The scores of a request, which come in order and before its tokens."""
    tokens: list[ScoredToken] = []
    has_output = False
    for output in outputs:
        assert output.error is None
        if output.scores is not None:
            assert output.scores.start == 1 + len(tokens)
            assert not has_output
            tokens += output.scores.tokens
        has_output = has_output or bool(output.ids)
    return tokens


def reference_of(name: str, folder: Path) -> PreTrainedModel:
    found: PreTrainedModel = families.class_of(name).from_pretrained(folder, dtype=torch.float32)
    return found.eval()


@torch.inference_mode()
def assert_scores(reference: PreTrainedModel, prompt: list[int], tokens: list[ScoredToken]) -> None:
    inputs: dict[str, Any] = {"input_ids": torch.tensor([prompt])}
    if "position_ids" in inspect.signature(reference.forward).parameters:
        inputs["position_ids"] = torch.arange(len(prompt)).unsqueeze(0)  # those of `generate`
    logits = reference(**inputs, use_cache=False).logits[0].float()
    logprobs = logits.log_softmax(-1)
    assert [one.id for one in tokens] == prompt[1:]
    for row, one in zip(logprobs, tokens, strict=False):
        assert one.logprob == pytest.approx(float(row[one.id]), abs=BOUND)
        values = [value for _, value in one.top]
        assert values == pytest.approx(row.topk(len(values)).values.tolist(), abs=BOUND)
        assert values == pytest.approx([float(row[token]) for token, _ in one.top], abs=BOUND)
        higher, near = (
            int((row > row[one.id] + BOUND).sum()),
            int((row > row[one.id] - BOUND).sum()),
        )
        assert higher < one.rank <= near


@pytest.mark.parametrize("name", mostly_extended([*exact_on(PAGE.read_text())], HEADS, "families"))
def test_scores_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = families.write_checkpoint(name, tmp_path)
    reference = reference_of(name, path)
    vocab = checkpoint.load_config(path).vocab_size
    context = 0 if checkpoint.exact_range(checkpoint.load_config(path)) else families.CONTEXT
    engine = make_engine(path, context=context, decode_slowdown=0)
    rng = random.Random(3)
    prompts = [[rng.randrange(vocab) for _ in range(size)] for size in (2, 17, 33)]
    for key, prompt in enumerate(prompts):
        for most in (0, TOP):
            sampling = Sampling(prompt_logprobs=most, max_tokens=most, temperature=0)
            engine.add((key, most), prompt, sampling)
    found = run(engine)
    for (key, most), outputs in found.items():  # type: ignore[misc]
        tokens = scored(outputs)
        assert {len(one.top) for one in tokens} == {most}
        assert_scores(reference, prompts[key], tokens)
        last = outputs[-1]
        assert last.usage is not None
        assert last.usage.cached_tokens == 0
        assert last.usage.completion_tokens <= most
        assert last.finish == "length" or most
    engine.close()


def test_scores_neither_use_the_prefix_cache_nor_spoil_it(folder: Path) -> None:
    engine = make_engine(folder)
    reference = reference_of("LlamaForCausalLM", folder)
    prompt = [*range(3, 60)]
    plain = Sampling(max_tokens=4, temperature=0)
    for key in ("cold", "warm"):
        engine.add(key, prompt, plain)
        expected = run(engine)[key]
    usage = expected[-1].usage
    assert usage is not None
    assert usage.cached_tokens > 40
    for count in (0, 4):
        engine.add("scored", prompt, Sampling(max_tokens=count, temperature=0, prompt_logprobs=1))
        outputs = run(engine)["scored"]
        assert_scores(reference, prompt, scored(outputs))
        assert outputs[-1].usage is not None
        assert outputs[-1].usage.cached_tokens == 0
    ids = [token for output in outputs for token in output.ids]
    assert ids == [token for output in expected for token in output.ids]


def test_a_preempted_request_sends_each_score_once(folder: Path) -> None:
    engine = make_engine(folder, num_blocks=24, decode_slowdown=0)
    reference = reference_of("LlamaForCausalLM", folder)
    prompts = {key: [3 + (key * 7 + at) % 250 for at in range(60)] for key in range(4)}
    found: Outputs = {}
    for key, prompt in prompts.items():
        sampling = Sampling(max_tokens=8, temperature=0, prompt_logprobs=2)
        engine.add(key, prompt, sampling, priority=key)
        for _ in range(2):  # the next one finds this one in the midst of its prompt
            for output in engine.step():
                found.setdefault(output.key, []).append(output)
    for other, outputs in run(engine).items():
        found[other] = found.get(other, []) + outputs
    assert engine.stats()["preemptions"] > 0
    for key, prompt in prompts.items():
        assert_scores(reference, prompt, scored(found[key]))


def test_a_slow_reader_holds_scores_back(folder: Path) -> None:
    engine = make_engine(folder)
    prompt = [3 + at % 250 for at in range(70)]
    engine.add("slow", prompt, Sampling(max_tokens=2, temperature=0, prompt_logprobs=0), credit=2)
    outputs: list[StepOutput] = []
    for granted in range(2, 12):
        for _ in range(20):
            if engine.has_work:
                outputs += engine.step()
        sent = sum(bool(one.ids) + (one.scores is not None) for one in outputs)
        assert sent <= granted
        engine.grant("slow", granted + 1)
    assert outputs[-1].finish == "length"
    assert_scores(reference_of("LlamaForCausalLM", folder), prompt, scored(outputs))


def test_logits_are_kept_for_a_few_rows_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    logits_of = ModelRunner.logits_of

    def spied(runner: ModelRunner, wanted: Any) -> torch.Tensor:
        found = logits_of(runner, wanted)
        rows.append(len(found))
        return found

    engine = make_engine(folder, token_budget=64)
    monkeypatch.setattr(ModelRunner, "logits_of", spied)
    monkeypatch.setattr(prompt_scores, "LOGITS", 4 * engine.runner.vocab * 5)
    monkeypatch.setattr(prompt_scores, "CHUNK", 12)
    prompt = [3 + at % 250 for at in range(50)]
    engine.add("one", prompt, Sampling(max_tokens=0, prompt_logprobs=1))
    outputs = run(engine)["one"]
    assert max(rows) == 5
    assert max(len(one.scores.tokens) for one in outputs if one.scores is not None) <= 12
    assert_scores(reference_of("LlamaForCausalLM", folder), prompt, scored(outputs))


def test_a_reply_of_one_token_ends_with_it(folder: Path) -> None:
    engine = make_engine(folder, token_budget=64)
    engine.add("one", [5, 6, 7, 8], Sampling(max_tokens=1, temperature=0, prompt_logprobs=1))
    outputs = run(engine)["one"]
    assert [len(one.ids) for one in outputs] == [1]
    assert outputs[0].finish == "length"
    assert len(scored(outputs)) == 3


@pytest.mark.parametrize("size", [30, 33])
def test_a_scored_prompt_that_leaves_no_room_ends_with_its_scores(folder: Path, size: int) -> None:
    prompt = [3 + at for at in range(size)]
    engine = make_engine(folder, context=size)
    engine.add("one", prompt, Sampling(max_tokens=4, temperature=0, prompt_logprobs=1))
    outputs = run(engine)["one"]
    assert not engine.has_work
    assert len(scored(outputs)) == size - 1
    assert [one.finish for one in outputs if one.ends] == ["length"]
    assert not any(one.ids for one in outputs)


def test_the_stop_token_of_a_scored_prompt_has_a_log_probability(folder: Path) -> None:
    prompt, reference = [5, 6, 7, 8], reference_of("LlamaForCausalLM", folder)
    with torch.inference_mode():
        row = reference(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
    stop = int(row.argmax())
    for scored_prompt, entries in ((1, 1), (-1, 0)):
        engine = make_engine(folder)
        sampling = Sampling(
            max_tokens=4,
            temperature=0,
            logprobs=1,
            prompt_logprobs=scored_prompt,
            stop_token_ids=[stop],
        )
        engine.add("one", prompt, sampling)
        last = run(engine)["one"][-1]
        assert (last.ids, last.finish) == ([], "stop")
        logprobs = last.logprobs or []
        assert [one.id for one in logprobs] == [stop] * entries
        assert all(one.logprob == pytest.approx(float(row[stop]), abs=BOUND) for one in logprobs)


def test_with_drafts_and_compression_scores_are_the_same(folder: Path) -> None:
    prompt = [3 + at % 9 for at in range(60)]
    reference = reference_of("LlamaForCausalLM", folder)
    for options in ({"speculate": "ngram"}, {"attention_budget": 16, "attention_observe": 4}):
        engine = make_engine(folder, token_budget=64, **options)
        for key in range(2):
            engine.add(key, prompt, Sampling(max_tokens=6, temperature=0, prompt_logprobs=1))
        for outputs in run(engine).values():
            assert_scores(reference, prompt, scored(outputs))


def test_a_request_that_continues_elsewhere_has_no_scores(folder: Path) -> None:
    engine = make_engine(folder)
    sampling = Sampling(max_tokens=6, temperature=0, prompt_logprobs=1)
    engine.add("moved", [5, 6, 7, 8], sampling, output=[9, 10])
    assert scored(run(engine)["moved"]) == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, fields: dict[str, Any], param: str) -> None:
    engine = make_engine(folder)
    with pytest.raises(BadRequest) as raised:
        engine.add("one", [5, 6], Sampling(**fields))
    assert raised.value.param == param
