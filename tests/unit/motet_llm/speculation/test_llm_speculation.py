"""Speculation by the engine: whatever is guessed, the tokens are those that come without any guess.

Random weights, which agree with no draft but by chance, and drafts that know the answer with a given probability.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.engine.outputs import StepOutput
from motet_llm.engine.request import Request
from motet_llm.grammar.grammar import Grammar
from motet_llm.grammar.token_spelling import Spelling
from motet_llm.scheduling.work import Work
from motet_llm.speculation.controller import SpeculationController
from motet_llm.speculation.ngram import NgramDrafts
from motet_llm.speculation.speculator import Speculation
from motet_llm.weights import checkpoint
from motet_shared import messages
from motet_shared.errors import ConfigError, InternalError
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import EOS, VOCAB, tiny_checkpoint
from support.running.refusals import refuses

PROMPT = [10, 20, 30, 40, 50]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
Outputs = dict[Hashable, list[StepOutput]]


class Knowing:
    """Drafts that are right with a given probability: `answers` are the tokens of each prompt's first one."""

    needs_model = False
    catch_up_tokens = 0

    def __init__(self, answers: dict[int, list[int]], right: float, seed: int = 0):
        self._answers, self._right, self._rng = answers, right, random.Random(seed)

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> dict[Request, list[int]]:
        return {request: self._guess(request, count) for request, count in wanted}

    def _guess(self, request: Request, count: int) -> list[int]:
        due = self._answers[request.key][request.num_output :][:count]  # type: ignore[index]
        guessed = [
            token if self._rng.random() < self._right else (token + 1) % VOCAB for token in due
        ]
        return guessed + [0] * (count - len(guessed))

    def catch_up_for(self, request: Request) -> int:
        return 0

    def observe(self, *_: object) -> None: ...

    def forget(self, request: Request) -> None: ...

    def check_integrity(self, requests: set[Request]) -> None: ...


def make_engine(
    folder: Path, speculate: str = "off", speculation: Speculation | None = None, **options: Any
) -> Engine:
    sizes = {
        "block_size": 4,
        "num_blocks": 200,
        "token_budget": 64,
        "max_running": 8,
        "decode_slowdown": 0,
    }
    given = {"threads": 1, "overlap": False, "always_speculate": True, **sizes, **options}
    config = EngineConfig(model=str(folder), speculate=speculate, **given)
    return Engine(config, speculation=speculation)


def knowing_engine(
    folder: Path, answers: dict[int, list[int]], right: float = 0.7, **options: Any
) -> Engine:
    length = options.get("draft_tokens", EngineConfig.draft_tokens)
    controller = SpeculationController(length, always=True)
    return make_engine(folder, "ngram", Speculation(Knowing(answers, right), controller), **options)


def run(engine: Engine, steps: int = 10_000) -> Outputs:
    outputs: Outputs = {}
    while engine.has_work and steps:
        steps -= 1
        for output in engine.step():
            outputs.setdefault(output.key, []).append(output)
        engine.check_integrity()
    return outputs


def ids_of(outputs: Sequence[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.ids]


def write(
    engine: Engine, prompt: list[int] = PROMPT, output: Sequence[int] = (), **sampling: Any
) -> list[int]:
    engine.add("alone", prompt, Sampling(**sampling), output=output)
    return ids_of(run(engine)["alone"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"), hidden_size=32, head_dim=8)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    return tiny_checkpoint("llama", path, hidden_size=32, head_dim=8, num_hidden_layers=1, seed=0)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        "mistral", tmp_path_factory.mktemp("windowed"), hidden_size=32, head_dim=8
    )


@pytest.fixture(scope="module")
def spelling(folder: Path) -> Spelling:
    return Spelling.load(str(folder), VOCAB, [EOS])


# ------------------------------------------------------------------------------------------------------------ exactness
WISHES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2, "logprobs": 3},
    {"temperature": 1.3, "top_k": 12, "min_p": 0.02, "seed": 3, "repetition_penalty": 1.3},
    {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.3, "logprobs": 0},
    {
        "temperature": 0.9,
        "seed": 4,
        "logit_bias": {65: 6.0},
        "min_tokens": 9,
        "stop_token_ids": [65],
    },
]
GRAMMARS = (None, None, "[a-f]{3,20}", '("[a-z]{1,5}", )*')


def prompt_of(key: int) -> list[int]:
    """Every second one begins as the one before it, and all repeat themselves."""
    own = [10 + (key // 2 * 7 + i * i) % 90 for i in range(3 + key % 5)]
    return own * (1 + key % 3) + [key % 2]


class World:
    """What all examples of the property test share: the answers of each request alone, without any draft."""

    def __init__(self, folder: Path, spelling: Spelling):
        self.folder = folder
        self.grammars = [
            g and Grammar(messages.Grammar(kind="regex", text=g), spelling) for g in GRAMMARS
        ]
        engine = make_engine(folder)
        self.alone: dict[int, list[StepOutput]] = {}
        for key in range(len(WISHES) * len(GRAMMARS)):
            self.add(engine, key)
            self.alone[key] = run(engine)[key]
        engine.close()
        self.answers = {key: ids_of(outputs) for key, outputs in self.alone.items()}

    def add(self, engine: Engine, key: int, **options: Any) -> None:
        grammar = self.grammars[key % len(GRAMMARS)]
        wish = WISHES[key // len(GRAMMARS)]
        sampling = Sampling(max_tokens=4 + key % 23, ignore_eos=grammar is None, **wish)
        grammar_state = grammar.start(options.get("output", ())) if grammar else None
        engine.add(key, prompt_of(key), sampling, grammar_state=grammar_state, **options)


@pytest.fixture(scope="module")
def world(folder: Path, spelling: Spelling) -> World:
    return World(folder, spelling)


@pytest.fixture(scope="module")
def engines(world: World, small: Path) -> list[Engine]:
    """Of every kind of drafts; the pools are so small that requests are preempted."""
    tight: dict[str, Any] = {"num_blocks": 16, "token_budget": 24, "draft_tokens": 6}
    return [
        knowing_engine(world.folder, world.answers, **tight),
        make_engine(world.folder, "ngram", **tight),
        make_engine(world.folder, str(small), **tight),
        make_engine(
            world.folder, str(world.folder), **{**tight, "overlap": True, "draft_tokens": 3}
        ),
    ]


class Script:
    """Random events on two engines, until every request is done: arrivals, credit, cancels, moves."""

    def __init__(self, world: World, engines: Sequence[Engine], keys: Sequence[int], seed: int):
        self.world, self.engines, self.rng = world, engines, random.Random(seed)
        self.waiting = list(keys)
        self.at: dict[int, Engine] = {}
        self.got: dict[int, list[int]] = {key: [] for key in keys}
        self.logprobs: dict[int, list[float]] = {key: [] for key in keys}
        self.ends: dict[int, str] = {}
        self.granted: dict[int, int] = {}
        self.items: dict[int, int] = {}

    def run(self) -> None:
        for _ in range(5000):
            if not self.waiting and not self.at:
                return
            if self.waiting and self.rng.random() < 0.8:
                self._open(self.waiting.pop())
            for key in list(self.at):
                self._disturb(key)
            for engine in self.engines:
                for output in engine.step(self._note if engine.config.overlap else None):
                    self._note([output])
                engine.check_integrity()
        raise AssertionError("it does not end")

    def leave(self) -> None:
        """Whatever happened, the engines are as new."""
        for key, engine in self.at.items():
            engine.cancel(key)

    def _open(self, key: int) -> None:
        self.at[key], self.items[key] = self.rng.choice(self.engines), 0
        self.granted[key] = self.rng.choice([0, 1, 1000])
        self.world.add(
            self.at[key], key, output=self.got[key], credit=self.granted[key], priority=key % 2
        )

    def _disturb(self, key: int) -> None:
        chance = self.rng.random()
        if chance < 0.3:
            self.granted[key] += self.rng.randint(1, 4)
            self.at[key].grant(key, self.granted[key])
        elif chance < 0.34:
            self.at.pop(key).cancel(key)
            if self.rng.random() < 0.7:
                self.waiting.append(key)

    def _note(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            key: Any = output.key
            if key not in self.at:
                continue  # cancelled while its tokens were on their way
            assert output.error is None
            self.got[key] += output.ids
            self.logprobs[key] += [entry.logprob for entry in output.logprobs or []]
            self.items[key] += bool(output.ids)
            assert self.items[key] <= self.granted[key]
            if output.finish is not None:
                self.ends[key] = output.finish
                del self.at[key]


ANYHOW = [HealthCheck.function_scoped_fixture]
QUICKLY = (
    Phase.explicit,
    Phase.reuse,
    Phase.generate,
)  # nothing is to be shrunk: a schedule is its seed
relaxed = settings(max_examples=8, phases=QUICKLY, suppress_health_check=ANYHOW)


@relaxed
@given(
    keys=st.sets(st.integers(0, len(WISHES) * len(GRAMMARS) - 1), min_size=1, max_size=9),
    kinds=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    seed=st.integers(0, 1 << 16),
)
def test_a_schedule_of_anything_writes_what_each_request_writes_alone(
    world: World, engines: list[Engine], keys: set[int], kinds: tuple[int, int], seed: int
) -> None:
    chosen = [engines[kind] for kind in dict.fromkeys(kinds)]
    script = Script(world, chosen, sorted(keys), seed)
    try:
        script.run()
    finally:
        script.leave()
    for key, end in script.ends.items():
        assert script.got[key] == world.answers[key]
        assert end == world.alone[key][-1].finish
        expected = [entry.logprob for output in world.alone[key] for entry in output.logprobs or []]
        assert script.logprobs[key] == pytest.approx(expected, abs=1e-4)
    for engine in chosen:
        assert engine.stats()["blocks_free"] == engine.stats()["blocks_total"]


def test_the_schedules_accept_reject_and_preempt(world: World, engines: list[Engine]) -> None:
    """The property above is worth something only if its events happen."""
    script = Script(world, engines, range(len(WISHES) * len(GRAMMARS)), 5)
    script.run()
    assert sum(engine.stats()["preemptions"] for engine in engines) > 0
    for engine in engines:
        stats = engine.stats()
        assert 0 < stats["accepted_tokens"] <= stats["drafted_tokens"]
        assert (
            stats["accepted_tokens"] < stats["drafted_tokens"] or engine is engines[-1]
        )  # whose draft is the model


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_window_and_a_prefix_cache_see_only_what_is_right(
    windowed: Path, block_size: int
) -> None:
    """The second request begins with the whole answer of the first, whose blocks the drafts must not have spoiled."""
    free = make_engine(windowed, block_size=block_size)
    first = write(free, max_tokens=30, **GREEDY)
    again = write(free, PROMPT + first, max_tokens=10, **GREEDY)
    free.close()
    engine = knowing_engine(windowed, {"alone": first}, block_size=block_size)  # type: ignore[dict-item]
    assert write(engine, max_tokens=30, **GREEDY) == first
    assert engine.stats()["accepted_tokens"] > 0
    engine.add("alone", PROMPT + first, Sampling(max_tokens=10, **GREEDY))
    outputs = run(engine)["alone"]
    assert ids_of(outputs) == again
    usage = outputs[-1].usage
    assert usage is not None
    assert usage.cached_tokens >= len(PROMPT + first) - 2 * block_size - 1
    engine.close()


def test_a_draft_saves_steps_and_comes_as_one_item(folder: Path) -> None:
    free = make_engine(folder)
    answer = write(free, max_tokens=25, **GREEDY)
    engine = knowing_engine(folder, {"alone": answer}, 1.0, draft_tokens=4)  # type: ignore[dict-item]
    engine.add("alone", PROMPT, Sampling(max_tokens=25, logprobs=0, **GREEDY))
    outputs = run(engine)["alone"]
    assert [len(output.ids) for output in outputs] == [1, 5, 5, 5, 5, 4]
    assert all(len(output.logprobs or []) == len(output.ids) for output in outputs)
    assert ids_of(outputs) == answer
    assert outputs[-1].finish == "length"


@pytest.mark.parametrize("at", range(3, 12))
def test_a_stop_token_within_a_draft_ends_there(folder: Path, at: int) -> None:
    answer = write(make_engine(folder), max_tokens=20, **GREEDY)
    engine = knowing_engine(folder, {"alone": answer}, 1.0, draft_tokens=7)  # type: ignore[dict-item]
    engine.add("alone", PROMPT, Sampling(max_tokens=20, stop_token_ids=[answer[at]], **GREEDY))
    outputs = run(engine)["alone"]
    assert ids_of(outputs) == answer[: answer.index(answer[at])]
    assert outputs[-1].finish == "stop"
    assert outputs[-1].usage is not None
    assert outputs[-1].usage.completion_tokens == answer.index(answer[at])


def test_deterministic_bits_are_those_of_one_token_at_a_time(folder: Path) -> None:
    def values(engine: Engine) -> list[float]:
        engine.add(
            "alone",
            PROMPT,
            Sampling(temperature=1.0, seed=3, max_tokens=20, logprobs=2, ignore_eos=True),
        )
        outputs = run(engine)["alone"]
        engine.close()
        return [entry.logprob for output in outputs for entry in output.logprobs or []]

    alone = values(make_engine(folder, deterministic=True))
    answer = write(make_engine(folder), temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    assert values(knowing_engine(folder, {"alone": answer}, deterministic=True)) == alone  # type: ignore[dict-item]


# ------------------------------------------------------------------------------------------------------- distributions
def test_what_is_sampled_is_distributed_as_without_drafts(tmp_path: Path) -> None:
    """Chi-square over seeds, of the second and third token together: the draft model's own distribution is another."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "head_dim": 8,
        "vocab_size": 5,
        "pad_token_id": 0,
        "eos_token_id": 4,
    }
    target = tiny_checkpoint("llama", tmp_path / "target", **sizes)
    draft = tiny_checkpoint("llama", tmp_path / "draft", seed=1, num_hidden_layers=1, **sizes)
    count = 600
    found = []
    for speculate, seeds in (("off", range(count)), (str(draft), range(count, 2 * count))):
        engine = make_engine(
            target, speculate, max_running=60, draft_tokens=3, max_waiting=count, prefix_cache=False
        )
        for seed in seeds:
            engine.add(
                seed, [1, 2], Sampling(temperature=4.0, seed=seed, max_tokens=4, ignore_eos=True)
            )
        answers = [tuple(ids_of(outputs)) for outputs in run(engine).values()]
        assert len(answers) == count
        found.append(Counter(answer[1:3] for answer in answers))
        if speculate != "off":
            stats = engine.stats()
            assert 0.2 < stats["accepted_tokens"] / stats["drafted_tokens"] < 0.95
        engine.close()
    assert chi_square_p(*found) > 1e-3
    assert (
        chi_square_p(
            found[0], Counter({pair: n + 60 * (pair[0] == 0) for pair, n in found[1].items()})
        )
        < 1e-3
    )


def chi_square_p(one: Counter[Any], other: Counter[Any]) -> float:
    """That both were drawn from one distribution: of what was seen at least ten times; by Wilson and Hilferty."""
    cells = [cell for cell in one | other if one[cell] + other[cell] >= 10]
    assert len(cells) > 4
    totals = one.total(), other.total()
    statistic = sum(
        (seen[cell] - expected) ** 2 / expected
        for seen, total in zip((one, other), totals, strict=True)
        for cell in cells
        for expected in [(one[cell] + other[cell]) * total / sum(totals)]
    )
    degrees = len(cells) - 1
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


def test_a_draft_model_draws_with_the_request_s_noise(folder: Path) -> None:
    """The same model as draft is right everywhere under sampling too, penalties and filters included."""
    engine = make_engine(folder, str(folder), draft_tokens=4)
    for key, wish in enumerate(WISHES[:5]):
        engine.add(key, prompt_of(key), Sampling(max_tokens=21, ignore_eos=True, **wish))
    run(engine)
    stats = engine.stats()
    assert stats["accepted_tokens"] == stats["drafted_tokens"] > 60


# --------------------------------------------------------------------------------------------------------------- faults
def test_nan_behind_a_wrong_guess_hurts_nobody(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token 5 has a NaN in its embedding: guessed wrongly it must not fail the request, nor what gets its blocks."""
    monkeypatch.setattr(checkpoint, "check_weights", lambda *_: None)
    poisoned = tmp_path / "poisoned"
    tiny_checkpoint("llama", poisoned, hidden_size=32, head_dim=8, tie_word_embeddings=False)
    weights = load_file(poisoned / "model.safetensors")
    weights["model.embed_tokens.weight"][5, 3] = torch.nan
    save_file(weights, poisoned / "model.safetensors", metadata={"format": "pt"})
    wish: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "seed": 1, "ignore_eos": True}
    wish["logit_bias"] = {5: -100.0}
    answer = write(make_engine(poisoned, weights="float32", num_blocks=16), **wish)
    guesses = {"alone": [token if at % 4 else 5 for at, token in enumerate(answer)]}
    speculation = Speculation(Knowing(guesses, 1.0), SpeculationController(5, always=True))  # type: ignore[arg-type]
    engine = make_engine(poisoned, "ngram", speculation, num_blocks=16)
    assert write(engine, **wish) == answer
    assert write(engine, [1, 2, 3] * 12, **wish) == write(
        make_engine(poisoned, num_blocks=16), [1, 2, 3] * 12, **wish
    )


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), ValueError("a bug")])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_drafter_that_fails_costs_no_token(
    overlap: bool,
    error: Exception,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine(folder, str(folder), draft_tokens=4, overlap=overlap)
    drafts: Any = engine.speculation.drafts if engine.speculation else None
    forward, calls = drafts.runner.forward, itertools.count()

    def failing(works: Sequence[Work]) -> Any:
        if 3 <= next(calls) < 6:
            raise error
        return forward(works)

    forget = Mock(wraps=drafts.forget)
    monkeypatch.setattr(drafts.runner, "forward", failing)
    monkeypatch.setattr(drafts, "forget", forget)
    expected = make_engine(folder)
    for one in (engine, expected):
        for key in range(3):
            one.add(key, prompt_of(key), Sampling(max_tokens=20, **GREEDY))
    ours, theirs = (
        {key: ids_of(outputs) for key, outputs in run(one).items()} for one in (engine, expected)
    )
    assert ours == theirs
    assert next(calls) > 6
    assert forget.call_count > 3, "what it kept may be damaged"
    assert engine.stats()["accepted_tokens"] > 0
    assert len([one for one in caplog.records if one.exc_info]) == 1
    engine.close()


@pytest.mark.parametrize(
    ("error", "on_gpu"), [(InternalError("a block is lost"), False), (ValueError("a bug"), True)]
)
def test_a_drafter_that_may_have_damaged_the_engine_ends_it(
    error: Exception, on_gpu: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder, "ngram")
    drafts: Any = engine.speculation.drafts if engine.speculation else None
    monkeypatch.setattr(engine.runner, "on_gpu", on_gpu)
    monkeypatch.setattr(drafts, "propose", Mock(side_effect=error))
    engine.add("one", PROMPT, Sampling(max_tokens=9, **GREEDY))
    with pytest.raises(type(error)):
        run(engine)


def test_nobody_gives_way_for_a_draft(folder: Path) -> None:
    """One block is free: drafts get it, or less, and nothing is preempted that would not be without them."""
    answer = write(make_engine(folder, num_blocks=7), [1] * 8, max_tokens=16, **GREEDY)
    engine = knowing_engine(folder, {"alone": answer}, 1.0, num_blocks=6, draft_tokens=16)  # type: ignore[dict-item]
    assert write(engine, [1] * 8, max_tokens=16, **GREEDY) == answer
    assert engine.stats()["preemptions"] == 0


def test_a_cancel_in_the_middle_leaves_nothing(folder: Path, small: Path) -> None:
    for speculate in ("ngram", str(small)):
        engine = make_engine(folder, speculate)
        for key in range(4):
            engine.add(key, prompt_of(key), Sampling(max_tokens=40, **GREEDY))
        for _ in range(5):
            engine.step()
        for key in range(4):
            engine.cancel(key)
            engine.check_integrity()
        assert engine.stats()["blocks_free"] == engine.stats()["blocks_total"]
        engine.close()


def test_a_draft_model_without_room_guesses_for_some(folder: Path, small: Path) -> None:
    engine = make_engine(folder, str(small))
    drafts: Any = engine.speculation.drafts if engine.speculation else None
    drafts._pool._empty[:] = drafts._pool._empty[:6]
    expected = make_engine(folder)
    for one in (engine, expected):
        for key in range(5):
            one.add(key, prompt_of(key), Sampling(max_tokens=20, **GREEDY))
    ours, theirs = (
        {key: ids_of(outputs) for key, outputs in stepped(one).items()}
        for one in (engine, expected)
    )
    assert ours == theirs
    assert engine.stats()["drafted_tokens"] > 0


def stepped(engine: Engine) -> Outputs:
    """As `run`, of an engine whose pools the test has changed."""
    outputs: Outputs = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.key, []).append(output)
    return outputs


# ------------------------------------------------------------------------------------------------------------ refusals
def test_what_cannot_draft_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        make_engine(folder, "nowhere")
    assert raised.value.param == "speculate"
    for count in (0, 33):
        with pytest.raises(ConfigError) as raised:
            make_engine(folder, "ngram", draft_tokens=count)
        assert raised.value.param == "draft_tokens"
    other = tiny_checkpoint("llama", tmp_path / "other", hidden_size=32, head_dim=8, vocab_size=300)
    with refuses(ConfigError, "speculate"):
        make_engine(folder, str(other))
    respelled = tiny_checkpoint("llama", tmp_path / "respelled", hidden_size=32, head_dim=8)
    text = (respelled / "tokenizer.json").read_text()
    (respelled / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|start|>"))
    with refuses(ConfigError, "speculate"):
        make_engine(folder, str(respelled))
    (respelled / "tokenizer.json").write_text(text)
    weights = load_file(respelled / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, respelled / "model.safetensors", metadata={"format": "pt"})
    with refuses(ConfigError, "speculate"):
        make_engine(folder, str(respelled))


def test_a_recurrent_model_is_refused_by_name(tmp_path: Path, folder: Path) -> None:
    from support.families import language_families as families

    lfm2 = families.write_checkpoint("Lfm2ForCausalLM", tmp_path / "lfm2")
    with refuses(ConfigError, "speculate"):
        make_engine(lfm2, "ngram")


def test_forgotten_requests_are_noticed(folder: Path) -> None:
    engine = make_engine(folder, "ngram")
    engine.add("a", PROMPT * 3, Sampling(max_tokens=9, **GREEDY))
    for _ in range(3):
        engine.step()
    assert engine.speculation is not None
    with pytest.raises(InternalError):
        engine.speculation.check_integrity(set())


def test_a_work_counts_its_draft() -> None:
    request = Request("a", 0, [1, 2, 3], Sampling(), max_length=9)
    request.num_computed = 2
    work = Work(request, 3, (8, 9))
    assert (work.draws, work.span, work.tokens) == (True, (2, 5), [3, 8, 9])
    assert [(row.num_output, row.tokens) for row in work.rows] == [
        (0, [1, 2, 3]),
        (1, [1, 2, 3, 8]),
        (2, [1, 2, 3, 8, 9]),
    ]


# -------------------------------------------------------------------------------------------------------- n-gram index
def drafted(tokens: list[int], count: int) -> list[int]:
    request = Request("a", 0, tokens, Sampling(), max_length=1000)
    return NgramDrafts().propose([(request, count)]).get(request, [])


def test_the_longest_match_is_continued() -> None:
    assert drafted([1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3], 3) == [4, 9, 2]
    assert drafted([7, 7, 1, 2, 3], 3) == []
    assert drafted([5], 3) == []
    assert drafted([4, 6, 4, 6, 4, 6], 5) == [4, 6, 4, 6, 4]
    assert drafted([2, 3, 1, 2, 3, 8, 2, 3], 1) == [8]


def test_behind_a_token_that_was_exchanged_it_goes_on() -> None:
    text, drafts = list(range(10, 40)), NgramDrafts()
    request = Request("a", 0, [*text, 5, 6], Sampling(), max_length=1000)
    found = []
    for token in [*text[:12], 7, *text[13:20], 8, 9, *text[22:24], 1, 2, 3]:
        request.append(token)
        found.append(drafts.propose([(request, 2)]).get(request, []))
    assert found[0] == []  # one token is no match
    assert found[1:12] == [text[i : i + 2] for i in range(2, 13)]
    assert found[12:20] == [text[i : i + 2] for i in range(13, 21)]  # behind the 7
    assert found[20:24] == [text[i : i + 2] for i in range(21, 25)]  # behind the 8 and the 9
    assert found[24:] == [text[25:27], [], []]  # most of the last ones are others


@given(
    tokens=st.lists(st.integers(0, 3), min_size=2, max_size=60),
    cut=st.integers(1, 59),
    count=st.integers(1, 9),
)
def test_an_index_that_grew_says_what_a_new_one_says(
    tokens: list[int], cut: int, count: int
) -> None:
    drafts = NgramDrafts()
    request = Request("a", 0, tokens[:cut], Sampling(), max_length=1000)
    drafts.propose([(request, count)])
    for token in tokens[cut:]:
        request.append(token)
        drafts.propose([(request, count)])
    grown = drafts.propose([(request, count)]).get(request, [])
    new = drafted(request.tokens, count)
    if grown and not new:  # what it knows from before: most of eight tokens are those at the end
        tokens = request.tokens
        near = [
            p
            for p in range(8, len(tokens))
            if sum(tokens[p - n] == tokens[-n] for n in range(1, 9)) > 4
        ]
        assert grown[0] in [tokens[place] for place in near]
    else:
        assert grown == new
    if new:
        pair = request.tokens[-2:]
        assert any(
            [*pair, grown[0]] == request.tokens[i : i + 3] for i in range(len(request.tokens) - 2)
        )
