"""Harmony: replies of gpt-oss, token by token, and the grammars of its answers and calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_llm.grammar.grammar import Grammar
from motet_llm.grammar.token_spelling import Spelling
from motet_shared import messages
from motet_shared.messages import Chat, Sampling
from motet_shared.reasoning.harmony import HARMONY, HarmonyParser
from motet_shared.reasoning.reasoning_format import Beginning
from motet_shared.reasoning.reply_parser import Parts
from motet_shared.tool_formats.harmony import HARMONY as CALLS
from motet_shared.tool_formats.tool import Tool
from motet_tokenizer.dialect import Dialect
from motet_tokenizer.tool_grammar import grammar_of
from support.families.chat_templates import family

FAMILY = family("harmony")
SHAPE = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "star"]}},
    "required": ["shape"],
}
TOOLS = [
    {"type": "function", "function": {"name": "draw", "parameters": SHAPE}},
    {"type": "function", "function": {"name": "stop"}},
]
THOUGHT = "<|channel|>analysis<|message|>Hm: assistantfinal {<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I draw.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.draw <|constrain|>json<|message|>{"shape": "star"}'
STOP = "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}"
MOON = CALL.replace("star", "moon")
STAR = [("draw", '{"shape": "star"}')]


@dataclass(frozen=True)
class Reply:
    """A reply as a model writes it; it ends with its text if the last token ends the stream."""

    reply: str
    reasoning: str = ""
    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    beginning: Beginning = Beginning.OPTIONAL
    tools: bool = True


REPLIES = [
    Reply(THOUGHT + FINAL + "A star.<|return|>", "Hm: assistantfinal {", "A star."),
    Reply(FINAL + "A star.", "", "A star."),
    Reply(THOUGHT + CALL, "Hm: assistantfinal {", "", STAR),
    Reply(THOUGHT + CALL + "<|call|>", "Hm: assistantfinal {", "", STAR),
    Reply(THOUGHT + PREAMBLE + CALL, "Hm: assistantfinal {", "I draw.", STAR),
    Reply(
        ' to=functions.draw<|channel|>commentary json<|message|>{"shape": "star"}<|call|>', "", "", STAR
    ),
    Reply("<|channel|>commentary to=functions.stop<|message|><|call|>", "", "", [("stop", "{}")]),
    Reply(
        CALL + "<|call|><|start|>assistant" + CALL, "", "", STAR * 2
    ),
    Reply(THOUGHT + CALL, 'Hm: assistantfinal {{"shape": "star"}', tools=False),
    Reply("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "1 + 1"),
    Reply("<|channel|>analysis<|message|>cut in", "cut in"),
    Reply("<|channel|>fin", ""),
    Reply("No header: to=functions.draw", "", "No header: to=functions.draw"),
    Reply(" to", "", " to"),
    Reply("rest.<|return|>", "", "rest.", beginning=Beginning.CLOSED),
    Reply(FINAL + "a <|end|> b<|constrain|>", "", "a "),
    Reply(FINAL + "a<|channel|>analysis<|message|>b", "b", "a"),
]  # fmt: skip
CASES = [pytest.param(one, id=str(number)) for number, one in enumerate(REPLIES)]


class Client:
    """Feed tokens as the tokenizer service does, and join what comes out."""

    def __init__(self, reply: Reply):
        functions = [Tool.of(tool) for tool in TOOLS] if reply.tools else []
        self.parser = HARMONY.parser(reply.beginning, "r", functions)
        self.reasoning = self.text = ""
        self.calls: list[tuple[str, str]] = []

    def feed(self, tokens: Sequence[str]) -> Client:
        for token in tokens:
            is_control = token.startswith("<|")
            self._add(self.parser.feed(token, "") if is_control else self.parser.feed("", token))
        return self

    def flush(self) -> Client:
        self._add(self.parser.flush(""))
        return self

    def _add(self, parts: Parts) -> None:
        self.reasoning += parts.reasoning
        self.text += parts.text
        for delta in parts.tools or ():
            if delta.id:
                assert delta.index == len(self.calls)
                self.calls.append((delta.name, ""))
            self.calls[-1] = self.calls[-1][0], self.calls[-1][1] + delta.arguments

    @property
    def state(self) -> tuple[str, str, list[tuple[str, str]]]:
        return self.reasoning, self.text, list(self.calls)


def tokens_of(reply: str) -> list[str]:
    """Control tokens, and each other character by itself."""
    ids = FAMILY.ids(reply)
    control = {FAMILY.ids(token)[0]: token for token in FAMILY.special}
    return [
        part
        for i in ids
        for part in ([control[i]] if i in control else FAMILY.tokenizer.decode([i]))
    ]


@pytest.mark.parametrize("case", CASES)
def test_a_reply_is_divided(case: Reply) -> None:
    client = Client(case).feed(tokens_of(case.reply)).flush()
    assert client.state == (case.reasoning, case.text, case.calls)
    assert client.parser.calls == len(case.calls)


@pytest.mark.parametrize("case", CASES)
def test_text_comes_out_with_its_token(case: Reply) -> None:
    """Nothing but a header is held back, so what a client has after n tokens tells the state."""
    tokens = tokens_of(case.reply)
    client = Client(case)
    for end in range(1, len(tokens) + 1):
        client.feed(tokens[end - 1 : end])
        again = Client(case).feed(tokens[:end])
        assert client.state == again.state
        assert client.parser.reasoning_tokens == again.parser.reasoning_tokens


def test_reasoning_is_counted_with_its_header() -> None:
    client = Client(REPLIES[0])
    tokens = tokens_of(REPLIES[0].reply)
    client.feed(tokens)
    assert client.parser.reasoning_tokens == tokens.index("<|end|>") + 1


def test_only_tokens_of_the_text_are_shown() -> None:
    parser = HarmonyParser(Beginning.OPTIONAL)
    shown = []
    for token in tokens_of(REPLIES[0].reply):
        is_control = token.startswith("<|")
        parser.feed(token if is_control else "", "" if is_control else token)
        if not parser.hides:
            shown.append(token)
    assert "".join(shown) == "A star."


@given(
    st.lists(
        st.sampled_from(
            [
                *FAMILY.special,
                "<|constrain|>",
                "assistant",
                "analysis",
                "final",
                " to=functions.x",
                "{}",
            ]
        ),
        max_size=12,
    )
)
def test_headers_never_leak(tokens: list[str]) -> None:
    """What comes out stands between `<|message|>` and the next control token of a message."""
    client = Client(REPLIES[0]).feed(["<|channel|>", *tokens]).flush()
    in_header, in_body, shown = True, False, ""
    for token in tokens:
        if token == "<|message|>":
            in_header, in_body = False, in_header or in_body
        elif token in ("<|start|>", "<|channel|>"):
            in_header, in_body = True, False
        elif token in ("<|end|>", "<|call|>", "<|return|>"):
            in_header, in_body = False, False
        elif in_body and not token.startswith("<|"):
            shown += token
    arguments = "".join([arguments for _, arguments in client.calls])
    joined = client.reasoning + client.text + arguments
    assert sorted(joined.replace("{}", "")) == sorted(shown.replace("{}", ""))


@pytest.mark.parametrize(
    ("prompt", "beginning"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", Beginning.OPTIONAL),
        ("<|start|>assistant<|channel|>final<|message|>Once", Beginning.CLOSED),
    ],
)
def test_a_prompt_tells_how_a_reply_begins(prompt: str, beginning: Beginning) -> None:
    assert HARMONY.beginning(prompt) is beginning


# ------------------------------------------------------------------------------------- grammars
@pytest.fixture(scope="module")
def spelling() -> Spelling:
    backend = FAMILY.tokenizer.backend_tokenizer
    return Spelling(backend, backend.get_vocab_size(), [FAMILY.tokenizer.eos_token_id])


def accepts(spelling: Spelling, grammar: messages.Grammar, reply: str) -> bool:
    state = Grammar(grammar, spelling).start()
    return state.accept(FAMILY.ids(reply)) and state.may_end


def framed(grammar: messages.Grammar | None, *, calls: bool) -> messages.Grammar:
    assert grammar is not None
    frame = HARMONY.frame(Beginning.OPTIONAL, calls=calls)
    return messages.Grammar(kind=grammar.kind, text=grammar.text, frame=frame)


def test_an_answer_is_held_to_its_grammar_on_its_channel(spelling: Spelling) -> None:
    grammar = framed(messages.Grammar(kind="json_schema", text=json.dumps(SHAPE)), calls=False)
    value = '{"shape": "star"}'
    for before in ("", THOUGHT, PREAMBLE, THOUGHT + PREAMBLE):
        assert accepts(spelling, grammar, before + FINAL + value)
        assert not accepts(spelling, grammar, before + FINAL + "no")
    typed = "<|channel|>final <|constrain|>json<|message|>"
    assert accepts(spelling, grammar, THOUGHT + typed + value)
    for wrong in (value, THOUGHT, THOUGHT + CALL, "Hm" + FINAL + value):
        assert not accepts(spelling, grammar, wrong)


@pytest.mark.parametrize(
    ("fields", "whole", "no"),
    [
        (
            {"tool_choice": "required"},
            [CALL, THOUGHT + CALL, STOP],
            [THOUGHT + FINAL + "Hi", MOON, CALL.replace("draw", "paint"), CALL + "<|call|>" + CALL],
        ),
        (
            {"tool_choice": "required", "tool": "draw"},
            [THOUGHT + CALL, ' to=functions.draw<|channel|>commentary json<|message|>{"shape": "star"}'],
            [CALL.replace("draw", "stop")],
        ),
        (
            {"parallel_tools": False},
            [THOUGHT + CALL, THOUGHT + FINAL + "Hi", PREAMBLE + CALL],
            [MOON],
        ),
        (
            {"grammar": messages.Grammar(kind="json_schema", text=json.dumps(SHAPE))},
            [THOUGHT + CALL, FINAL + '{"shape": "star"}'],
            [FINAL + "Hi", MOON],
        ),
    ],
)  # fmt: skip
def test_calls_are_held_to_their_schemas(
    fields: dict[str, Any], whole: list[str], no: list[str], spelling: Spelling
) -> None:
    chat = Chat(model="m", messages=[], sampling=Sampling(), **fields)
    grammar = framed(grammar_of(chat, TOOLS, Dialect(CALLS, None)), calls=True)
    assert [accepts(spelling, grammar, reply) for reply in whole] == [True] * len(whole)
    assert [accepts(spelling, grammar, reply) for reply in no] == [False] * len(no)


def test_a_call_with_reasoning_and_text_keeps_both_in_history() -> None:
    reply = {
        "role": "assistant",
        "content": "I draw.",
        "reasoning_content": "Hm.",
        "tool_calls": [{"function": {"name": "draw"}}],
    }
    kept = HARMONY.history(reply, FAMILY.template)
    assert (kept["content"], kept["reasoning_content"]) == ("", "Hm.\n\nI draw.")
    plain = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert HARMONY.history(plain, FAMILY.template) == plain
