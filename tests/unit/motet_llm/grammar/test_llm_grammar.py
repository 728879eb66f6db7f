"""Grammars on their own: what compiles, what is refused and how, which tokens may come next."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from motet_llm.grammar import compiler, termination
from motet_llm.grammar.compiler import GrammarCache
from motet_llm.grammar.grammar import Grammar, GrammarState, mask_words
from motet_llm.grammar.lark import lark
from motet_llm.grammar.levels import MOST_LEVELS, count_levels
from motet_llm.grammar.termination import lark_ends, schema_ends
from motet_llm.grammar.token_spelling import Spelling
from motet_shared import messages
from motet_shared.errors import (
    BadRequest,
    DeadlineExceeded,
    Overloaded,
    UnsupportedParameter,
)
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
        wish("grammar", 'root ::= "a\\'),
        wish("grammar", "root ::= other"),
        wish("grammar", 'other ::= "a"'),
        wish("grammar", 'root ::= "a"\nstart ::= "b"'),
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


# -------------------------------------------------------------------------------------------------- long and deep texts
@pytest.mark.parametrize(
    "text", ['start: "a"{' + " " * 1500, "start: " + "a[" * 60_000 + ","], ids=["count", "head"]
)
def test_no_text_is_read_many_times(text: str) -> None:
    began = time.thread_time()
    assert lark_ends(text)
    count_levels(text)
    assert time.thread_time() - began < 1


@pytest.mark.parametrize("is_forward", [True, False])
def test_many_rules_of_gbnf_are_translated_quickly(is_forward: bool) -> None:
    rules = [f"r{n} ::= r{n + 1}" for n in range(5000)][:: 1 if is_forward else -1]
    began = time.thread_time()
    text = lark(wish("grammar", "\n".join(["root ::= r0", *rules, 'r5000 ::= "a"'])))
    assert "start: R0" in text
    assert time.thread_time() - began < 5


def test_embedded_schemas_share_their_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "start: " + "%json {} " * 10 + '%json {"$ref": "#"}'
    assert not lark_ends(text)
    monkeypatch.setattr(termination, "_MOST_EVALUATIONS", 6)
    assert lark_ends(text)


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ('start: ("a" | [b])\nb: "c"{2}', 5),
        ('start: "((" /([{:]\\/(/ <[1:2]>', 1),
        ("start: a // ((\n# ((\na: b", 2),
        ('start: %json {"a{": [1, {}]} (%json {"b": {"c": {}}} %regex {"a": 1})', 5),
        ('start: "\\"(" (', 2),
        ('start: <"> ( <"> (', 3),
        ("start: /\n/ ((", 3),
        ("start: T\nT: ~(~/a/)", 5),
        ("start: %json { (", 1),
    ],
)
def test_levels_are_counted(text: str, levels: int) -> None:
    assert count_levels(text) == levels


MANY = 60_000
TOO_DEEP = {
    "brackets": "start: " + "(" * MANY + ",",
    "options": "start: " + "[" * MANY + ",",
    "templates": "start: " + "a{" * MANY,
    "negations": "start: T\nT: " + "~" * MANY,
    "rules": "start: a0\n" + "\n".join(f"a{n}: a{n + 1}" for n in range(15_000)),
    "terminals": "start: A0\n" + "\n".join(f"A{n}: A{n + 1}" for n in range(15_000)),
    "schema": "start: %json [" + "{}," * 12_000 + "{}]",
    "gbnf": "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1}" for n in range(12_000)) + '\nr12000 ::= "a"',
}  # fmt: skip


@pytest.mark.parametrize("text", TOO_DEEP.values(), ids=TOO_DEEP)
def test_too_many_levels_are_refused(text: str) -> None:
    with refuses(BadRequest, "structured_outputs.grammar"):
        lark(wish("grammar", text))


def link(number: int) -> dict[str, Any]:
    """Return a definition that refers to the next one, and the last one to none."""
    following = {"$ref": f"#/$defs/d{number + 1}"} if number + 1 < MOST // 3 else {"type": "null"}
    return {"type": "object", "properties": {"a": following}}


MOST = MOST_LEVELS - 10
DEEPEST = {
    "brackets": "start: " + "(" * MOST + ",",
    "options": "start: " + "[" * MOST + ",",
    "templates": "start: " + "a{" * MOST,
    "rules": "start: a0\n" + "\n".join(f"a{n}: a{n + 1}" for n in range(MOST)) + f'\na{MOST}: "a"',
    "terminals": "start: A0\n"
    + "\n".join(f'A{n}: "a" A{n + 1} | "b"' for n in range(MOST))
    + f'\nA{MOST}: "a"',
    "conditions": 'start: a::1\na::_: "a" %if ' + "not(" * MOST + ",",
    "schemas": "start: %json "
    + json.dumps({"$ref": "#/$defs/d0", "$defs": {f"d{n}": link(n) for n in range(MOST // 3)}}),
}
# What overflows a stack ends the process, so it is another one.
COMPILE = """
import asyncio, sys

from motet_llm.grammar import compiler
from motet_llm.grammar.token_spelling import Spelling
from motet_shared.errors import MotetError
from motet_shared.messages import Grammar
from support.checkpoints import tiny_tokenizers

compiler.STACK_BYTES //= 4


async def main():
    spelling = Spelling(tiny_tokenizers.byte_level(), 420, [tiny_tokenizers.EOS])
    grammars = compiler.GrammarCache(lambda: spelling, timeout=100, capacity=8)
    try:
        await grammars.grammar_state(Grammar(kind="grammar", text=sys.stdin.read()))
        print("compiled")
    except MotetError as error:
        print(error.code)
    grammars.close()


asyncio.run(main())
"""


@pytest.mark.parametrize("text", DEEPEST.values(), ids=DEEPEST)
def test_a_quarter_of_the_stack_holds_the_most_levels(text: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", COMPILE]
    ended = subprocess.run(
        command, env=env, input=text, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() in ("compiled", "invalid_request")


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


async def test_a_grammar_is_not_to_blame_for_tokens_that_take_long_to_load(
    spelling: Spelling,
) -> None:
    def slow() -> Spelling:
        time.sleep(0.5)
        return spelling

    grammars = GrammarCache(slow, timeout=0.1, capacity=8)
    try:
        with refuses(Overloaded, "structured_outputs.regex"):
            await grammars.grammar_state(wish("regex", "abc"))
    finally:
        grammars.close()


class Held:
    """Compiles a grammar when `go_on` is set; `begun` has the texts of those that have begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.go_on = threading.Event()
        monkeypatch.setattr(compiler, "Grammar", self._compile)

    def _compile(self, constraint: messages.Grammar, spelling: Spelling) -> Grammar:
        self.begun.append(constraint.text)
        self.go_on.wait(60)
        return Grammar(constraint, spelling)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    yield held
    held.go_on.set()


async def test_what_takes_too_long_is_refused_and_what_waits_for_it_is_not_to_blame(
    spelling: Spelling, held: Held
) -> None:
    grammars = GrammarCache(lambda: spelling, timeout=0.5, capacity=8)
    try:
        asked = [grammars.grammar_state(wish("regex", text)) for text in "abcde"]
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(error) for error in errors] == [BadRequest] * 2 + [Overloaded] * 3
        held.go_on.set()
        assert await grammars.grammar_state(wish("regex", "c"))
        assert sorted(held.begun) == ["a", "b", "c"]  # what no request awaits is not begun
        assert grammars.stats()["grammars_refused"] == 0
    finally:
        grammars.close()


async def test_a_grammar_keeps_its_turn_while_a_request_awaits_it(
    spelling: Spelling, held: Held
) -> None:
    grammars = GrammarCache(lambda: spelling, timeout=60, capacity=8)
    try:
        others = [asyncio.create_task(grammars.grammar_state(wish("regex", x))) for x in "ab"]
        patient = asyncio.create_task(grammars.grammar_state(wish("regex", "c")))
        with pytest.raises(DeadlineExceeded):
            await grammars.grammar_state(wish("regex", "c"), deadline=time.monotonic() + 0.2)
        held.go_on.set()
        assert await patient
        await asyncio.gather(*others)
        assert sorted(held.begun) == ["a", "b", "c"]
    finally:
        grammars.close()


async def test_a_compiled_grammar_begins_a_reply_while_all_others_compile(
    spelling: Spelling, held: Held
) -> None:
    grammars = GrammarCache(lambda: spelling, timeout=60, capacity=8)
    try:
        held.go_on.set()
        await grammars.grammar_state(wish("regex", "known"))
        held.go_on.clear()
        slow = [
            asyncio.create_task(grammars.grammar_state(wish("regex", tenant), tenant=tenant))
            for tenant in "abc"
        ]
        while len(held.begun) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            assert await grammars.grammar_state(wish("regex", "known"))
        held.go_on.set()
        await asyncio.gather(*slow)
    finally:
        grammars.close()
