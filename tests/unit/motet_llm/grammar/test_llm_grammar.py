"""Grammars on their own: what compiles, what is refused and how, which tokens may come next."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from motet_llm.grammar import termination
from motet_llm.grammar.compiler import GrammarCache
from motet_llm.grammar.grammar import Grammar, GrammarState, mask_words
from motet_llm.grammar.termination import lark_ends, schema_ends
from motet_llm.grammar.token_spelling import Spelling
from motet_shared import messages
from motet_shared.errors import BadRequest, DeadlineExceeded, UnsupportedParameter
from support.checkpoints import tiny_tokenizers
from support.running.refusals import refuses

VOCAB = 420
EOS = tiny_tokenizers.EOS
TREE = {
    "type": "object",
    "properties": {"next": {"$ref": "#"}},
    "required": ["next"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def spelling() -> Spelling:
    return Spelling(tiny_tokenizers.byte_level(), VOCAB, [EOS])


def schema(**fields: Any) -> messages.Grammar:
    return messages.Grammar(kind="json_schema", text=json.dumps(fields), param="response_format")


def wish(kind: Any, text: str) -> messages.Grammar:
    return messages.Grammar(kind=kind, text=text, param="structured_outputs." + kind)


def allowed(
    grammar_state: GrammarState, stop_ids: frozenset[int] = frozenset({EOS}), vocab: int = VOCAB
) -> set[int]:
    row_W = np.zeros(mask_words(vocab), np.uint32)
    grammar_state.fill(row_W, stop_ids)
    bits = np.unpackbits(row_W.view(np.uint8), bitorder="little")[:vocab]
    return set(np.flatnonzero(bits).tolist())


def spelled(text: str, tokenizer: Tokenizer | None = None) -> list[int]:
    return list(
        (tokenizer or tiny_tokenizers.byte_level()).encode(text, add_special_tokens=False).ids
    )


def takes(grammar: Grammar, text: str) -> bool:
    """Whether the whole text is a sentence."""
    grammar_state = grammar.start()
    return grammar_state.accept(spelled(text)) and grammar_state.may_end


# ------------------------------------------------------------------------------------------------------------ grammars
@pytest.mark.parametrize(
    ("request_", "good", "bad"),
    [
        (
            schema(type="object"),
            ['{"a": [1, {"b": null}]}', "{}", '{"a":1}'],
            ["[]", '{ "a": 1}', '{"a" : 1}', '{"a":  1}', '{\n  "a": 1\n}', '{"a": 1 }  ', "{"],
        ),
        (schema(enum=["yes", 3]), ['"yes"', "3"], ["yes", "33"]),
        (schema(type="string", maxLength=2), ['"Zü"'], ['"abc"']),
        (wish("regex", r"[a-z]+/\d{2}"), ["ab/12"], ["ab/1", "/12", "ab/123"]),
        (wish("regex", r"^a|b$"), ["a", "b"], ["ab"]),
        (
            wish("choice", '["red", "redder", "gr\\u00fcn \\"x\\""]'),
            ["red", "redder", 'grün "x"'],
            ["redd", "green"],
        ),
        (
            wish("grammar", 'start: "a" inner? \ninner: "(" start ")"'),
            ["a", "a(a)", "a(a(a))"],
            ["a(", "a()"],
        ),
        (wish("grammar", 'root ::= "a" digit+\ndigit ::= [0-9]'), ["a12"], ["a", "12"]),
    ],
)
def test_what_is_a_sentence(
    request_: messages.Grammar, good: list[str], bad: list[str], spelling: Spelling
) -> None:
    grammar = Grammar(request_, spelling)
    assert [takes(grammar, text) for text in good] == [True] * len(good)
    assert [takes(grammar, text) for text in bad] == [False] * len(bad)


def test_a_reply_may_end_where_the_grammar_does_and_ends_where_nothing_follows(
    spelling: Spelling,
) -> None:
    grammar_state = Grammar(wish("regex", "ab?"), spelling).start()
    (first,) = spelled("a")
    assert EOS not in allowed(grammar_state)
    assert first in allowed(grammar_state)
    assert grammar_state.accept([first])
    assert (grammar_state.may_end, grammar_state.ended) == (True, False)
    assert allowed(grammar_state) == {EOS, *spelled("b")}
    assert allowed(grammar_state, frozenset()) == set(spelled("b"))  # ignore_eos
    assert grammar_state.accept(spelled("b"))
    assert grammar_state.ended


def test_what_no_token_can_go_on_with_is_told_in_plain_words() -> None:
    without_b = Spelling(tiny_tokenizers.byte_level(), VOCAB, [EOS, *spelled("b")])
    grammar_state = Grammar(wish("regex", "a+b"), without_b).start()
    assert grammar_state.accept(spelled("a"))
    assert allowed(grammar_state) == set(spelled("a"))
    stuck = Grammar(wish("regex", "ab"), without_b).start()
    assert stuck.accept(spelled("a"))
    assert not allowed(stuck)
    told = stuck.error("after 1 token").message
    assert (
        told
        == "`structured_outputs.regex` ab: no token of this model can follow after 1 token; simplify it"
    )


def test_special_tokens_are_no_text_and_tags_of_tools_are(spelling: Spelling) -> None:
    free = allowed(Grammar(wish("regex", r"(.|\n)+"), spelling).start())
    tokenizer = tiny_tokenizers.byte_level()
    assert free.isdisjoint({0, 1, 2})
    assert {tokenizer.token_to_id("<tool_call>"), tokenizer.token_to_id("</tool_call>")} <= free
    assert max(free) < tokenizer.get_vocab_size()  # rows of the model beyond the tokenizer's
    assert Grammar(wish("regex", "<tool_call>x"), spelling).start().accept(spelled("<tool_call>x"))


def test_a_grammar_reads_what_sentencepiece_writes() -> None:
    tokenizer = tiny_tokenizers.sentencepiece()
    spelling = Spelling(tokenizer, tokenizer.get_vocab_size(), [EOS])
    grammar = Grammar(wish("regex", " the red é"), spelling)
    ids = [
        tiny_tokenizers.id_of(tokenizer, token)
        for token in ("▁the", "▁red", "▁", "<0xC3>", "<0xA9>")
    ]
    assert grammar.start(ids).ended


def test_a_reply_goes_on_after_its_beginning_or_is_refused(spelling: Spelling) -> None:
    grammar = Grammar(wish("choice", '["abc", "xyz"]'), spelling)
    whole, moved = grammar.start(), grammar.start(spelled("ab"))
    assert whole.accept(spelled("ab"))
    assert allowed(whole) == allowed(moved) == set(spelled("c"))
    with refuses(BadRequest, "output") as raised:
        grammar.start(spelled("ax"))
    assert raised.value.param == "output"


# ------------------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    "request_",
    [
        schema(type="string", format="moon"),
        schema(type="strin"),
        schema(type="integer", minimum=5, maximum=3),
        schema(**{"$ref": "#/$defs/none"}),
        schema(type="string", pattern="(?=a)b"),
        schema(**TREE),
        messages.Grammar(kind="json_schema", text="{", param="p"),
        messages.Grammar(kind="json_schema", text="[1]", param="p"),
        wish("regex", "(open"),
        wish("regex", ""),
        wish("regex", r"[^\s\S]"),
        wish("choice", "[]"),
        wish("choice", "[3]"),
        wish("grammar", 'start: "a" other'),
        wish("grammar", 'start: "a" start'),
        wish("grammar", 'begin: "a"'),
        wish("grammar", 'root ::= "a'),
        wish("grammar", " "),
        wish("regex", "a" * 300_000),
    ],
)
def test_a_refusal_names_the_field_and_a_remedy(
    request_: messages.Grammar, spelling: Spelling
) -> None:
    with refuses(BadRequest, request_.param) as raised:
        Grammar(request_, spelling)
    assert f"`{request_.param}`" in raised.value.message
    assert re.search(r"; \w+ .*$", raised.value.message)  # what to do about it
    assert len(raised.value.message) < 500


def test_keywords_that_are_not_supported_are_refused_by_name(spelling: Spelling) -> None:
    with pytest.raises(UnsupportedParameter, match="uniqueItems") as raised:
        Grammar(schema(type="array", items={"type": "integer"}, uniqueItems=True), spelling)
    assert raised.value.param == "response_format"


@pytest.mark.parametrize(
    "request_",
    [wish("regex", "(a{1000}){1000}"), wish("grammar", 'start: "ab" more\nmore: "c" more | "d"')],
)
def test_what_is_forced_is_not_looked_ahead_for(
    request_: messages.Grammar, spelling: Spelling
) -> None:
    """A million forced characters would take seconds of every step."""
    grammar_state = Grammar(request_, spelling).start()
    began = time.thread_time()
    for _ in range(20):
        (token, *_) = sorted(allowed(grammar_state))
        assert grammar_state.accept([token])
    assert time.thread_time() - began < 5


def test_a_grammar_whose_steps_take_too_long_is_refused(spelling: Spelling) -> None:
    with refuses(BadRequest, "response_format"):
        Grammar(schema(type="object"), spelling, step_seconds=-1.0)


def test_a_vocabulary_that_lacks_a_character_is_told() -> None:
    tokenizer = tiny_tokenizers.sentencepiece()
    size = tokenizer.get_vocab_size()
    blind = Spelling(tokenizer, 3, [EOS])  # special tokens only
    with refuses(BadRequest, "structured_outputs.choice"):
        Grammar(wish("choice", '["a"]'), blind)
    assert Grammar(wish("choice", '["a"]'), Spelling(tokenizer, size, [EOS]))


def test_a_tokenizer_that_cannot_be_followed_is_told(tmp_path: Any) -> None:
    tokenizer = tiny_tokenizers.metaspace()
    with pytest.raises(UnsupportedParameter):
        Spelling(tokenizer, tokenizer.get_vocab_size())
    with pytest.raises(UnsupportedParameter):
        Spelling.load(str(tmp_path), 10, [])


# ------------------------------------------------------------------------------------------------------------- endless
@pytest.mark.parametrize(
    ("document", "ends"),
    [
        (True, True),
        (False, False),
        (TREE, False),
        ({"$ref": "#"}, False),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            },
            False,
        ),
        ({**TREE, "required": []}, True),
        ({**TREE, "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}, True),
        ({"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, True),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, False),
        ({"allOf": [{"type": "object"}, {"$ref": "#"}]}, False),
        ({"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["x"]}, False),
        ({"$ref": "https://elsewhere.example/schema"}, True),
        ({"$ref": "#/$defs/none"}, True),
    ],
)
def test_schemas_that_never_end_are_found(document: Any, ends: bool) -> None:
    assert schema_ends(document) is ends


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ('start: "a" start', False),
        ('start: "a" start | "b"', True),
        ('start: "a" start?', True),
        ('start: ("a" start)*', True),
        ('start: ("a" start)+', False),
        ('start: "a" start{0,3}', True),
        ('start: "a" start{2}', False),
        ('start: a\na: b "x"\nb: "y" a', False),
        ('start: a\n// a: "x"\na[lazy]: b "x" # "|"\n  | b\nb: /[a|b]+/', True),
        ('start: %json {"$ref": "#"}', False),
        ('start: %json {"type": "object"} "x"', True),
        ('%ignore " "\nstart: "a".."c" start', False),
        ("start: UNDEFINED other", True),
        ('start: T\nT: "a" & ~/b/', True),
        ("start: a::b", True),  # not understood: for the compiler
    ],
)
def test_rules_that_never_end_are_found(text: str, ends: bool) -> None:
    assert lark_ends(text) is ends


def test_looking_for_an_end_is_quick_however_long_the_schema() -> None:
    defs = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(3000)} | {
        "d3000": {"type": "string"}
    }
    began = time.thread_time()
    assert schema_ends({"$ref": "#/$defs/d0", "$defs": defs})
    assert time.thread_time() - began < 10


def test_a_schema_that_takes_too_many_evaluations_is_taken_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defs = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(40)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**defs, "d40": {"$ref": "#"}}}
    assert not schema_ends(schema)
    monkeypatch.setattr(termination, "_MOST_EVALUATIONS", 30)
    assert schema_ends(schema)


# ------------------------------------------------------------------------------------------------- compiled in the back
async def test_what_is_compiled_is_kept_and_counted(spelling: Spelling) -> None:
    grammars = GrammarCache(lambda: spelling, timeout=60, capacity=2)
    try:
        request = schema(type="object")
        await grammars.grammar_state(request)
        grammar_state = await grammars.grammar_state(request, spelled('{"a'))
        assert not grammar_state.may_end
        stats = grammars.stats()
        assert (stats["grammars_compiled"], stats["grammar_hits"], stats["grammars_waiting"]) == (
            1,
            1,
            0,
        )
        assert stats["grammar_seconds"] > 0
        for text in ("a", "b", "c"):
            await grammars.grammar_state(wish("regex", text))
        await grammars.grammar_state(request)  # three others came since, and two are kept
        assert grammars.stats()["grammars_compiled"] == 5
    finally:
        grammars.close()


async def test_a_refusal_and_a_limit_reach_their_request_only(spelling: Spelling) -> None:
    grammars = GrammarCache(lambda: spelling, timeout=60, capacity=8)
    try:
        with refuses(BadRequest, "structured_outputs.regex"):
            await grammars.grammar_state(wish("regex", "(open"))
        with pytest.raises(DeadlineExceeded):
            await grammars.grammar_state(wish("regex", "abc"), deadline=time.monotonic() - 1)
        assert await grammars.grammar_state(wish("regex", "abc"))
        assert grammars.stats()["grammars_refused"] == 1
        assert grammars.stats()["grammars_waiting"] == 0
    finally:
        grammars.close()


async def test_a_grammar_that_compiles_for_too_long_is_refused(
    spelling: Spelling, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow() -> Spelling:
        time.sleep(0.5)
        return spelling

    grammars = GrammarCache(slow, timeout=0.1, capacity=8)
    try:
        with refuses(BadRequest, "structured_outputs.regex"):
            await grammars.grammar_state(wish("regex", "abc"))
    finally:
        grammars.close()
