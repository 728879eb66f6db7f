"""Replies that are held to grammars, by the engine: with random weights, which write what they are not kept from."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.engine.outputs import StepOutput
from motet_llm.grammar.grammar import Grammar
from motet_llm.grammar.token_spelling import Spelling
from motet_shared import messages
from motet_shared.errors import BadRequest
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import EOS, tiny_checkpoint

PROMPT = [10, 20, 30, 40, 50]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
Outputs = dict[Hashable, list[StepOutput]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"), hidden_size=32, head_dim=8)


@pytest.fixture(scope="module")
def spelling(folder: Path) -> Spelling:
    return Spelling.load(str(folder), 259, [EOS])


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return make_engine(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def make_engine(folder: Path, **options: Any) -> Engine:
    defaults = {
        "block_size": 4,
        "num_blocks": 400,
        "token_budget": 32,
        "max_running": 8,
        "deterministic": True,
    }
    return Engine(
        EngineConfig(model=str(folder), dtype="float32", threads=1, **{**defaults, **options})
    )


def compiled(spelling: Spelling, kind: Any, text: Any) -> Grammar:
    text = text if isinstance(text, str) else json.dumps(text)
    return Grammar(messages.Grammar(kind=kind, text=text, param="response_format"), spelling)


def run(engine: Engine, *, overlaps: bool = False) -> Outputs:
    found: Outputs = {}

    def note(outputs: list[StepOutput]) -> None:
        for output in outputs:
            found.setdefault(output.key, []).append(output)

    for _ in range(5000):
        if not engine.has_work:
            break
        note(engine.step(note) if overlaps else engine.step())
        engine.check_integrity()
    return found


def ids_of(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.ids]


def write(
    engine: Engine, grammar: Grammar | None, output: tuple[int, ...] = (), **options: Any
) -> tuple[list[int], str]:
    """The tokens of one reply, those of `output` not among them, and why it ended."""
    grammar_state = None if grammar is None else grammar.start(output)
    engine.add(
        "one",
        PROMPT,
        Sampling(**{"max_tokens": 60, **options}),
        output=output,
        grammar_state=grammar_state,
    )
    outputs = run(engine)["one"]
    last = outputs[-1]
    if last.error is not None:
        raise last.error
    return ids_of(outputs), last.finish or ""


# ---------------------------------------------------------------------------------------------------- what is written
exact = st.integers(-(2**53), 2**53)  # llguidance reads numbers of an enum as float64
scalars: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda least, more: {"type": "integer", "minimum": least, "maximum": least + more},
        *[st.integers(0, 500)] * 2,
    ),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 5)),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(exact, st.text(max_size=4)), min_size=1, max_size=4),
    ),
    st.just({"type": "string", "pattern": "^[a-c]{1,3}-[0-9]$"}),
)


def compound(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def thing(properties: dict[str, Any], required: bool) -> dict[str, Any]:
        needed = [*properties] if required else [*properties][:1]
        return {
            "type": "object",
            "properties": properties,
            "required": needed,
            "additionalProperties": False,
        }

    names = st.text('abc "\\é', min_size=1, max_size=3)
    return st.one_of(
        st.builds(thing, st.dictionaries(names, inner, max_size=3), st.booleans()),
        st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most},
            inner,
            st.integers(0, 3),
        ),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=2)),
    )


schemas = st.recursive(scalars, compound, max_leaves=4)
relaxed = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


@relaxed
@given(schema=schemas, seed=st.integers(0, 1000), temperature=st.sampled_from([0.0, 1.0]))
def test_whatever_the_schema_a_reply_that_ends_satisfies_it(
    engine: Engine,
    spelling: Spelling,
    tokenizer: Tokenizer,
    schema: dict[str, Any],
    seed: int,
    temperature: float,
) -> None:
    grammar = compiled(spelling, "json_schema", schema)
    ids, finish = write(engine, grammar, seed=seed, temperature=temperature, max_tokens=200)
    if finish == "stop":
        document = json.loads(tokenizer.decode(ids))
        assert jsonschema_rs.is_valid(schema, document), (schema, document)
    else:  # a number, a string or a list of some length
        assert len(ids) == 200
        assert grammar.start(ids)


@pytest.mark.parametrize(
    "expression", [r"[a-z]{2,5}@[a-z]{2,4}\.(com|org)", r"\d{4}-\d\d-\d\d", r"(ab|cd){1,3}x?"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_expression_matches_the_whole_reply(
    engine: Engine, spelling: Spelling, tokenizer: Tokenizer, expression: str, temperature: float
) -> None:
    grammar = compiled(spelling, "regex", expression)
    for seed in range(5):
        ids, finish = write(engine, grammar, seed=seed, temperature=temperature)
        assert re.fullmatch(expression, tokenizer.decode(ids))
        assert finish == "stop"


def test_a_choice_is_one_of_them(engine: Engine, spelling: Spelling, tokenizer: Tokenizer) -> None:
    choices = ["red", "redder", "grün", "Zürich 👩‍🚀"]
    grammar = compiled(spelling, "choice", choices)
    written = {
        tokenizer.decode(write(engine, grammar, seed=seed, temperature=20.0)[0])
        for seed in range(20)
    }
    assert written <= set(choices)
    assert len(written) > 1


def test_a_cut_reply_is_the_beginning_of_one(
    engine: Engine, spelling: Spelling, tokenizer: Tokenizer
) -> None:
    grammar = compiled(spelling, "json_schema", PERSON)
    whole, _ = write(engine, grammar, seed=3)
    ids, finish = write(engine, grammar, seed=3, max_tokens=8)
    assert (ids, finish) == (whole[:8], "length")
    with pytest.raises(json.JSONDecodeError):
        json.loads(tokenizer.decode(ids))


# ------------------------------------------------------------------------------------------------- the other wishes
def test_min_tokens_keeps_a_reply_from_ending_where_it_may(
    engine: Engine, spelling: Spelling
) -> None:
    grammar = compiled(spelling, "regex", "[ab]{1,30}")
    eager = {EOS: 100.0}
    ids, finish = write(engine, grammar, logit_bias=eager)
    assert (len(ids), finish) == (1, "stop")
    ids, finish = write(engine, grammar, logit_bias=eager, min_tokens=7)
    assert (len(ids), finish) == (7, "stop")
    ids, finish = write(engine, grammar, logit_bias=eager, ignore_eos=True)
    assert (len(ids), finish) == (30, "stop")  # the end of the grammar is no token
    ids, finish = write(engine, compiled(spelling, "regex", "ab"), min_tokens=50)
    assert (len(ids), finish) == (2, "stop")


def test_bias_and_penalties_choose_among_what_is_allowed(
    engine: Engine, spelling: Spelling, tokenizer: Tokenizer
) -> None:
    grammar = compiled(spelling, "regex", "[ab]{6}")
    a, b, z = (tokenizer.encode(text).ids[0] for text in "abz")
    ids, _ = write(engine, grammar, temperature=0, logit_bias={b: 50.0, z: 100.0})
    assert ids == [b] * 6
    ids, _ = write(
        engine,
        grammar,
        temperature=0,
        logit_bias={b: 1.0, a: 1.0},
        frequency_penalty=2.0,
        presence_penalty=2.0,
    )
    assert set(ids) == {a, b}


def test_a_stop_token_that_is_text_ends_a_reply_as_ever(
    engine: Engine, spelling: Spelling, tokenizer: Tokenizer
) -> None:
    (b,) = tokenizer.encode("b").ids
    grammar = compiled(spelling, "regex", "aab[xy]")
    ids, finish = write(engine, grammar, stop_token_ids=[b])
    assert (tokenizer.decode(ids), finish) == ("aa", "stop")


def test_log_probabilities_stay_the_model_s_own(engine: Engine, spelling: Spelling) -> None:
    grammar = compiled(spelling, "regex", "[ab]{3}")
    engine.add("free", PROMPT, Sampling(temperature=0, max_tokens=1, logprobs=3))
    engine.add(
        "held",
        PROMPT,
        Sampling(temperature=0, max_tokens=1, logprobs=3),
        grammar_state=grammar.start(),
    )
    outputs = run(engine)
    (free,), (held,) = (outputs[key][0].logprobs or [] for key in ("free", "held"))
    assert [top[0] for top in held.top] == [top[0] for top in free.top]
    assert held.logprob < free.logprob


# ----------------------------------------------------------------------------------- company, moves, preemption, faults
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_mixed_batch_changes_nobody(folder: Path, spelling: Spelling, overlaps: bool) -> None:
    """Each request alone, then all together in a pool so small that some are preempted."""
    grammars = [
        compiled(spelling, "json_schema", PERSON),
        None,
        compiled(spelling, "regex", "[a-f0-9]{24}"),
        None,
    ]
    wishes = [
        Sampling(seed=seed, temperature=temperature, max_tokens=40, ignore_eos=grammar is None)
        for seed, temperature in ((1, 0.0), (2, 1.0))
        for grammar in grammars
    ]
    engine = make_engine(folder, num_blocks=40, overlap=overlaps)

    def add(key: int) -> None:
        grammar = grammars[key % len(grammars)]
        grammar_state = None if grammar is None else grammar.start()
        engine.add(key, [*PROMPT, key], wishes[key], grammar_state=grammar_state)

    alone = []
    for key in range(len(wishes)):
        add(key)
        alone.append(ids_of(run(engine)[key]))
    assert len({tuple(ids) for ids in alone}) == len(alone)
    for key in range(len(wishes)):
        add(key)
    together = run(engine, overlaps=overlaps)
    assert [ids_of(together[key]) for key in range(len(wishes))] == alone
    assert engine.stats()["preemptions"] > 0
    assert engine.stats()["masked_steps"] > 0
    assert engine.stats()["mask_seconds"] > 0
    engine.close()


def test_a_move_goes_on_where_the_reply_was(engine: Engine, spelling: Spelling) -> None:
    grammar = compiled(spelling, "json_schema", PERSON)
    whole, finish = write(engine, grammar, seed=11)
    assert finish == "stop"
    for cut in range(len(whole) + 1):
        rest, finish = write(engine, grammar, tuple(whole[:cut]), seed=11)
        assert (rest, finish) == (whole[cut:], "stop")


def test_a_dead_end_is_told_to_its_request_and_the_others_go_on(
    engine: Engine, spelling: Spelling, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, _ = write(engine, None, seed=5)
    grammar_state = compiled(spelling, "regex", "[a-z]{50}").start()
    fills = 0

    def fill(row_W: Any, stop_ids: Any) -> None:
        nonlocal fills
        fills += 1
        row_W[:] = 0 if fills > 3 else 0xFFFFFFFF

    class Dead:
        """A grammar that finds no token after three."""

        ended = may_end = False
        accept = staticmethod(lambda tokens: True)
        error = staticmethod(grammar_state.error)

    Dead.fill = staticmethod(fill)  # type: ignore[attr-defined]
    engine.add("dead", PROMPT, Sampling(max_tokens=60), grammar_state=Dead())  # type: ignore[arg-type]
    engine.add("one", PROMPT, Sampling(max_tokens=60, seed=5))
    outputs = run(engine)
    error = outputs["dead"][-1].error
    assert isinstance(error, BadRequest)
    assert "after 3 tokens" in error.message
    assert error.param == "response_format"
    assert ids_of(outputs["one"]) == free
