"""The table of hints: what is ignored, what it never touches, and what clients can put into header and log."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_gateway.openai import schema
from motet_gateway.openai.hints import HINTS, Ignored
from motet_gateway.realtime import events
from motet_shared.errors import BadRequest, MalformedMessage, UnsupportedParameter
from support.clients.gateway_client import HELLO, Http, World, world


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": HELLO, **fields}).encode()


def _nested(path: str, value: Any) -> dict[str, Any]:
    """A document that has `value` at a path of the table."""
    name, _, rest = path.partition(".")
    inner = _nested(rest, value) if rest else value
    return {name.removesuffix("[]"): [inner] if name.endswith("[]") else inner}


@pytest.mark.parametrize("hint", HINTS, ids=lambda hint: f"{hint.path}-{hint.on[0]}")
def test_each_hint_is_taken_out_and_named_once(hint: Any) -> None:
    value = {"any": "thing"} if hint.values is None else hint.values[0]
    for surface in hint.on:
        document = _nested(hint.path, value)
        ignored = Ignored(surface)
        assert ignored.prune(document)
        assert ignored.names == hint.path
        assert not Ignored(surface).prune(document)


@pytest.mark.parametrize(
    "hint", [hint for hint in HINTS if hint.values], ids=lambda hint: hint.path
)
def test_other_values_are_left_to_be_refused(hint: Any) -> None:
    for other in ("nonsense", 0, 7, ["x"]):
        if not hint.covers(other):
            assert not Ignored(hint.on[0]).prune(_nested(hint.path, other))


def test_a_request_is_the_same_without_its_hints() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ]
    dressed = json.loads(json.dumps(history))
    dressed[0]["content"][0]["cache_control"] = {"type": "ephemeral"}
    dressed[0]["id"] = "msg"
    dressed[1]["tool_calls"][0]["index"] = 0
    dressed[1] |= {"reasoning_details": "hm", "annotations": [{"type": "url_citation"}]}
    ignored = Ignored("chat")
    plain = schema.parse_chat(body(messages=history, logit_bias={"5": 1}, seed=2**62))
    given_ = schema.parse_chat(
        body(messages=dressed, logit_bias={"5": 1}, seed=2**62, chat_id="c"), ignored
    )
    assert given_ == plain
    assert set(ignored.paths) == {
        "chat_id",
        "messages[].id",
        "messages[].content[].cache_control",
        "messages[].tool_calls[].index",
        "messages[].reasoning_details",
        "messages[].annotations",
    }


def test_fields_that_the_schema_has_are_named_and_cleared() -> None:
    ignored = Ignored("chat")
    request = schema.parse_chat(
        body(metadata={"a": "b"}, store=False, verbosity="low", prompt_cache_key="k"), ignored
    )
    assert (request.metadata, request.store, request.verbosity, request.prompt_cache_key) == (
        None,
    ) * 4
    assert set(ignored.paths) == {"metadata", "store", "verbosity", "prompt_cache_key"}
    kept = Ignored("chat")
    assert schema.parse_chat(body(user="u", service_tier="flex"), kept).user == "u"
    assert not kept.paths


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"chat_id": "c", "bogus": 1}, "bogus"),
        ({"chat_id": "c", "temperature": 9}, "temperature"),
        ({"echo": True}, "echo"),
        ({"messages": [{**HELLO[0], "id": "x", "bogus": 1}]}, "messages[0].bogus"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        schema.parse_chat(body(**fields), Ignored("chat"))
    assert caught.value.param == param


def test_strict_refuses_all() -> None:
    for fields in (
        {"chat_id": "c"},
        {"verbosity": "high"},
        {"messages": [{**HELLO[0], "id": "x"}]},
    ):
        with pytest.raises(UnsupportedParameter):
            schema.parse_chat(body(**fields))


@pytest.mark.parametrize(
    "data", [b'{"chat_id": 1, "model": "m", ', b'{"chat_id": "\xff"}', b'{"a":' + b"[" * 9999]
)
def test_what_is_no_json_is_refused_as_such(data: bytes) -> None:
    with pytest.raises((MalformedMessage, BadRequest)):
        schema.parse_chat(data, Ignored("chat"))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["messages", "content", "id", "tools", "session", "\r\nx: 1", "audio"]),
            inner,
        )
    ),
    max_leaves=20,
)


@given(_JSON, st.sampled_from(["chat", "images", "realtime"]))
def test_no_word_of_a_client_comes_into_the_header(document: Any, surface: Any) -> None:
    ignored = Ignored(surface)
    ignored.prune(document)
    assert set(ignored.paths) <= {hint.path for hint in HINTS}
    assert ignored.names.isprintable()
    assert len(ignored.names) < 4096


def test_events_lose_their_hints() -> None:
    text = json.dumps(
        {
            "type": "session.update",
            "session": {
                "tracing": "auto",
                "audio": {"input": {"noise_reduction": {"type": "far_field"}}},
            },
        }
    )
    ignored = Ignored("realtime")
    event: Any = events.decode(text, ignored)
    assert set(ignored.paths) == {"session.tracing", "session.audio.input.noise_reduction"}
    assert not isinstance(event.session.tracing, str)


# ---------------------------------------------------------------------------------------------------------------- http
async def test_the_header_comes_with_errors_too_and_strict_has_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        async with world() as made:
            refused = await made.ask(chat_id="c", max_tokens=5, min_tokens=9).done()
            assert (refused.status, refused.headers["motet-ignored"]) == (400, "chat_id")
            spoken = await made.ask("/v1/embeddings", input="x", user="u").done()
            assert spoken.headers["motet-ignored"] == "user"
            assert "motet-ignored" not in (await made.ask().done()).headers
        async with world(strict=True) as made:
            strict = await made.ask(chat_id="c").done()
    assert (strict.status, strict.json()["error"]["param"]) == (400, "chat_id")
    assert "motet-ignored" not in strict.headers
    told = [record for record in caplog.records if getattr(record, "param", None) == "min_tokens"]
    assert [(vars(record)["status"], vars(record)["code"]) for record in told] == [
        (400, "invalid_request")
    ]


async def test_the_log_of_a_refusal_is_one_line_without_the_value() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign,assignment]
    logger = logging.getLogger("motet_gateway.http.problems")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        async with world() as made:
            await _refused(made, {"temperature": "secret words"})
            await _refused(made, {"x\nforged line " + "y" * 5000: 1})
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    lines = [record.getMessage() for record in records]
    assert len(lines) == 2
    assert "secret" not in lines[0]
    assert all(line.isprintable() and len(line) < 700 for line in lines)


async def _refused(made: World, fields: dict[str, Any]) -> None:
    http: Http = await made.ask(**fields).done()
    assert http.status == 400
