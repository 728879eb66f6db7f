"""Formats of tool calls: conversations as models write them, cut at every character."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_llm.grammar.grammar import Grammar
from motet_llm.grammar.token_spelling import Spelling
from motet_shared.errors import ConfigError, UnsupportedParameter
from motet_shared.messages import Chat, Sampling
from motet_shared.tool_formats.parameter_calls import parameter_value
from motet_shared.tool_formats.parser import ToolParser
from motet_shared.tool_formats.registry import FORMATS, NAMES, TAGS, detect_format, find_format
from motet_shared.tool_formats.tool import Tool
from motet_shared.tool_formats.tool_format import ToolFormat
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.dialect import Dialect
from motet_tokenizer.encoding.vocabulary import Vocabulary
from motet_tokenizer.tool_grammar import grammar_of
from support.checkpoints import tiny_tokenizers
from support.families import chat_templates

SHAPE = {
    "type": "object",
    "properties": {
        "shape": {"type": "string", "enum": ["circle", "star"]},
        "label": {"type": "string"},
        "size": {"type": "integer"},
        "at": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["shape"],
}
TOOLS = [
    {"type": "function", "function": {"name": "draw", "parameters": SHAPE}},
    {"type": "function", "function": {"name": "stop"}},
]
FUNCTIONS = [Tool.of(tool) for tool in TOOLS]
LABEL = 'a "star" {[ <b> é\nsecond line'
Calls = list[tuple[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """A reply as a model writes it. valid: the grammar of the format accepts it."""

    format: str
    reply: str
    text: str
    calls: Calls = field(default_factory=list)
    valid: bool = True


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(name: str, arguments: dict[str, Any]) -> str:
    body = written({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def mistral(*calls: tuple[str, dict[str, Any]]) -> str:
    bodies = [written({"name": name, "arguments": arguments}) for name, arguments in calls]
    return f"[TOOL_CALLS] [{', '.join(bodies)}]"


def mistral_v11(name: str, arguments: dict[str, Any]) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{written(arguments)}"


def llama3(*calls: tuple[str, dict[str, Any]]) -> str:
    bodies = [written({"name": name, "parameters": arguments}) for name, arguments in calls]
    return "; ".join(bodies)


def deepseek_v3(*calls: tuple[str, dict[str, Any]]) -> str:
    return _deepseek([
        f"function<｜tool▁sep｜>{name}\n```json\n{written(arguments)}\n```" for name, arguments in calls
    ], "\n")  # fmt: skip


def deepseek_v31(*calls: tuple[str, dict[str, Any]]) -> str:
    return _deepseek([f"{name}<｜tool▁sep｜>{written(arguments)}" for name, arguments in calls], "")


def _deepseek(bodies: list[str], between: str) -> str:
    calls = between.join(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>" for body in bodies)
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


def qwen3_coder(name: str, arguments: dict[str, Any]) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{raw(value)}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def glm4(name: str, arguments: dict[str, Any]) -> str:
    parameters = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{raw(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{parameters}</tool_call>"


def kimi_k2(*calls: tuple[str, dict[str, Any]]) -> str:
    bodies = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{written(arguments)}"
        "<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{bodies}<|tool_calls_section_end|>"


def granite(*calls: tuple[str, dict[str, Any]]) -> str:
    bodies = [written({"name": name, "arguments": arguments}) for name, arguments in calls]
    return f"<|tool_call|>[{', '.join(bodies)}]"


def phi4(*calls: tuple[str, dict[str, Any]]) -> str:
    return granite(*calls) + "<|/tool_call|>"


def minimax(*calls: tuple[str, dict[str, Any]]) -> str:
    invokes = ""
    for name, arguments in calls:
        parameters = "".join(
            f'<parameter name="{key}">{raw(value)}</parameter>\n'
            for key, value in arguments.items()
        )
        invokes += f'\n<invoke name="{name}">\n{parameters}</invoke>'
    return f"<minimax:tool_call>{invokes}\n</minimax:tool_call>"


def pythonic(*calls: tuple[str, dict[str, Any]]) -> str:
    bodies = [
        f"{name}({', '.join(f'{key}={written(value)}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    return f"[{', '.join(bodies)}]"


def glm47(name: str, arguments: dict[str, Any]) -> str:
    return glm4(name, arguments).replace("\n<", "<").replace(f"{name}\n", name)


def raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


STAR: dict[str, Any] = {"shape": "star", "label": LABEL, "size": 3, "at": [1, -2]}
CIRCLE = {"shape": "circle"}
BOTH: Calls = [("draw", CIRCLE), ("stop", {})]


def conversations(
    name: str, write: Callable[[str, dict[str, Any]], str], both: str = ""
) -> list[Conversation]:
    """Return replies that every format can write. both: two calls, if not one per line."""
    both = both or f"{write('draw', CIRCLE)}\n{write('stop', {})}"
    return [
        Conversation(name, write("draw", STAR), "", [("draw", STAR)]),
        Conversation(name, write("stop", {}), "", [("stop", {})]),
        Conversation(name, both, "", BOTH),
        Conversation(name, f"I draw.\n{both}\n", "I draw.", BOTH),
        Conversation(name, "No call: a < b, <tool, [TOOL, {}", "No call: a < b, <tool, [TOOL, {}"),
        Conversation(name, " spaces \n around ", " spaces \n around "),
    ]


CONVERSATIONS = [
    *conversations("hermes", hermes),
    Conversation(
        "hermes", "a\n<tool_call>\nno\n</tool_call> b", "a\n<tool_call>\nno\n</tool_call> b", valid=False
    ),
    *conversations("qwen3_coder", qwen3_coder),
    Conversation(
        "qwen3_coder",
        "<tool_call>\n<function=draw>\n<parameter=shape>\nstar\n</parameter>\n</tool_call>x",
        "x",
        [("draw", {"shape": "star"})],
        valid=False,
    ),
    Conversation("qwen3_coder", "a <tool_call> b", "a <tool_call> b", valid=False),
    *conversations("glm4", glm4),
    Conversation("glm4", '<tool_call>{"name"', '<tool_call>{"name"', valid=False),
    *conversations("deepseek_v3", lambda *call: deepseek_v3(call), deepseek_v3(*BOTH)),
    *conversations("deepseek_v31", lambda *call: deepseek_v31(call), deepseek_v31(*BOTH)),
    Conversation(
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>no call",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>no call",
        valid=False,
    ),
    *conversations("mistral", lambda *call: mistral(call), mistral(*BOTH)),
    Conversation(
        "mistral",
        '[TOOL_CALLS][{"name": "stop", "arguments": {}, "id": "abc"}, {"name": "stop", "arguments": {}}]',
        "",
        [("stop", {})] * 2,
        valid=False,
    ),
    Conversation("mistral", "[TOOL_CALLS] none", "[TOOL_CALLS] none", valid=False),
    *conversations(
        "mistral_v11", mistral_v11, mistral_v11("draw", CIRCLE) + mistral_v11("stop", {})
    ),
    Conversation(
        "mistral_v11", "[TOOL_CALLS]stop[CALL_ID]a1[ARGS]{}", "", [("stop", {})], valid=False
    ),
    *[
        one
        for one in conversations("llama3", lambda *call: llama3(call), llama3(*BOTH))
        if not one.text.startswith("I ")
    ],
    Conversation(
        "llama3",
        '{"type": "function", "name": "stop", "parameters": {}}',
        "",
        [("stop", {})],
        valid=False,
    ),
    Conversation(
        "llama3", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', valid=False
    ),
    Conversation("llama3", ' {"a": 1}', ' {"a": 1}', valid=False),
    Conversation("llama3", f"Say {llama3(*BOTH)}", f"Say {llama3(*BOTH)}"),
    Conversation(
        "llama3", '{"name": "stop", "arguments": {}}', "", [("stop", {})], valid=False
    ),
    Conversation("llama3", llama3(*BOTH).replace("; ", "\n"), "", BOTH, valid=False),
    Conversation("glm4", glm47("draw", STAR), "", [("draw", STAR)]),
    Conversation("glm4", glm47("stop", {}), "", [("stop", {})]),
    *conversations("kimi_k2", lambda *call: kimi_k2(call), kimi_k2(*BOTH)),
    Conversation("kimi_k2", kimi_k2(*BOTH).replace("functions.", ""), "", BOTH, valid=False),
    *conversations("granite", lambda *call: granite(call), granite(*BOTH)),
    *conversations("phi4", lambda *call: phi4(call), phi4(*BOTH)),
    Conversation("phi4", phi4(*BOTH)[:-14] + " x", "x", BOTH, valid=False),
    *conversations("minimax", lambda *call: minimax(call), minimax(*BOTH)),
    Conversation("minimax", minimax(BOTH[0])[:-20], "", BOTH[:1], valid=False),
    Conversation("minimax", minimax(*BOTH)[:-20] + "x", "x", BOTH, valid=False),
    *[
        one
        for one in conversations("pythonic", lambda *call: pythonic(call), pythonic(*BOTH))
        if not one.text.startswith("I ")
    ],
    Conversation(
        "pythonic",
        "[draw(shape='st\\x61r', label='it\\'s \\/', size = 3 ,at=[1,(2)]), stop( )]",
        "",
        [("draw", {"shape": "star", "label": "it's \\/", "size": 3, "at": [1, 2]}), ("stop", {})],
        valid=False,
    ),
    Conversation(
        "pythonic", '[draw("""a "b", c""", None, True, 1e999)]', "",
        [("draw", {"shape": 'a "b", c', "label": None, "size": True, "at": "1e999"})], valid=False,
    ),
    Conversation("pythonic", '[draw(shape="a", x=b"y"', "", [("draw", None)], valid=False),
    Conversation("pythonic", "[paint(a=1)]", "[paint(a=1)]", valid=False),
    Conversation("pythonic", "[1, 2] is a list", "[1, 2] is a list", valid=False),
    Conversation("pythonic", f"Say {pythonic(*BOTH)}", f"Say {pythonic(*BOTH)}"),
]  # fmt: skip
# By format: the reply that calls `draw` with each of these arguments.
WRITERS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "hermes": lambda calls: "\n".join(hermes("draw", one) for one in calls),
    "qwen3_coder": lambda calls: "\n".join(qwen3_coder("draw", one) for one in calls),
    "glm4": lambda calls: "\n".join(glm4("draw", one) for one in calls),
    "deepseek_v3": lambda calls: deepseek_v3(*[("draw", one) for one in calls]),
    "deepseek_v31": lambda calls: deepseek_v31(*[("draw", one) for one in calls]),
    "mistral": lambda calls: mistral(*[("draw", one) for one in calls]),
    "mistral_v11": lambda calls: "".join(mistral_v11("draw", one) for one in calls),
    "llama3": lambda calls: llama3(*[("draw", one) for one in calls]),
    "kimi_k2": lambda calls: kimi_k2(*[("draw", one) for one in calls]),
    "granite": lambda calls: granite(*[("draw", one) for one in calls]),
    "phi4": lambda calls: phi4(*[("draw", one) for one in calls]),
    "minimax": lambda calls: minimax(*[("draw", one) for one in calls]),
    "pythonic": lambda calls: pythonic(*[("draw", one) for one in calls]),
}
# Formats whose calls stand in the text; the others are tested with their reasoning.
IN_TEXT = tuple(one.name for one in FORMATS if one.parser is not None)
CASES = [pytest.param(one, id=f"{one.format}-{number}") for number, one in enumerate(CONVERSATIONS)]


class Client:
    """Join what a parser emits, as a client does."""

    def __init__(self, tool_format: ToolFormat):
        assert tool_format.parser is not None
        self.parser = tool_format.parser("r", FUNCTIONS)
        self.text = ""
        self.calls: list[list[str]] = []

    def feed(self, text: str) -> None:
        self._add(*self.parser.feed(text))

    def flush(self) -> None:
        self._add(*self.parser.flush())

    def _add(self, text: str, deltas: Any) -> None:
        self.text += text
        for delta in deltas or ():
            if delta.id:
                assert delta.index == len(self.calls)
                self.calls.append([delta.id, delta.name, ""])
            assert delta.index == len(self.calls) - 1
            self.calls[-1][2] += delta.arguments

    @property
    def state(self) -> tuple[str, list[list[str]], int]:
        return self.text, [list(call) for call in self.calls], self.parser.calls


def assert_independent_of_cuts(tool_format: ToolFormat, text: str) -> None:
    """Compare what has come out after every prefix with that of the prefix at once."""
    client = Client(tool_format)
    for end, character in enumerate(text, start=1):
        client.feed(character)
        at_once = Client(tool_format)
        at_once.feed(text[:end])
        assert client.state == at_once.state, text[:end]
    client.flush()
    whole = Client(tool_format)
    whole.feed(text)
    whole.flush()
    assert client.state == whole.state


@pytest.mark.parametrize("case", CASES)
def test_a_conversation_is_parsed(case: Conversation) -> None:
    text, calls = find_format(case.format).parse(case.reply, FUNCTIONS)
    assert text == case.text
    assert [(name, _loaded(arguments)) for name, arguments in calls] == case.calls


def _loaded(arguments: str) -> Any:
    """The arguments of a call; None if the reply ends within them."""
    try:
        return json.loads(arguments)
    except ValueError:
        return None


@pytest.mark.parametrize("case", CASES)
def test_cuts_do_not_matter(case: Conversation) -> None:
    assert_independent_of_cuts(find_format(case.format), case.reply)


@pytest.mark.parametrize("case", CASES)
def test_two_pieces_give_what_one_gives(case: Conversation) -> None:
    tool_format = find_format(case.format)
    whole = Client(tool_format)
    whole.feed(case.reply)
    whole.flush()
    for at in range(len(case.reply)):
        client = Client(tool_format)
        client.feed(case.reply[:at])
        client.feed(case.reply[at:])
        client.flush()
        assert client.state == whole.state, at


@pytest.mark.parametrize("name", IN_TEXT)
@settings(max_examples=40)
@given(data=st.data())
def test_cuts_of_anything_do_not_matter(name: str, data: st.DataObject) -> None:
    """Whatever a model puts together of the parts of its format, well-formed or not."""
    tool_format = find_format(name)
    replies = [one.reply for one in CONVERSATIONS if one.format == name]
    parts = st.sampled_from(
        [*tool_format.tags, *replies, "{", "}", "[", "]", '"', "\\", "\n", " ",
         ",", ";", "a", "draw", "<", '{"name": "draw", ', '"arguments": {"a": "b"}}', "{}"]
    )  # fmt: skip
    pieces = st.one_of(parts, st.sampled_from(replies).flatmap(_fragments))
    text = "".join(data.draw(st.lists(pieces, max_size=5)))
    assert_independent_of_cuts(tool_format, text)


def _fragments(reply: str) -> st.SearchStrategy[str]:
    bounds = st.tuples(st.integers(0, len(reply)), st.integers(0, len(reply)))
    return bounds.map(lambda two: reply[min(two) : max(two)])


@pytest.fixture(scope="module")
def spelling() -> Spelling:
    tokenizer = tiny_tokenizers.byte_level()
    return Spelling(tokenizer, tokenizer.get_vocab_size(), [tiny_tokenizers.EOS])


def accepts(spelling: Spelling, tool_format: ToolFormat, reply: str, **fields: Any) -> bool:
    """Return True if the grammar of such a request accepts the whole reply."""
    request = Chat(model="m", messages=[], sampling=Sampling(), **fields)
    grammar = grammar_of(request, TOOLS, Dialect(tool_format, None))
    assert grammar is not None
    state = Grammar(grammar, spelling).start()
    ids = tiny_tokenizers.byte_level().encode(reply, add_special_tokens=False).ids
    return state.accept(ids) and state.may_end


@pytest.mark.parametrize("case", CASES)
def test_the_grammar_accepts_valid_calls_only(case: Conversation, spelling: Spelling) -> None:
    tool_format, single = find_format(case.format), len(case.calls) < 2
    if single:
        accepted = accepts(spelling, tool_format, case.reply, parallel_tools=False)
        assert accepted == case.valid
    required = accepts(spelling, tool_format, case.reply, tool_choice="required")
    assert required == (case.valid and bool(case.calls) and not case.text)


@pytest.mark.parametrize("name", IN_TEXT)
def test_a_required_call_has_the_named_tool_and_its_arguments(
    name: str, spelling: Spelling
) -> None:
    tool_format = find_format(name)
    case = next(one for one in CONVERSATIONS if one.format == name and one.calls and not one.text)
    assert case.calls[0][0] == "draw"
    only = {"tool_choice": "required", "tool": "draw"}
    assert accepts(spelling, tool_format, case.reply, **only)
    assert not accepts(spelling, tool_format, case.reply.replace("star", "moon"), **only)
    assert not accepts(spelling, tool_format, case.reply, tool_choice="required", tool="stop")


def test_names_are_unique_and_tags_are_of_some_format() -> None:
    assert len(set(NAMES)) == len(FORMATS)
    assert {tag for one in FORMATS for tag in one.tags} == TAGS
    assert {one.format for one in CONVERSATIONS} == set(IN_TEXT)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("chatml", "hermes"),
        ("qwen3", "hermes"),
        ("gemma", None),
        ("harmony", "harmony"),
        ("mistral", "mistral"),
        ("deepseek", "deepseek_v3"),
        ("phi", "phi4"),
        ("granite", "granite"),
        ("glm", "glm4"),
    ],
)
def test_a_template_tells_its_format(family: str, name: str | None) -> None:
    found = detect_format(chat_templates.family(family).template)
    assert (None if found is None else found.name) == name


@pytest.mark.parametrize(
    ("excerpt", "name"),
    [
        ("<tool_call>\\n<function=' + name + '>\\n<parameter='", "qwen3_coder"),
        ("'<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments", "deepseek_v31"),
        ("'[TOOL_CALLS]' + name + '[ARGS]' + arguments", "mistral_v11"),
        ("{{- '\"parameters\": ' }}{{- arguments | tojson }}<|eot_id|>", "llama3"),
        ("{{- '\"parameters\": ' }}{{- arguments | tojson }}<|eot|>", "llama3"),
        (
            "Put it in the format of [func_name1(params_name1=params_value1...)]<|eot_id|>",
            "pythonic",
        ),
        ("'<|tool_calls_section_begin|>' + id + '<|tool_call_argument_begin|>'", "kimi_k2"),
        ("'<minimax:tool_call>' '<invoke name=\"' + name", "minimax"),
        ("", None),
    ],
)
def test_an_excerpt_of_a_template_tells_its_format(excerpt: str, name: str | None) -> None:
    found = detect_format(excerpt)
    assert (None if found is None else found.name) == name


def test_the_setting_names_a_format() -> None:
    for name in ("auto", *NAMES):
        assert TokenizerConfig(model=("m=/m",), tool_format=name).tool_format == name
    with pytest.raises(ConfigError) as raised:
        TokenizerConfig(model=("m=/m",), tool_format="morse")
    assert raised.value.param == "tool_format"


def test_the_setting_goes_before_the_template() -> None:
    tokenizer = chat_templates.family("mistral").tokenizer
    config = {"max_position_embeddings": 64, "vocab_size": len(tokenizer)}
    assert Vocabulary("m", tokenizer, config, {}).dialect.tool_format is find_format("mistral")
    chosen = Vocabulary("m", tokenizer, config, {}, tool_format="llama3")
    assert chosen.dialect.tool_format is find_format("llama3")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "\n5\n", "5"),
        ({"type": "integer"}, "\n5\n", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "5", 5),
        ({"enum": ["5", "6"]}, "5", "5"),
        ({}, '{"a": [1]}', {"a": [1]}),
        ({}, "plain", "plain"),
        ({"type": {"of": "nothing"}, "anyOf": 3, "enum": None}, "true", True),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
    ],
)
def test_the_schema_tells_strings_from_json(schema: dict[str, Any], text: str, value: Any) -> None:
    assert parameter_value(text, schema) == value


@pytest.mark.parametrize("name", ["qwen3_coder", "glm4"])
def test_raw_strings_cannot_be_held_to_a_pattern(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}
    request = Chat(model="m", messages=[], sampling=Sampling())
    for strict in (True, False):
        tools = [{"function": {"name": "f", "parameters": schema, "strict": strict}}]
        if not strict:
            assert grammar_of(request, tools, Dialect(find_format(name), None)) is None
            continue
        with pytest.raises(UnsupportedParameter) as raised:
            grammar_of(request, tools, Dialect(find_format(name), None))
        assert raised.value.param == "tools"


@pytest.mark.parametrize("name", IN_TEXT)
@settings(max_examples=30)
@given(
    calls=st.lists(
        st.fixed_dictionaries(
            {"shape": st.sampled_from(["circle", "star"])},
            optional={
                "label": st.text('ab"\\{}[]é\n ', min_size=1).map(lambda text: f"<{text}>"),
                "size": st.integers(-9, 9),
                "at": st.lists(st.integers(0, 9), max_size=3),
            },
        ),
        min_size=1,
        max_size=3,
    )
)
def test_what_is_written_is_read(name: str, calls: list[dict[str, Any]]) -> None:
    text, found = find_format(name).parse(WRITERS[name](calls), FUNCTIONS)
    assert text == ""
    assert [(one, json.loads(arguments)) for one, arguments in found] == [
        ("draw", arguments) for arguments in calls
    ]


class _Doubled(ToolParser):
    """Read an opening tag whose first character comes again."""

    opening = "<<call "

    def _parse_call(self) -> bool:
        return False

    def _end_call(self, rest: str) -> None:
        self._text.append(self._lead + rest)


@pytest.mark.parametrize("name", [name for name in IN_TEXT if name != "hermes"])
def test_a_name_without_end_is_no_call(name: str) -> None:
    cases = [one.values[0] for one in CASES]
    found = (
        case.reply
        for case in cases
        if isinstance(case, Conversation) and case.format == name and case.reply.count("draw") == 1
    )
    client = Client(find_format(name))
    client.feed(next(found).partition("draw")[0] + "d" * 1000)
    assert client.calls == []
    assert "d" * 1000 in client.text


def test_an_opening_is_held_back_from_its_first_character() -> None:
    parser = _Doubled("request")
    said = [parser.feed(character)[0] for character in "a << b <<call x"]
    assert "".join(said) == "a << b"
    assert parser.flush()[0] == " <<call x"
